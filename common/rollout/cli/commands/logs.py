"""`rollout logs`: what children of a run printed."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rollout.cli import streams
from rollout.cli.commands.events import EVERY_S, FollowOption, follow_or_ask, moment, rfc3339
from rollout.cli.commands.run import RunArgument
from rollout.cli.completion import complete_worker
from rollout.cli.options import CoordinatorOption, JsonOption, TlsDirOption
from rollout.cli.references import resolve_run, resolve_worker, short
from rollout.config.visible import visible

if TYPE_CHECKING:
    from rollout.client import Runs
    from rollout.wire.v1 import history_pb2 as pb

_ENDING_READS = 3
"""So often a run that has ended is asked again, from the last news on: workers ship the last lines a moment later."""
_SETTLES_MS = 2500
"""So long after a run's end its last lines may come, without `--follow` as well."""


@dataclass(frozen=True, slots=True)
class Line:
    """`row`: counted from 1; None: not known. `left_out`: (lines, bytes) that are missing here; no text then."""

    at_ms: int
    worker: str
    row: int | None
    attempt: int | None
    executor: str
    stream: str
    text: str
    left_out: tuple[int, int] | None = None


def logs(
    run: RunArgument,
    coordinator: CoordinatorOption = None,
    tls_dir: TlsDirOption = None,
    row: Annotated[
        int | None, typer.Option("--row", min=1, metavar="N", help="Only what was printed for this row.")
    ] = None,
    worker: Annotated[
        str,
        typer.Option("--worker", metavar="W", help="Only of this worker.", autocompletion=complete_worker),
    ] = "",
    follow: FollowOption = False,
    json: JsonOption = False,
) -> None:
    """What processes of a run printed: functions of `map`, engines, executors; of all workers, the newest last.

    Kept with the run, until it is deleted or newer runs need the room: the first MiB and the newest 7 MiB. A worker
    ships 60 KiB a second; where more was printed, a line says how much was left out. Lines of an engine belong to no
    row.

    --json: an object a line, `{time, run_id, worker_id, row, attempt, executor, stream, text}`, and where lines are
    missing `{..., left_out: {lines, bytes}}`. Keys are only ever added.
    """

    reader, worker_id = Reader(), ""

    async def show(client: Runs, *, follow: bool) -> None:
        nonlocal worker_id
        run_id = await resolve_run(client, run)
        if worker and not worker_id:
            worker_id = await resolve_worker(client, worker)
        async for line in printed(client, run_id, reader, follow=follow):
            if line.left_out is None and row is not None and line.row != row:
                continue
            if worker_id and line.worker not in ("", worker_id):
                continue
            sys.stdout.write((json_line(line, run_id) if json else text_line(line)) + "\n")
            sys.stdout.flush()

    follow_or_ask(coordinator, tls_dir, show, follow=follow)


async def printed(client: Runs, run_id: str, reader: Reader, *, follow: bool) -> AsyncIterator[Line]:
    """By time as far as it is there, then as it comes; with `follow` until the run has ended and all is read. Of a run
    that ended a moment ago all is read, too."""
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
        await asyncio.sleep(EVERY_S)
        more = True


async def _may_come(client: Runs, run_id: str) -> bool:
    """By the clocks of two hosts: where they differ, what `--follow` shows counts."""
    return abs(time.time() * 1000 - (await client.get(run_id)).ended_ms) < _SETTLES_MS


class Reader:
    """Chunks in their order. One that a worker shipped twice, since the answer was lost, counts once. `unshown`: what
    was read and not taken, which outlives a reading that is cut off."""

    def __init__(self) -> None:
        self.position = 0
        self.unshown: list[Line] = []
        self._seen: set[tuple[str, int]] = set()
        self._read: dict[str, int] = {}  # lines by worker, those that were left out included

    def take(self) -> list[Line]:
        """What was not shown, by time."""
        lines, self.unshown = sorted(self.unshown, key=lambda one: one.at_ms), []
        return lines

    def gap(self, chunk: pb.OutputChunk) -> Line | None:
        """What is not kept between the last chunk and this."""
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


def text_line(line: Line) -> str:
    from rollout.cli.words import counted
    from rollout.config.sentences import size

    if line.left_out is not None:
        lines, count = line.left_out
        amount = ", ".join([counted(lines, "line")] * (lines > 0) + [size(count)] * (count > 0))
        text = f"[{amount} left out here: too much was printed]"
        if not line.worker:
            return text
    else:
        text = visible(line.text)
    place = f"{moment(line.at_ms)}  {short(line.worker)}"
    return f"{place}  row {line.row}  {text}" if line.row is not None else f"{place}  {text}"


def json_line(line: Line, run_id: str) -> str:
    told: dict[str, Any] = {
        "time": rfc3339(line.at_ms) if line.at_ms else None,
        "run_id": run_id,
        "worker_id": line.worker or None,
        "row": line.row,
        "attempt": line.attempt,
        "executor": line.executor,
        "stream": line.stream,
        "text": line.text,
    }
    if line.left_out is not None:
        told["left_out"] = {"lines": line.left_out[0], "bytes": line.left_out[1]}
    return streams.json_line(told).rstrip("\n")
