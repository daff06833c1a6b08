"""One command in a container: its input, its output, and its end."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from rollout_worker.sandboxes.engine_api import AttachedStream, Engine
from rollout_worker.sandboxes.port import Asked, Stream

_STREAMS: Mapping[int, Stream] = {1: "stdout", 2: "stderr"}
_QUIET_S = 0.1
_CHUNK = 1 << 16
_SAID_BYTES = 1 << 16


MARK = b"+\n"
"""First output of a command, which shows that it has begun; without it, the output is the engine's own message."""


class Attached:
    """A command that `await attached.finish()` runs. `begun` says whether its mark, which is no output, was read.

    `said` is what the engine printed instead of a command that never began.
    """

    def __init__(
        self,
        engine: Engine,
        exec_id: str,
        asked: Asked,
    ) -> None:
        self._engine = engine
        self._id = exec_id
        self._asked = asked
        self._reading: asyncio.Task[None] | None = None
        self._last = 0.0
        self._head = b""
        self.said = b""
        self._mark = asyncio.Event()

    @property
    def begun(self) -> bool:
        return self._mark.is_set()

    async def finish(self) -> int | None:
        """Return the exit code once all output is read, or None if unknown. Raises EngineError if it does not start."""
        async with self._engine.attached(self._id) as stream:
            self._reading = asyncio.ensure_future(self._read(stream))
            tasks: set[asyncio.Task[None]] = {self._reading}
            if self._asked.stdin is not None:
                tasks.add(asyncio.ensure_future(self._send(stream)))
            # Processes left behind may hold the streams open: only the engine knows when the command ended.
            looking = asyncio.ensure_future(self._engine.exit_code(self._id))
            try:
                while not self._reading.done() and not looking.done():
                    done, _ = await asyncio.wait({*tasks, looking}, return_when=asyncio.FIRST_COMPLETED)
                    for one in done - {looking}:
                        one.result()  # what `on_output` or stdin's source raised
                        tasks.discard(one)  # pyright: ignore[reportArgumentType]
                if not self._reading.done():
                    await self._read_rest()
            finally:
                for task in (*tasks, looking):
                    task.cancel()
                await asyncio.wait({*tasks, looking})
                if not looking.cancelled():
                    looking.exception()  # it is asked again below, where its error counts
        return await self._engine.exit_code(self._id)  # it may have closed its output and still run

    async def _read_rest(self) -> None:
        """Read the rest of the command's own output; processes that it left behind may print for ever."""
        assert self._reading is not None
        loop = asyncio.get_running_loop()
        until = loop.time() + 10 * _QUIET_S
        while not self._reading.done() and loop.time() < until:
            seen = self._last
            await asyncio.wait([self._reading], timeout=_QUIET_S)
            if self._last == seen:
                break
        if self._reading.done():
            self._reading.result()

    async def _read(self, stream: AttachedStream) -> None:
        while (piece := await stream.read()) is not None:
            self._last = asyncio.get_running_loop().time()
            name, data = _STREAMS.get(piece[0]), piece[1]
            if name is None:
                continue
            if not self.begun and (name != "stdout" or not self._begins(data)):
                if name != "stdout" or not MARK.startswith(self._head):
                    self.said += data[: _SAID_BYTES - len(self.said)]
                continue
            if self.said or self._head:  # an engine may pass on the streams in another order than they were written
                early, data, self._head, self.said = self.said, self._head[len(MARK) :], b"", b""
                await self._asked.give("stderr", early)
            await self._asked.give(name, data)

    def _begins(self, data: bytes) -> bool:
        """Return whether `data` completes the mark. `_head` then also has the output that came with it."""
        self._head += data
        if not self._head.startswith(MARK):
            return False
        self._mark.set()
        return True

    async def _send(self, stream: AttachedStream) -> None:
        await self._mark.wait()  # a command that cannot be started consumes no input
        async for piece in self._asked.pieces(_CHUNK):
            if not await stream.write(piece):
                return
        stream.end_input()
