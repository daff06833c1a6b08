"""An input that is followed (`[input] follow`): decides when to run again, and when to stop."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from pathlib import Path

from rollout.cli.progress import Display
from rollout.workloads.following import Seen, form_of, seen
from rollout.workloads.sections import QueuedInput

EVERY_S = 1.0
"""Seconds between two looks at the files."""


class FollowedInput:
    """Loop over a followed input: `while await goes_on()`, check the input, run new rows, and call `ran`."""

    def __init__(self, rows: QueuedInput, output: Path, display: Display) -> None:
        self._rows = rows
        self._output = output
        self._display = display
        self._ended = asyncio.Event()
        self._there: Seen = frozenset()
        self._began = 0.0  # of the turn
        self._came = 0.0  # when rows came last
        self._spent_s: float | None = None
        self.turn = 0
        """Number of turns that have begun."""

    @property
    def ending(self) -> bool:
        """Whether no further row is accepted."""
        return self._ended.is_set()

    def end(self) -> None:
        self._ended.set()

    def ran(self, spent_s: float) -> None:
        """Record that this turn ran rows, after `spent_s` seconds of finding them."""
        self._came, self._spent_s = asyncio.get_running_loop().time(), spent_s

    async def goes_on(self) -> bool:
        """Wait until files change, from the second turn on. Returns False after the command was told to end or the idle
        time."""
        now = asyncio.get_running_loop().time()
        self._came = self._came if self.turn else now
        if self.ending or (self.turn > 0 and not await self._more_came()):
            why = "it was told to" if self.ending else f"nothing has come for {self._rows.stop_when_empty_s:g} s"
            self._display.event("followed", f"the command ends, since {why}; given again, it goes on with what comes")
            return False
        self.turn += 1
        self._began, self._spent_s = asyncio.get_running_loop().time(), None
        self._there = await self._seen()
        return True

    async def _more_came(self) -> bool:
        files = ", ".join(self._rows.patterns)
        if self.turn == 1 or self._spent_s is not None:
            self._display.event("following", f"waiting for more rows in {files}; Ctrl-C ends it", files=files)
        if self._is_idle():
            return False  # also where files change, and no row comes
        # So that most of the time is left for the rows.
        spent_s = asyncio.get_running_loop().time() - self._began if self._spent_s is None else self._spent_s
        pause_s = max(EVERY_S, 2 * spent_s)
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(pause_s):
                    await self._ended.wait()
            if self.ending:
                return False
            if await self._seen() != self._there:
                return True
            if self._is_idle():
                return False
            pause_s = EVERY_S

    def _is_idle(self) -> bool:
        """Return whether nothing came for the configured idle time."""
        return 0 < self._rows.stop_when_empty_s <= asyncio.get_running_loop().time() - self._came

    async def _seen(self) -> Seen:
        return await asyncio.to_thread(seen, self._rows.patterns, form_of(self._rows), self._output)
