"""`rollout snapshot`: lists, shows, exports and prunes the snapshots of training runs."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rollout.cli.asking import ask, tell
from rollout.cli.commands.run import RunArgument
from rollout.cli.completion import complete_run
from rollout.cli.options import CoordinatorOption, JsonOption, TlsDirOption
from rollout.cli.program import new_app
from rollout.cli.references import short
from rollout.model.errors import UsageError
from rollout.workloads.train.config import MAX_AGE, age_s
from rollout.workloads.train.segment import Result

if TYPE_CHECKING:
    from rollout.client import Runs
    from rollout.client.snapshots import Snapshot

app = new_app(help="List, show, export and delete snapshots of training runs.")

IdArgument = Annotated[str, typer.Argument(metavar="ID", help="A prefix of the id in `snapshot list`.")]
_TELL_EVERY_S = 2.0


@app.command("list")
def list_snapshots(
    run: Annotated[
        str | None,
        typer.Option("--run", metavar="RUN", help="Only snapshots of this run.", autocompletion=complete_run),
    ] = None,
    coordinator: CoordinatorOption = None,
    tls_dir: TlsDirOption = None,
    json: JsonOption = False,
) -> None:
    """List the snapshots of a cluster or run, oldest first within a run.

    --json: `{"snapshots": [{"id", "kind", "run_id", "run", "step", "steps", "size", "created_at", "algorithm", "label",
    "evaluation", "weights_hash", "parts", "fingerprint"}]}`; keys are only ever added. `evaluation`: {step, loss} of
    the last evaluation so far, or null.
    """

    async def of_run(client: Runs, run_id: str) -> list[Snapshot]:
        from rollout.client.snapshots import snapshots_of

        return await snapshots_of(client, run_id)

    async def of_cluster(client: Runs) -> list[Snapshot]:
        from rollout.client.snapshots import all_snapshots

        return await all_snapshots(client)

    from rollout.cli import show
    from rollout.cli.anywhere import work_at_run
    from rollout.cli.words import when

    if run is None:
        found = ask(coordinator, tls_dir, of_cluster)
    else:
        found = work_at_run(coordinator, tls_dir, run, of_run, tell)
    if json:
        show.print_json({"snapshots": [_in_full(one) for one in found]})
        return
    if not found:
        typer.echo("no snapshots")
        return
    rows = [
        (
            one.short, short(one.run_id), one.run_name, result.algorithm, f"{one.step}/{result.steps}",
            _size(one.size), when(one.made_ms), _evaluation_loss(result), result.label,
        )
        for one in found
        for result in (Result(**one.result),)
    ]  # fmt: skip
    header = ("snapshot", "run", "name", "kind", "step", "size", "made", "eval loss", "label")
    columns = [column for column in zip(header, *rows, strict=True) if column[0] != "eval loss" or any(column[1:])]
    widths = [max(map(len, column)) for column in columns]
    for row in zip(*columns, strict=True):
        typer.echo("  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip())


@app.command("show")
def show_snapshot(
    snapshot: IdArgument,
    coordinator: CoordinatorOption = None,
    tls_dir: TlsDirOption = None,
    json: JsonOption = False,
) -> None:
    """Show a snapshot's run, step, and the hardware where results repeat to the byte.

    --json: one object of `snapshot list`.
    """

    async def read() -> Snapshot:
        from rollout.cli.anywhere import find_snapshot, places

        return (await find_snapshot(places(coordinator, tls_dir, tell), snapshot))[1]

    found = asyncio.run(read())
    from rollout.cli import show

    if json:
        show.print_json(_in_full(found))
        return
    for name, value in _in_full(found).items():
        if isinstance(value, dict):
            typer.echo(name)
            for key, inner in sorted(value.items()):  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType]
                typer.echo(f"  {key:<14} {inner}")
        elif value is not None:
            typer.echo(f"{name:<14} {value}")


@app.command("export")
def export(
    snapshot: IdArgument,
    output: Annotated[Path, typer.Option("--output", metavar="DIR", help="New directory to write.")],
    merged: Annotated[bool, typer.Option("--merged", help="Merge an adapter into the whole model.")] = False,
    coordinator: CoordinatorOption = None,
    tls_dir: TlsDirOption = None,
) -> None:
    """Write a snapshot's model as a directory that transformers and vLLM load.

    An adapter is written as peft reads it, or merged. If its run began with a snapshot, DIR/base has that model, and
    adapter_config.json its absolute path: edit it when you move DIR. A reward model is a sequence classifier whose
    logit is the score.
    """
    told = time.monotonic()

    def progress(done: int, total: int) -> None:
        nonlocal told
        if time.monotonic() - told >= _TELL_EVERY_S:
            told = time.monotonic()
            of = f"the snapshot: {_size(done)} of {_size(total)}" if total else f"its base model: {_size(done)}"
            tell(f"fetching {of}")

    async def write() -> Snapshot:
        from rollout.cli.anywhere import at_snapshot, places
        from rollout.workloads.train.commands.snapshots import export_snapshot

        async with at_snapshot(places(coordinator, tls_dir, tell), snapshot) as (_, client, found):
            await export_snapshot(client, found, output, tell, progress, merged=merged)
        return found

    found = asyncio.run(write())
    typer.echo(f"snapshot {found.short} (run {short(found.run_id)}, step {found.step}) is in {output}")


@app.command("prune")
def prune(
    run: RunArgument,
    keep_last: Annotated[
        int | None,
        typer.Option("--keep-last", min=1, metavar="N", help="Newest snapshots to keep; default: the run's setting."),
    ] = None,
    keep_labeled: Annotated[
        bool | None,
        typer.Option("--keep-labeled/--no-keep-labeled", help="Keep labeled snapshots; default: the run's setting."),
    ] = None,
    max_age: Annotated[
        str | None,
        typer.Option(
            "--max-age", metavar="AGE", help="Age from which to delete, such as 12h or 30d; default: the run's setting."
        ),
    ] = None,
    coordinator: CoordinatorOption = None,
    tls_dir: TlsDirOption = None,
    json: JsonOption = False,
) -> None:
    """Delete a run's older snapshots, by the rules of its [snapshots] or of these options.

    The newest always stays. Bytes that another run started from (fork, infer) stay as long as that run.

    --json: `{"pruned": [IDS], "objects_freed"}`.
    """
    import re

    if max_age is not None and not re.fullmatch(MAX_AGE, max_age):
        raise UsageError(f"--max-age: {max_age!r} is no age: a number and s, m, h, d or w, such as 30d")

    async def free(client: Runs, run_id: str) -> tuple[list[Snapshot], int]:
        from rollout.workloads.train.commands.snapshots import prune_snapshots

        seconds = None if max_age is None else age_s(max_age)
        return await prune_snapshots(
            client, run_id, keep_last=keep_last, keep_labeled=keep_labeled, max_age_s=seconds
        )  # fmt: skip

    from rollout.cli.anywhere import work_at_run

    gone, freed = work_at_run(coordinator, tls_dir, run, free, tell)
    if json:
        from rollout.cli import show

        show.print_json({"pruned": [one.id for one in gone], "objects_freed": freed})
        return
    kept = len({one.id for one in gone}) - freed
    more = f"; {kept} of them stay where they are, since other runs need them" if kept > 0 else ""
    typer.echo(f"pruned {len(gone)} snapshot{'' if len(gone) == 1 else 's'}{more}")


def _in_full(one: Snapshot) -> dict[str, Any]:
    from rollout.workloads.json_form import timestamp

    result = Result(**one.result)
    return {
        "id": one.id,
        "kind": one.kind,
        "run_id": one.run_id,
        "run": one.run_name,
        "step": result.step,
        "steps": result.steps,
        "size": result.size,
        "created_at": timestamp(one.made_ms),
        "algorithm": result.algorithm,
        "label": result.label,
        "evaluation": result.stopping.get("last_evaluation"),
        "weights_hash": result.weights,
        "parts": result.parts,
        "fingerprint": result.fingerprint,
    }


def _evaluation_loss(result: Result) -> str:
    """Return the loss of the last evaluation so far, with its step if that is an earlier one."""
    last = result.stopping.get("last_evaluation")
    if last is None:
        return ""
    return f"{last['loss']:.4f}" + (f" (step {last['step']})" if last["step"] != result.step else "")


def _size(size: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.0f} {unit}"
        size /= 1024
    return f"{size:.1f} GiB"
