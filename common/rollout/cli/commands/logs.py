"""`rollout logs`: what the child processes of a run printed."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rollout.cli import streams
from rollout.cli.commands.events import FollowOption, follow_or_ask, moment
from rollout.cli.commands.run import RunArgument
from rollout.cli.completion import complete_worker
from rollout.cli.options import CoordinatorOption, JsonOption, TlsDirOption
from rollout.cli.printed import Line, Reader, left_out_text, printed
from rollout.cli.references import resolve_run, resolve_worker, short
from rollout.config.visible import visible
from rollout.workloads.json_form import timestamp

if TYPE_CHECKING:
    from rollout.client import Runs


def logs(
    run: RunArgument,
    coordinator: CoordinatorOption = None,
    tls_dir: TlsDirOption = None,
    row: Annotated[int | None, typer.Option("--row", min=1, metavar="N", help="Only lines of this row.")] = None,
    worker: Annotated[
        str,
        typer.Option("--worker", metavar="W", help="Only lines of this worker.", autocompletion=complete_worker),
    ] = "",
    follow: FollowOption = False,
    json: JsonOption = False,
) -> None:
    """Print the output of a run's processes (functions of `map`, engines, executors) on all workers, the newest last.

    The first MiB and newest 7 MiB are kept while there is room. A worker sends 60 KiB per second; a line counts what
    was left out. Lines of an engine belong to no row.

    --json: an object per line, `{time, run_id, worker_id, row, attempt, executor, stream, text}`, or for missing lines
    `{..., left_out: {lines, bytes}}`. Keys are only ever added.
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


def text_line(line: Line) -> str:
    text = left_out_text(line) or visible(line.text)
    if line.left_out is not None and not line.worker:
        return text
    place = f"{moment(line.at_ms)}  {short(line.worker)}"
    return f"{place}  row {line.row}  {text}" if line.row is not None else f"{place}  {text}"


def json_line(line: Line, run_id: str) -> str:
    told: dict[str, Any] = {
        "time": timestamp(line.at_ms) if line.at_ms else None,
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
