"""`rollout workers`: who is there, and orders for one of them."""

from __future__ import annotations

from typing import Annotated

import typer

from rollout.cli.commands.run import ask
from rollout.cli.options import CoordinatorOption, JsonOption, TlsDirOption


def workers(
    coordinator: CoordinatorOption = None,
    tls_dir: TlsDirOption = None,
    drain: Annotated[
        str,
        typer.Option("--drain", metavar="ID", help="Let this worker finish what it runs, then stop."),
    ] = "",
    reload: Annotated[str, typer.Option("--reload", metavar="ID", help="Let this worker reload its plugins.")] = "",
    all_workers: Annotated[bool, typer.Option("--all", help="Also those that are gone.")] = False,
    json: JsonOption = False,
) -> None:
    """The workers of the cluster and what they do. --json: `{"leader": ADDR, "workers": [...]}`."""
    if drain:
        reply = ask(coordinator, tls_dir, lambda client: client.worker_command(drain, "drain"))
    elif reload:
        reply = ask(coordinator, tls_dir, lambda client: client.worker_command(reload, "reload"))
    else:
        reply = ask(coordinator, tls_dir, lambda client: client.workers(all=all_workers))
    from rollout.cli import show

    listed = [worker for worker in reply.workers if all_workers or worker.state != "gone"]
    if json:
        show.print_json({"leader": reply.leader, "workers": [show.worker_json(worker) for worker in listed]})
    else:
        show.print_workers(listed, reply.leader)
