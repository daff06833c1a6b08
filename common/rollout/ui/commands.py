"""`rollout ui` and `rollout report`."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Annotated

import typer

from rollout.cli.asking import tell
from rollout.cli.commands.run import RunArgument
from rollout.cli.interrupt import Interrupted, Interrupts
from rollout.cli.options import CoordinatorOption, TlsDirOption, choose_cluster, chosen
from rollout.cli.references import resolve_run
from rollout.client.target import need_target
from rollout.config.settings import UI_LISTEN
from rollout.model.errors import ConfigError
from rollout.ui.cluster import Cluster
from rollout.ui.report import report_html, whole_run
from rollout.ui.serving import Place, serve


def ui(
    coordinator: CoordinatorOption = None,
    tls_dir: TlsDirOption = None,
    listen: Annotated[
        str, typer.Option("--listen", metavar="HOST:PORT", help="Address of the page; port 0: any free port.")
    ] = UI_LISTEN,
    browse: Annotated[bool, typer.Option("--open", help="Open the page in a browser.")] = False,
    prefix: Annotated[
        str,
        typer.Option("--prefix", metavar="PATH", help="Path below which a proxy serves the page, such as /rollout."),
    ] = "",
    join_address: Annotated[
        str,
        typer.Option(
            "--join-address",
            metavar="HOST:JOIN_PORT",
            help="Join address of a coordinator that checks logins; required beyond loopback.",
        ),
    ] = "",
    certificate: Annotated[
        Path | None, typer.Option("--certificate", metavar="FILE", help="PEM certificate chain for https.")
    ] = None,
    key: Annotated[Path | None, typer.Option("--key", metavar="FILE", help="PEM private key for https.")] = None,
) -> None:
    """Serve a live page of the cluster: runs, rows, workers, curves, failures; pause, resume, kill and drain.

    Beyond loopback, or behind a proxy, people log in with an operator's token.
    """
    choose_cluster(coordinator, tls_dir)
    target = need_target(coordinator, tls_dir, chosen().selector)
    place = Place(listen, prefix, join_address, certificate, key)
    place.check(target)
    if place.warning:
        tell(place.warning)

    def at(url: str) -> None:
        tell(f"the page is at {url}; Ctrl-C ends it")

    async def serving() -> None:
        interrupts = Interrupts(at_once=lambda: None)
        interrupts.install()
        with suppress(Interrupted):
            await interrupts.guard(serve(target, place, tell, at, browse=browse))

    asyncio.run(serving())


def report(
    run: RunArgument,
    output: Annotated[Path, typer.Option("--output", metavar="FILE", help="File to write.")] = Path("report.html"),
    coordinator: CoordinatorOption = None,
    tls_dir: TlsDirOption = None,
) -> None:
    """Write a run as one self-contained HTML file, with what the live page shows."""
    choose_cluster(coordinator, tls_dir)
    target = need_target(coordinator, tls_dir, chosen().selector)
    if not output.parent.is_dir():
        raise ConfigError(f"--output {output}: there is no directory {output.parent}: make it first")

    async def made() -> str:
        async with Cluster(target, tell) as cluster:
            run_id = await cluster.ask(lambda client: resolve_run(client, run))
            return report_html(await whole_run(cluster, run_id, _telling()), cluster.name)

    text = asyncio.run(made())
    try:
        output.write_bytes(text.encode("utf-8", "backslashreplace"))
    except OSError as error:
        raise ConfigError(f"--output {output}: {error.strerror or error}") from error
    typer.echo(f"{output}")


def _telling() -> Callable[[str], None]:
    """Return a function that prints messages, on a terminal only."""
    return tell if sys.stderr.isatty() else lambda _: None
