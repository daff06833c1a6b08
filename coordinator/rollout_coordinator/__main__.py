"""`rollout-coordinator`: run, token create, join, host list | revoke, version."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Annotated, Any, TypeVar

import structlog
import typer
from rollout.cli.boundary import INTERRUPTED, OK
from rollout.cli.program import new_app, run_program
from rollout.cli.references import means
from rollout.cli.streams import keep_going
from rollout.cli.tokens import TokenFileOption, TokenOption, find_token
from rollout.cli.version import version_line
from rollout.cli.words import told_by
from rollout.config.load import load_settings, located
from rollout.config.logging import configure
from rollout.config.settings import CloudFile, CoordinatorSettings
from rollout.model.errors import ConfigError, InputError, RolloutError
from rollout.model.ids import short
from rollout.processes.parent import has_parent, watch_parent
from rollout.security.authority import Authority
from rollout.security.hosts import Host, list_hosts, revoke_host
from rollout.security.join_client import join as join_cluster
from rollout.security.roles import Role
from rollout.security.tokens import check_bounds, check_role, create_token
from rollout.storage import Storage, open_storage
from rollout.wire import event_loop

from rollout_coordinator.adopting import adopt, settings_of_state
from rollout_coordinator.core.step import WorkerRow
from rollout_coordinator.ledger import open_ledger
from rollout_coordinator.lifecycle import Coordinator, started
from rollout_coordinator.wiring import build, tls_directory

log = structlog.get_logger()
T = TypeVar("T")

app = new_app(help="Run a coordinator, which leads runs and keeps the ledger.")
token_app = new_app(help="Manage join tokens.")
host_app = new_app(help="Manage joined hosts.")
app.add_typer(token_app, name="token")
app.add_typer(host_app, name="host")

Config = Annotated[Path, typer.Option("--config", help="The coordinator's configuration file.")]
DEFAULT_CONFIG = Path("coordinator.toml")
WORKERS_MAX = 10_000
"""Maximum number of workers that `host list` reads, the newest first."""

_UNITS = {"": 1.0, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


def duration(text: str) -> float:
    """Parse `30s`, `10m`, `24h`, `7d` or a number to seconds. Raises InputError."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([smhd]?)", text.strip(), re.ASCII)
    if match is None:
        raise InputError(f"{text[:80]!r} is no duration; write 30s, 10m, 24h or 7d.")
    return float(match[1]) * _UNITS[match[2]]


@app.command()
def run(
    config: Config = DEFAULT_CONFIG,
    json_logs: Annotated[bool, typer.Option("--json-logs", help="Log JSON lines even on a terminal.")] = False,
) -> None:
    """Run a coordinator until SIGTERM or Ctrl-C. Of several on the same store, one leads and the others stand by."""
    settings = load_settings(CoordinatorSettings, config, {"logging.format": "json"} if json_logs else {})
    keep_going("the log is lost until it can be", log=True)
    configure(settings.logging)
    log.info("configuration_read", path=str(config.resolve()))
    try:
        with located(None if has_parent() else config):  # whose file is the one that started it
            code = event_loop.run(_serve(settings))
    except RolloutError as error:
        log.error("coordinator_failed", code=error.code, error=str(error))
        raise
    raise typer.Exit(code)


async def _serve(settings: CoordinatorSettings) -> int:
    coordinator: Coordinator | None = None
    starting = asyncio.create_task(started(build(settings), patient=not has_parent()))
    signals: list[signal.Signals] = []

    def stop(reason: str) -> None:
        if coordinator is not None:
            coordinator.stop(reason)
        elif not starting.cancelling():
            log.info("coordinator_stopping", reason=reason)
            starting.cancel()

    def on_signal(sig: signal.Signals) -> None:
        if signals:
            os._exit(INTERRUPTED)  # asked twice: at once
        signals.append(sig)
        stop(told_by(sig))

    for sig in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(sig, on_signal, sig)
    leaving: list[asyncio.Task[None]] = []

    def bereaved() -> None:
        reason = "the process that started it has ended"
        if coordinator is None:
            stop(reason)
        else:
            leaving.append(asyncio.create_task(coordinator.stop_after_workers(reason)))

    watch_parent(bereaved)
    try:
        coordinator = await starting
    except asyncio.CancelledError:
        log.info("coordinator_stopped")
        return INTERRUPTED if signals == [signal.SIGINT] else OK
    code = await coordinator.run()
    return INTERRUPTED if code == OK and signals == [signal.SIGINT] else code


