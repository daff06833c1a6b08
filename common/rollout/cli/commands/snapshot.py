"""`rollout snapshot ...`: what training runs keep, and models out of it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rollout.cli.commands.run import RunArgument, ask
from rollout.cli.completion import complete_run
from rollout.cli.options import CoordinatorOption, JsonOption, TlsDirOption
from rollout.cli.program import new_app
from rollout.cli.references import resolve_run, short

if TYPE_CHECKING:
    from rollout.client import Runs
    from rollout.client.snapshots import Snapshot

app = new_app(help="Snapshots of training runs: list, show, export and prune them.")

IdArgument = Annotated[str, typer.Argument(metavar="ID", help="The beginning of its id, as `snapshot list` shows it.")]


@app.command("list")
def list_snapshots(
    run: Annotated[
        str | None, typer.Option("--run", metavar="RUN", help="Of this run only.", autocompletion=complete_run)
    ] = None,
    coordinator: CoordinatorOption = None,
    tls_dir: TlsDirOption = None,
    json: JsonOption = False,
) -> None:
    """Every snapshot that is kept, oldest first within a run.

    --json: `{"snapshots": [{"id", "run_id", "run", "step", "steps", "size", "created_at", "algorithm", "label",
    "weights_hash", "fingerprint"}]}`; keys are only ever added.
    """

    async def read(client: Runs) -> list[Snapshot]:
        from rollout.client.snapshots import all_snapshots, snapshots_of

        return (
            await all_snapshots(client) if run is None else await snapshots_of(client, await resolve_run(client, run))
        )

    found = ask(coordinator, tls_dir, read)
    from rollout.cli import show

    if json:
        show.print_json({"snapshots": [_in_full(one) for one in found]})
        return
    if not found:
        typer.echo("no snapshots")
        return
    rows = [
        (one.short, short(one.run_id), one.run_name, f"{one.step}/{one.steps}", _size(one.size), one.label)
        for one in found
    ]
    header = ("snapshot", "run", "name", "step", "size", "label")
    widths = [max(len(row[i]) for row in (header, *rows)) for i in range(len(header))]
    for row in (header, *rows):
        typer.echo("  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip())


@app.command("show")
def show_snapshot(
    snapshot: IdArgument,
    coordinator: CoordinatorOption = None,
    tls_dir: TlsDirOption = None,
    json: JsonOption = False,
) -> None:
    """Which run and step a snapshot is of, and where the same input gives the same bytes.

    --json: one object of `snapshot list`.
    """

    async def read(client: Runs) -> Snapshot:
        from rollout.client.snapshots import find_snapshot

        return await find_snapshot(client, snapshot)

    found = ask(coordinator, tls_dir, read)
    from rollout.cli import show

    if json:
        show.print_json(_in_full(found))
        return
    for name, value in _in_full(found).items():
        if name == "fingerprint":
            typer.echo("fingerprint")
            for key, inner in sorted(value.items()):
                typer.echo(f"  {key:<14} {inner}")
        else:
            typer.echo(f"{name:<14} {value}")


@app.command("export")
def export(
    snapshot: IdArgument,
    output: Annotated[Path, typer.Option("--output", metavar="DIR", help="A new directory.")],
    coordinator: CoordinatorOption = None,
    tls_dir: TlsDirOption = None,
) -> None:
    """Write the model of a snapshot as a directory that transformers and vLLM load.

    Of a run that trained an adapter it is the adapter, as peft reads it.
    """

    async def write(client: Runs) -> Snapshot:
        from rollout.client.snapshots import export_snapshot, find_snapshot

        found = await find_snapshot(client, snapshot)
        await export_snapshot(client, found, output)
        return found

    found = ask(coordinator, tls_dir, write)
    typer.echo(f"snapshot {found.short} (run {short(found.run_id)}, step {found.step}) is in {output}")


@app.command("prune")
def prune(
    run: RunArgument,
    keep_last: Annotated[
        int, typer.Option("--keep-last", min=1, metavar="N", help="Snapshots of the run that stay.")
    ] = 3,
    coordinator: CoordinatorOption = None,
    tls_dir: TlsDirOption = None,
    json: JsonOption = False,
) -> None:
    """Free all but the last snapshots of a run. What an open run or an item names stays until that is over.

    --json: `{"pruned": [IDS], "objects_freed"}`.
    """

    async def free(client: Runs) -> tuple[list[Snapshot], int]:
        from rollout.client.snapshots import prune_snapshots

        return await prune_snapshots(client, await resolve_run(client, run), keep_last)

    gone, freed = ask(coordinator, tls_dir, free)
    if json:
        from rollout.cli import show

        show.print_json({"pruned": [one.id for one in gone], "objects_freed": freed})
        return
    typer.echo(f"pruned {len(gone)} snapshot{'' if len(gone) == 1 else 's'}")


def _in_full(one: Snapshot) -> dict[str, Any]:
    from rollout.workloads.json_form import timestamp

    return {
        "id": one.id,
        "run_id": one.run_id,
        "run": one.run_name,
        "step": one.step,
        "steps": one.steps,
        "size": one.size,
        "created_at": timestamp(one.created_ms),
        "algorithm": one.algorithm,
        "label": one.label,
        "weights_hash": one.weights,
        "fingerprint": one.fingerprint,
    }


def _size(size: int) -> str:
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.0f} {unit}"
        size /= 1024  # type: ignore[assignment]
    return f"{size:.1f} GiB"
