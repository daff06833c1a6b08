"""`rollout workers`: lists workers, shows one, and sends them commands."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from rollout.cli.commands.run import ask
from rollout.cli.completion import complete_worker
from rollout.cli.groups import CommandGroup
from rollout.cli.options import CoordinatorOption, JsonOption, TlsDirOption
from rollout.cli.references import resolve_worker
from rollout.model.errors import ConfigError

if TYPE_CHECKING:
    from rollout.client import Runs
    from rollout.wire.v1 import runs_pb2 as pb

app = typer.Typer(
    cls=CommandGroup, invoke_without_command=True, context_settings={"help_option_names": ["-h", "--help"]}
)

WorkerArgument = Annotated[
    str,
    typer.Argument(
        metavar="WORKER",
        help="The worker: its id or short id, a unique prefix of either, or a host with one worker.",
        autocompletion=complete_worker,
    ),
]

AllOption = Annotated[bool, typer.Option("--all", help="Also list workers that are gone.")]


@app.callback()
def workers(
    context: typer.Context,
    coordinator: CoordinatorOption = None,
    tls_dir: TlsDirOption = None,
    all_workers: AllOption = False,
    json: JsonOption = False,
) -> None:
    """List the workers of the cluster and their work. --json: `{"leader": ADDR, "workers": [...]}`."""
    if context.invoked_subcommand is not None:
        if coordinator or tls_dir or all_workers or json:
            raise ConfigError(
                f"write options behind the command: rollout workers {context.invoked_subcommand} ... [OPTIONS]"
            )
        return
    list_workers(coordinator, tls_dir, all_workers, json)


@app.command("list")
def list_workers(
    coordinator: CoordinatorOption = None,
    tls_dir: TlsDirOption = None,
    all_workers: AllOption = False,
    json: JsonOption = False,
) -> None:
    """List the workers."""
    reply = ask(coordinator, tls_dir, lambda client: client.workers(all=all_workers))
    from rollout.cli import show

    listed = [worker for worker in reply.workers if all_workers or worker.state != "gone"]
    if json:
        show.print_json({"leader": reply.leader, "workers": [show.worker_json(worker) for worker in listed]})
    else:
        show.print_workers(listed, reply.leader)


@app.command("show")
def show_worker(
    worker: WorkerArgument,
    coordinator: CoordinatorOption = None,
    tls_dir: TlsDirOption = None,
    json: JsonOption = False,
) -> None:
    """Show a worker: its work, executors, start, version and last heartbeat.

    --json: one object, as in `rollout workers --json` with `ended_at, host_id, used, runs, held`. Keys are only ever
    added.
    """

    async def read(client: Runs) -> pb.WorkerStatus:
        return await client.worker(await resolve_worker(client, worker))

    found = ask(coordinator, tls_dir, read)
    from rollout.cli import show, show_worker

    if json:
        show.print_json(show.worker_detail_json(found))
    else:
        show_worker.print_worker(found)


VERBS = {
    "drain": (
        "Let a worker finish its running work, then stop; its other rows go elsewhere.",
        "it takes nothing new, finishes what it runs and stops",
    ),
    "reload": (
        "Let a worker reload its plugins, which needs `dev_hot_reload`.",
        "it was asked to load its plugins anew, and does so if `dev_hot_reload` is set there; its log says more",
    ),
}


def _add_verb(verb: str, what_it_does: str, said: str) -> None:
    @app.command(verb, help=f"{what_it_does} --json: as in `rollout workers --json`.")
    def command_worker(
        worker: WorkerArgument,
        coordinator: CoordinatorOption = None,
        tls_dir: TlsDirOption = None,
        json: JsonOption = False,
    ) -> None:
        async def order(client: Runs) -> pb.WorkerStatus:
            worker_id = await resolve_worker(client, worker)
            await client.worker_command(worker_id, verb)
            return await client.worker(worker_id)

        found = ask(coordinator, tls_dir, order)
        from rollout.cli import show

        if json:
            show.print_json(show.worker_json(found))
        else:
            on = f" on {found.inventory.host}" if found.inventory.host else ""
            typer.echo(f"worker {found.incarnation}{on}: {said}")

    del command_worker  # typer keeps it


for _verb, (_help, _said) in VERBS.items():
    _add_verb(_verb, _help, _said)
