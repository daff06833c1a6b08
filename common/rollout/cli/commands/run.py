"""`rollout run`: shows runs to an operator and controls them."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rollout.cli.asking import ask, tell_all_is_said
from rollout.cli.boundary import FAILED, OK
from rollout.cli.completion import complete_run
from rollout.cli.options import CoordinatorOption, JsonOption, TlsDirOption, choose_cluster, chosen
from rollout.cli.program import new_app
from rollout.cli.references import resolve_run
from rollout.client.private import Command, command_of
from rollout.client.target import named_or_here
from rollout.model.counts import counted
from rollout.model.errors import StateError
from rollout.model.ids import short
from rollout.model.run import RunState

if TYPE_CHECKING:
    from rollout.client import Runs
    from rollout.wire.v1 import runs_pb2 as pb

__all__ = ["RunArgument", "app", "ask"]

app = new_app(help="List, show, watch and command runs.")

RunArgument = Annotated[
    str,
    typer.Argument(
        metavar="RUN",
        help=(
            "The run: its id or short id, a unique prefix of either, its name (the newest), or @last (submitted "
            "last from here)."
        ),
        autocompletion=complete_run,
    ),
]
ReasonOption = Annotated[str, typer.Option("--reason", help="Reason to record with the run.")]


@app.command("list")
def list_runs(
    coordinator: CoordinatorOption = None,
    tls_dir: TlsDirOption = None,
    state: Annotated[
        list[RunState] | None, typer.Option("--state", help="Only runs in this state; repeatable.")
    ] = None,
    limit: Annotated[int, typer.Option("--limit", min=1, max=1000, help="Maximum number of runs.")] = 50,
    private: Annotated[bool, typer.Option("--private", help="List all private runs of this machine.")] = False,
    json: JsonOption = False,
) -> None:
    """List the runs of the cluster, newest first; without a cluster, as with --private.

    --json: `{"runs": [...]}` with the keys of `run show --json`, and `dir`, the output directory, of private runs.
    """
    from rollout.client.private_ledgers import as_it_stands, every_private_run

    choose_cluster(coordinator, tls_dir)
    states = [str(one) for one in state or ()]
    directories: list[str] = []
    found = every_private_run() if private or named_or_here(coordinator, tls_dir, chosen().selector) is None else []
    if found or private:
        found = [one for one in found if not states or one.status.state in states][:limit]
        runs, directories = [one.status for one in found], [str(one.directory) for one in found]
    else:

        async def at_rest(client: Runs, place: Path) -> list[pb.RunStatus]:
            return [as_it_stands(one, place) for one in await client.list([], limit)]

        runs = ask(coordinator, tls_dir, lambda client: client.list(states, limit), at_rest=at_rest)
        runs = [one for one in runs if not states or one.state in states]
    from rollout.cli import show

    if json:
        more = [{"dir": directory} for directory in directories] or [{} for _ in runs]
        show.print_json({"runs": [show.run_json(one) | where for one, where in zip(runs, more, strict=True)]})
    else:
        show.print_runs(runs, directories)


@app.command("show")
def show_run(
    run: RunArgument, coordinator: CoordinatorOption = None, tls_dir: TlsDirOption = None, json: JsonOption = False
) -> None:
    """Show a run's counts, rate, time left, workers, waits, and last failures with causes.

    --json: one object; keys are only ever added.
    """

    async def read(client: Runs) -> pb.RunReply:
        return await client.describe(await resolve_run(client, run))

    async def at_rest(client: Runs, state: Path) -> pb.RunReply:
        from rollout.client.private_ledgers import as_it_stands

        reply = await read(client)
        as_it_stands(reply.status, state)
        return reply

    reply = ask(coordinator, tls_dir, read, at_rest=at_rest)
    from rollout.cli import show, show_run

    if json:
        show.print_json(show.description_json(reply))
    else:
        show_run.print_description(reply)


@app.command("watch")
def watch_run(
    run: RunArgument, coordinator: CoordinatorOption = None, tls_dir: TlsDirOption = None, json: JsonOption = False
) -> None:
    """Print the progress of a run every second until it ends. Exit code 1 unless it completes.

    --json: an object per line, as `run show --json`.
    """

    async def once(client: Runs, state: Path) -> pb.RunStatus:
        from rollout.client.private_ledgers import as_it_stands

        last = as_it_stands(await client.get(await resolve_run(client, run)), state)
        _line(last, json)
        tell_all_is_said()
        return last

    async def follow(client: Runs) -> pb.RunStatus:
        run_id = await resolve_run(client, run)
        last = await client.get(run_id)
        async for page in client.watch(run_id, status_only=True):
            if page.status is not None:
                last = page.status
                _line(last, json)
        return last

    status = ask(coordinator, tls_dir, follow, patience_s=600.0, at_rest=once)
    raise typer.Exit(OK if status.state == "completed" else FAILED)


VERBS = {
    "pause": "Pause a run: running items finish, and no further ones start.",
    "resume": "Resume a paused, killed, failed or interrupted run from its ledger.",
    "kill": "Cancel a run; committed results stay readable.",
}

_NEEDS_WORK = {
    "pause": "there is nothing to pause",
    "resume": "there is nobody to go on with it",
}
"""Reason why a command is refused in a private cluster that nobody runs."""


def refuse_idle(status: pb.RunStatus, verb: str, state: Path, going_on: str = "") -> None:
    """Raise StateError with the command that continues the run: `going_on`, or the one that began it.

    A complete run is not refused here; the coordinator says that it is complete.
    """
    if status.state == RunState.COMPLETED:
        return
    command = going_on or command_of(state)
    if isinstance(command, Command) and status.state == RunState.KILLED and status.ended_by:
        command = command.going_on()
    how = f"; it goes on with: {command}" if command else ""
    raise StateError(f"no command works in {state.parent} at present, so {_NEEDS_WORK[verb]}{how}")


def _add_verb(verb: str, what_it_does: str, *, alias: str = "") -> None:
    @app.command(alias or verb, help=what_it_does, hidden=bool(alias))
    def command_run(
        run: RunArgument,
        coordinator: CoordinatorOption = None,
        tls_dir: TlsDirOption = None,
        reason: ReasonOption = "",
        json: JsonOption = False,
    ) -> None:
        async def order(client: Runs) -> pb.RunStatus:
            return await client.command(await resolve_run(client, run), verb, reason=reason)

        async def refuse(client: Runs, state: Path) -> None:
            refuse_idle(await client.get(await resolve_run(client, run)), verb, state)

        _show(ask(coordinator, tls_dir, order, unless_idle=refuse if verb in _NEEDS_WORK else None), json)

    del command_run  # typer keeps it


for _verb, _help in VERBS.items():
    _add_verb(_verb, _help)
_add_verb("resume", VERBS["resume"], alias="continue")


@app.command("delete")
def delete_run(
    run: RunArgument,
    coordinator: CoordinatorOption = None,
    tls_dir: TlsDirOption = None,
    force: Annotated[bool, typer.Option("--force", help="Kill the run first if it has not ended.")] = False,
    json: JsonOption = False,
) -> None:
    """Delete a run and its unshared objects. --json: `{"run_id", "items", "objects_freed"}`."""

    async def delete(client: Runs) -> tuple[str, pb.DeleteReply]:
        run_id = await resolve_run(client, run)
        return run_id, await client.delete(run_id, force=force)

    run_id, gone = ask(coordinator, tls_dir, delete)
    from rollout.cli import show

    if json:
        show.print_json({"run_id": run_id, "items": gone.items, "objects_freed": gone.objects_freed})
    else:
        typer.echo(
            f"deleted run {short(run_id)}: {counted(gone.items, 'item')}, {counted(gone.objects_freed, 'object')} freed"
        )


def _show(status: pb.RunStatus, as_json: bool) -> None:
    from rollout.cli import show, show_run

    if as_json:
        show.print_json(show.run_json(status))
    else:
        show_run.print_run(status)


def _line(status: pb.RunStatus, as_json: bool) -> None:
    from rollout.cli import show, show_run

    if as_json:
        show.print_json(show.run_json(status))
        return
    sys.stdout.write(show_run.in_a_line(status) + "\n")
    sys.stdout.flush()
