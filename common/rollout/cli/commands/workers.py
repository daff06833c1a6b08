"""`rollout workers`: who is there, and orders for one of them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from rollout.cli.commands.run import ask
from rollout.cli.completion import complete_worker
from rollout.cli.options import CoordinatorOption, JsonOption, TlsDirOption
from rollout.cli.references import resolve_worker

if TYPE_CHECKING:
    from rollout.client import Runs
    from rollout.wire.v1 import runs_pb2 as pb


def workers(
    coordinator: CoordinatorOption = None,
    tls_dir: TlsDirOption = None,
    drain: Annotated[
        str,
        typer.Option(
            "--drain",
            metavar="WORKER",
            autocompletion=complete_worker,
            help="Let this worker finish what it runs, then stop.",
        ),
    ] = "",
    reload: Annotated[
        str,
        typer.Option(
            "--reload", metavar="WORKER", autocompletion=complete_worker, help="Let this worker reload its plugins."
        ),
    ] = "",
    all_workers: Annotated[bool, typer.Option("--all", help="Also those that are gone.")] = False,
    json: JsonOption = False,
) -> None:
    """The workers of the cluster and what they do. --json: `{"leader": ADDR, "workers": [...]}`."""

    async def question(client: Runs) -> pb.WorkersReply:
        if drain or reload:
            worker = await resolve_worker(client, drain or reload)
            return await client.worker_command(worker, "drain" if drain else "reload")
        return await client.workers(all=all_workers)

    reply = ask(coordinator, tls_dir, question)
    from rollout.cli import show

    listed = [worker for worker in reply.workers if all_workers or worker.state != "gone"]
    if json:
        show.print_json({"leader": reply.leader, "workers": [show.worker_json(worker) for worker in listed]})
    else:
        show.print_workers(listed, reply.leader)
