"""Ctrl-C: the first stops cleanly, or finishes what runs; the second stops at once. SIGTERM counts as Ctrl-C."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class Interrupted(BaseException):
    """The user asked to stop. It is no Exception, so that no handler takes it for a failure of its own."""


class Interrupts:
    """Handler of the two signals.

    `gently` is asked at the first: it returns True if the work will end by itself and raise Interrupted; else the work
    is cancelled. `at_once` runs at the second, which ends the process.
    """

    def __init__(self, at_once: Callable[[], None], gently: Callable[[], bool] = lambda: False) -> None:
        self._at_once = at_once
        self._gently = gently
        self._seen = False
        self._asked = asyncio.Event()

    def install(self) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._signalled)

    def _signalled(self) -> None:
        if self._seen:
            try:
                self._at_once()
                sys.stdout.flush()
            finally:
                os._exit(128 + signal.SIGINT)
        self._seen = True
        if not self._gently():
            self._asked.set()

    async def guard(self, work: Coroutine[Any, Any, T]) -> T:
        """Return the result of `work`. On a signal `work` is cancelled; Interrupted is raised once it has cleaned
        up."""
        task = asyncio.ensure_future(work)
        asked = asyncio.ensure_future(self._asked.wait())
        try:
            await asyncio.wait({task, asked}, return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                return task.result()
            task.cancel()
            # gather: also when the work ends otherwise meanwhile.
            (result,) = await asyncio.gather(task, return_exceptions=True)
            if isinstance(result, BaseException) and not isinstance(result, asyncio.CancelledError):
                raise result
            raise Interrupted
        finally:
            asked.cancel()
