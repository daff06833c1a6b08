"""Output of a run's processes, read from the ledger as it comes."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rollout.cli.words import counted
from rollout.config.sentences import size

if TYPE_CHECKING:
    from rollout.client import Runs
    from rollout.wire.v1 import history_pb2 as pb

_EVERY_S = 1.0
_ENDING_READS = 3
"""Number of reads after a run's end, counted from the last new line: workers send the last lines a moment later."""
_SETTLES_MS = 2500
"""Milliseconds after a run's end in which its last lines may come, without `--follow` too."""


@dataclass(frozen=True, slots=True)
class Line:
    """One line. `row` counts from 1, None if not known. `left_out` is (lines, bytes) missing here; `text` is empty
    then."""

    at_ms: int
    worker: str
    row: int | None
    attempt: int | None
    executor: str
    stream: str
    text: str
    left_out: tuple[int, int] | None = None


async def printed(client: Runs, run_id: str, reader: Reader, *, follow: bool) -> AsyncIterator[Line]:
    """Yield lines by time as far as they exist, then as they come.

    With `follow`, and for a run that ended a moment ago, it ends when the run has ended and all lines are read.
    """
    more, ending, ended = True, 0, False
    while True:
        position = reader.position
        while more:
            reply = await client.output(run_id, reader.position)
            more, ended = not reply.end, reply.run_ended
            for chunk in reply.chunks:
                if (gap := reader.gap(chunk)) is not None:
                    for line in reader.take():
                        yield line
                    reader.unshown.append(gap)
                reader.unshown += reader.lines(chunk, reply.root_log)
        ending = ending + 1 if ended and reader.position == position else 0
        for line in reader.take():
            yield line
        if ending >= _ENDING_READS or (not follow and not (ended and await _may_come(client, run_id))):
            return
        await asyncio.sleep(_EVERY_S)
        more = True


async def _may_come(client: Runs, run_id: str) -> bool:
    """Return whether lines may still come, by the clocks of two hosts; if they differ, only `--follow` shows all."""
    return abs(time.time() * 1000 - (await client.get(run_id)).ended_ms) < _SETTLES_MS


class Reader:
    """Reads chunks in order; a chunk that a worker sent twice because the answer was lost counts once.

    `unshown` are lines that were read but not taken; they survive a read that is cut off.
    """

    def __init__(self) -> None:
        self.position = 0
        self.unshown: list[Line] = []
        self._seen: set[tuple[str, int]] = set()
        self._read: dict[str, int] = {}  # lines by worker, those that were left out included

    def take(self) -> list[Line]:
        """Return the lines that were not shown, by time."""
        lines, self.unshown = sorted(self.unshown, key=lambda one: one.at_ms), []
        return lines

    def gap(self, chunk: pb.OutputChunk) -> Line | None:
        """Return a line for what is missing between the last chunk and this one, or None."""
        missing = chunk.position - chunk.size - self.position
        return Line(0, "", None, None, "", "", "", (0, missing)) if missing > 0 else None

    def lines(self, chunk: pb.OutputChunk, root_log: int) -> list[Line]:
        from rollout.wire.v1 import history_pb2

        self.position = chunk.position
        output = history_pb2.OutputLines.FromString(chunk.lines)
        which = (chunk.worker, output.number)
        if which in self._seen:
            return []
        self._seen.add(which)
        found = [_line(one, chunk.worker, root_log) for one in output.lines]
        missing = output.lines_before - self._read.get(chunk.worker, 0)
        self._read[chunk.worker] = output.lines_before + sum(line.left_out[0] if line.left_out else 1 for line in found)
        if missing > 0 and found:  # in chunks that are not kept
            found.insert(0, Line(found[0].at_ms, chunk.worker, None, None, "", "", "", (missing, 0)))
        return found


def _line(one: pb.OutputLine, worker: str, root_log: int) -> Line:
    row = one.seq + 1 if one.log and one.log == root_log else None
    missing = bool(one.left_out_lines or one.left_out_bytes)
    return Line(
        one.at_ms,
        worker,
        row,
        one.attempt or None,
        one.executor,
        one.stream,
        one.text,
        (one.left_out_lines, one.left_out_bytes) if missing else None,
    )


def left_out_text(line: Line) -> str:
    """Return the text that stands for missing lines; empty for a normal line."""
    if line.left_out is None:
        return ""
    lines, count = line.left_out
    amount = ", ".join([counted(lines, "line")] * (lines > 0) + [size(count)] * (count > 0))
    return f"[{amount} left out here: too much was printed]"