async def _with_storage(settings: CoordinatorSettings, work: Callable[[Storage], Awaitable[T]]) -> T:
    storage = open_storage(settings.storage)
    await storage.open()
    try:
        return await work(storage)
    finally:
        await storage.close()


def _on_storage(
    config: Path, work: Callable[[CoordinatorSettings, Storage], Awaitable[T]], *, makes_it: bool = False
) -> T:
    """Run `work` on the database of `config`, whether or not a coordinator is running. Raises ConfigError if there is
    no database, unless `makes_it`."""
    settings = load_settings(CoordinatorSettings, config)
    path = Path(settings.storage.embedded.path).expanduser()
    if settings.storage.backend == "embedded" and not path.exists():
        text, relative = f"there is no database {path.absolute()}", not path.is_absolute()
        if relative:
            text += (
                ". The path is relative and so seen from where a command is given: give this one where the coordinator "
                "was started, or make [storage.embedded] path absolute"
            )
        if not makes_it:
            raise ConfigError(text)
        if relative:
            typer.echo(f"note: a new one is made: {text}", err=True)
    configure(settings.logging.model_copy(update={"level": "warning"}), stream=sys.stderr)
    return asyncio.run(_with_storage(settings, lambda storage: work(settings, storage)))


@token_app.command("create")
def token_create(
    role: Annotated[Role, typer.Option("--role", help="Role of the host.")],
    config: Config = DEFAULT_CONFIG,
    ttl: Annotated[str, typer.Option("--ttl", help="Lifetime of the token, 1s to 30d.")] = "10m",
    uses: Annotated[int, typer.Option("--uses", help="Hosts that can join with the token, 1 to 10000.")] = 1,
) -> None:
    """Print a join token, and nothing else, on standard output."""
    ttl_s = duration(ttl)
    check_bounds(ttl_s, uses)

    async def work(settings: CoordinatorSettings, storage: Storage) -> str:
        tls_dir = tls_directory(settings)
        new = Authority.load(tls_dir, settings.transport.cluster) is None
        authority = Authority.load_or_create(tls_dir, settings.transport.cluster)
        if new:
            typer.echo(
                f"note: a new certificate authority was made in {tls_dir.resolve()}; a coordinator that was started "
                "before uses another one (relative paths of its configuration are seen from where a command is given)",
                err=True,
            )
        return await create_token(storage, role, ca_hash=authority.ca_hash, ttl_s=ttl_s, uses=uses)

    typer.echo(_on_storage(config, work, makes_it=True))


@app.command()
def authority(
    tls_dir: Annotated[Path, typer.Option("--tls-dir", help="Directory of the authority.")],
    cluster: Annotated[str, typer.Option("--cluster", help="Cluster name, as in [transport].")] = "rollout",
) -> None:
    """Make a certificate authority before the first start, for coordinators that get it from a secret store."""
    made = Authority.load_or_create(tls_dir, cluster)
    typer.echo(f"{tls_dir}: authority of cluster {cluster}, sha256 {made.ca_hash.hex()}")


