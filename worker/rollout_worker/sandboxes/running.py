"""A command in a sandbox of this host: its pipes, its output, and its end."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable, Mapping
from functools import partial
from typing import Any, Literal

from rollout_worker.sandboxes import pipes
from rollout_worker.sandboxes.keeping import SandboxInit, body_of
from rollout_worker.sandboxes.port import Asked, Ended, Stream

_DRAIN_S = 5.0

Hits = tuple[int, int]
"""Kills by the storage limit, kills by the memory limit."""


class Running:
    """A running command: its pipes and its end."""

    def __init__(
        self,
        sandbox_init: SandboxInit,
        body: Mapping[str, Any],
        asked: Asked,
        hits: Callable[[], Hits],
        leave: Callable[[Running], None],
    ) -> None:
        """`hits` returns how often the limits killed processes. `leave` is called at the end, since processes left
        behind may go on printing; see `discard`."""
        stdin, captures = asked.stdin, asked.captures
        self._hits, self._before = hits, hits()
        self._leave = leave
        self._asked = asked
        self._stdin = -1
        self._outputs: dict[Stream, int] = {}
        passed: list[int] = []
        try:
            passed.append(body_of(body))
            if stdin is None:
                passed.append(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))
            else:
                reader, self._stdin = pipes.pipe()
                passed.append(reader)
            for stream in captures:
                reader, writer = pipes.pipe()
                self._outputs[stream] = reader
                passed.append(writer)
            self._ended = sandbox_init.ask("exec", passed)
        except BaseException:
            self._close()
            raise
        finally:
            for fd in passed:
                os.close(fd)
        self._input = asyncio.ensure_future(self._send(stdin)) if stdin is not None else None
        self._pumps = [asyncio.ensure_future(self._pump(stream)) for stream in captures]

    def _close(self) -> None:
        for fd in (self._stdin, *self._outputs.values()):
            if fd >= 0:
                os.close(fd)
        self._stdin = -1
        self._outputs = {}

    async def _send(self, source: bytes | AsyncIterator[bytes]) -> None:
        try:
            await pipes.write_all(self._stdin, source)
        finally:
            os.close(self._stdin)
            self._stdin = -1

    async def _pump(self, stream: Stream) -> None:
        await pipes.read_until(self._outputs[stream], self._ended, partial(self._asked.take, stream))

    async def finish(self) -> Ended:
        waited: set[asyncio.Future[Any]] = {*self._pumps, self._ended}
        if self._input is not None:
            waited.add(self._input)
        while not self._ended.done() or any(not pump.done() for pump in self._pumps):
            done, waited = await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
            for one in done:
                one.result()
        answer = self._ended.result()
        return Ended(answer.get("exit"), answer.get("signal"))

    async def drain(self) -> None:
        await asyncio.wait([self._ended])
        await asyncio.wait(self._pumps, timeout=_DRAIN_S)  # `on_output` may be stuck
        self._ended.result()

    async def limit(self, ended: Ended | None) -> Literal["memory", "storage"] | None:
        (storage, memory), (storage_before, memory_before) = self._hits(), self._before
        return "storage" if storage > storage_before else "memory" if memory > memory_before else None

    async def close(self) -> None:
        self._leave(self)

    async def discard(self) -> None:
        """Read and discard output until nobody can print any more."""
        try:
            waited = [*self._pumps, *([self._input] if self._input else [])]
            for task in waited:
                task.cancel()
            await asyncio.gather(*waited, return_exceptions=True)  # the first error was raised already
            outputs = [pipes.read_until(fd, None, lambda _: None) for fd in self._outputs.values()]
            await asyncio.gather(*outputs)
        finally:
            self._close()
