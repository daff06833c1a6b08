"""A command that runs detached in a sandbox reached by exec only."""

from __future__ import annotations

import asyncio
import io
from collections.abc import Callable
from typing import Literal

from rollout_worker.sandboxes import scripts
from rollout_worker.sandboxes.port import Asked, Ended, Stream
from rollout_worker.sandboxes.reach import DroppedError, Shell
from rollout_worker.sandboxes.remote_files import RemoteFiles

_AHEAD = 4  # pieces of standard input that may wait in the sandbox to be read
_KILL = 9
_LEAST_S = 0.1


class Detached:
    """A detached command. Output is requested by offset, so a lost answer is requested again and nothing is lost or
    duplicated. `clear` is called when nobody waits for it any more."""

    def __init__(self, shell: Shell, directory: str, asked: Asked, clear: Callable[[], None]) -> None:
        self._shell = shell
        self._directory = directory
        self._asked = asked
        self._read = {"stdout": 0, "stderr": 0}
        self._wait_s = shell.reach.wait_s
        self._memory_was_hit = False
        self._clear = clear

    async def start(self, files: RemoteFiles, text: str, user: str, mark: str) -> None:
        data = text.encode(errors="surrogateescape")
        inline = len(data) <= self._shell.reach.bytes_in
        if not inline:
            await files.put(f"{self._directory}/command", io.BytesIO(data))
        script = scripts.start(self._directory, user, mark, fed=self._asked.stdin is not None, inline=inline)
        await self._shell.check(script, data if inline else b"")

    async def finish(self) -> Ended:
        if self._asked.stdin is None:
            return await self._end()
        sending = asyncio.ensure_future(self._send())
        ending = asyncio.ensure_future(self._end())
        try:
            await asyncio.wait([sending, ending], return_when=asyncio.FIRST_COMPLETED)
            if sending.done():
                sending.result()
            return await ending
        finally:
            for task in (sending, ending):
                task.cancel()
            await asyncio.wait([sending, ending])

    async def close(self) -> None:
        self._clear()

    async def limit(self, ended: Ended | None) -> Literal["memory", "storage"] | None:
        return "memory" if ended is not None and self._memory_was_hit else None

    async def _send(self) -> None:
        """Send standard input in pieces, never far ahead of the reader."""
        number = 0
        async for data in self._asked.pieces(self._shell.reach.bytes_in):
            script = scripts.feed(self._directory, number, len(data), _AHEAD)
            while await self._shell.check(script, data) == b"later":
                pass
            number += 1
        await self._shell.check(scripts.end_feed(self._directory, number))

    async def _end(self) -> Ended:
        while True:
            status, sizes = await self._poll(self._wait_s)
            if status is not None:
                await self._rest(sizes)
                return status

    async def drain(self) -> None:
        """Read what it had printed, once everything is killed."""
        _, sizes = await self._poll(0)
        await self._rest(sizes)

    async def _rest(self, sizes: tuple[int, int]) -> None:
        """Read up to these sizes and no further: processes it left running may go on printing."""
        while self._read["stdout"] < sizes[0] or self._read["stderr"] < sizes[1]:
            before = dict(self._read)
            await self._poll(0)
            if self._read == before:  # a process in the sandbox truncated the file
                return

    async def _poll(self, wait_s: float) -> tuple[Ended | None, tuple[int, int]]:
        out, err = self._read["stdout"], self._read["stderr"]
        most = self._shell.reach.bytes_out
        try:
            said = (await self._shell.once(scripts.poll(self._directory, out, err, wait_s, most))).out
            self._wait_s = min(2 * self._wait_s, self._shell.reach.wait_s)
        except DroppedError:  # perhaps because the connection was idle for so long
            self._wait_s = max(self._wait_s / 2, _LEAST_S)
            said = await self._shell.check(scripts.poll(self._directory, out, err, 0, most))
        head, _, data = said.partition(b"\n")
        sizes_and_counts, status = head.split()[:4], head.split()[4:]
        size_out, size_err, count_out, _ = map(int, sizes_and_counts)
        await self._feed("stdout", data[:count_out])
        await self._feed("stderr", data[count_out:])
        self._memory_was_hit = b"memory" in status[2:]
        return _ended(status), (size_out, size_err)

    async def _feed(self, stream: Stream, data: bytes) -> None:
        self._read[stream] += len(data)
        await self._asked.give(stream, data)


def _ended(words: list[bytes]) -> Ended | None:
    if not words:
        return None
    if words[0] == b"lost":  # its supervisor was killed, as by the deadline of another command
        return Ended(signal=_KILL)
    code = int(words[0])
    return Ended(signal=code - 128) if words[1] == b"signalled" else Ended(code)