@host_app.command("list")
def host_list(
    config: Config = DEFAULT_CONFIG,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print JSON: [{id, role, state, name, workers: [{id, state}]}].")
    ] = False,
) -> None:
    """List every host that ever joined, and its workers."""

    async def work(settings: CoordinatorSettings, storage: Storage) -> tuple[list[Any], list[WorkerRow]]:
        ledger = open_ledger(settings.storage)
        await ledger.open()
        try:
            return list(await list_hosts(storage)), await ledger.workers(WORKERS_MAX)
        finally:
            await ledger.close()

    hosts, workers = _on_storage(config, work)
    there: dict[str, list[WorkerRow]] = {}
    for worker in workers:
        if not worker.ended_ms:
            there.setdefault(worker.host_id, []).append(worker)
    rows: list[dict[str, Any]] = [
        {
            "id": host.id,
            "role": host.role,
            "state": "revoked" if host.revoked else "active",
            "name": host.name,
            "workers": [{"id": w.incarnation, "state": str(w.state)} for w in there.get(host.id, ())],
        }
        for host in hosts
    ]
    if as_json:
        typer.echo(json.dumps(rows))
        return
    if rows:
        typer.echo(f"{'host':<26}  {'role':<12} {'state':<8} name")
    for row in rows:
        shown = ", ".join(f"{short(w['id'])} {w['state']}" for w in row["workers"])
        typer.echo(
            f"{row['id']}  {row['role']:<12} {row['state']:<8} {row['name']}" + (f"  workers: {shown}" if shown else "")
        )


@host_app.command("revoke")
def host_revoke(
    host_id: Annotated[str, typer.Argument(help="Id in `host list`, a unique prefix, or its last eight characters.")],
    config: Config = DEFAULT_CONFIG,
) -> None:
    """Revoke a host's access within a minute."""

    async def work(settings: CoordinatorSettings, storage: Storage) -> Host:
        meant = [host for host in await list_hosts(storage) if means(host.id, host_id)]
        if len(meant) > 1:
            shown = ", ".join(f"{host.id} ({' '.join(filter(None, (host.role, host.name)))})" for host in meant)
            raise ConfigError(f"{host_id!r} may be any of {len(meant)} hosts; give more of the id: {shown}")
        return await revoke_host(storage, meant[0].id if meant else host_id)

    host = _on_storage(config, work)
    typer.echo(f"{host.id} revoked")


@app.command()
def join(
    coordinator: Annotated[str, typer.Option("--coordinator", help="HOST:JOIN_PORT of a coordinator.")],
    token: TokenOption = "",
    token_file: TokenFileOption = None,
    tls_dir: Annotated[Path, typer.Option("--tls-dir", help="Directory of this host's identity.")] = Path("./data/tls"),
) -> None:
    """Enrol this host as another coordinator (a standby), with a token of role coordinator."""
    token = find_token(token, token_file)
    check_role(token, Role.COORDINATOR)
    joined = asyncio.run(join_cluster(coordinator, token, tls_dir, os.uname().nodename))
    typer.echo(joined.told(tls_dir))


@app.command("adopt-objects")
def adopt_objects(
    config: Config = DEFAULT_CONFIG,
    state: Annotated[
        Path | None,
        typer.Option("--state", metavar="DIR", help="Output directory of a private cluster; FILE is its workload's."),
    ] = None,
) -> None:
    """Record that all objects were copied to the place that FILE names: another bucket, prefix or backend.

    It checks that every object is there, and changes nothing else. Stop the coordinator first.
    """
    where = None
    if state is None:
        settings = load_settings(CoordinatorSettings, config)
    else:
        where, settings = settings_of_state(state, load_settings(CloudFile, config).cloud)
    configure(settings.logging.model_copy(update={"level": "warning"}), stream=sys.stderr)
    with located(config):
        typer.echo(asyncio.run(adopt(settings, where)))


@app.command()
def version() -> None:
    """Print the version."""
    typer.echo(version_line("rollout-coordinator"))


def main() -> None:
    os.umask(0o077)  # ledger, objects and their directories are for this user alone
    run_program(app, "rollout-coordinator")


if __name__ == "__main__":
    main()
