"""`rollout-worker`: run, join, version."""

from __future__ import annotations

import asyncio
import os
import signal
from functools import partial
from pathlib import Path
from typing import Annotated

import structlog
import typer
from rollout.cli.boundary import INTERRUPTED, USAGE, exit_code_of
from rollout.cli.program import new_app, run_program
from rollout.cli.streams import keep_going
from rollout.cli.tokens import TokenFileOption, TokenOption, find_token
from rollout.cli.version import version_line
from rollout.cli.words import told_by
from rollout.client.target import as_joined
from rollout.config.load import load_settings
from rollout.config.logging import configure
from rollout.config.settings import WorkerSettings
from rollout.model.errors import ConfigError, InputError, PluginError, RolloutError
from rollout.model.ids import check_ulid
from rollout.processes.parent import watch_parent
from rollout.security.join_client import join as join_cluster
from rollout.security.roles import Role
from rollout.security.tokens import check_role
from rollout.wire import event_loop

from rollout_worker.wiring import Worker

log = structlog.get_logger()

app = new_app(help="Run a worker, which executes a coordinator's work in child processes.")

DEFAULT_CONFIG = Path("worker.toml")


def config_file(named: Path | None) -> Path | None:
    """Return the named file, else `./worker.toml` if it exists."""
    return named or (DEFAULT_CONFIG if DEFAULT_CONFIG.is_file() else None)


def settings_for(config: Path | None, *, hot_reload: bool, tls_dir: Path | None = None) -> WorkerSettings:
    """Return the file's settings or the defaults, overridden by the environment and the options. Raises ConfigError."""
    overrides = {
        "worker.dev_hot_reload": True if hot_reload else None,
        "transport.tls_dir": str(tls_dir) if tls_dir is not None else None,
    }
    return load_settings(WorkerSettings, config_file(config), overrides)


@app.command()
def run(
    config: Annotated[
        Path | None,
        typer.Option("--config", help="The worker's configuration file; default: ./worker.toml if it exists."),
    ] = None,
    tls_dir: Annotated[
        Path | None,
        typer.Option("--tls-dir", help="Directory of this host's identity; default: [transport] tls_dir."),
    ] = None,
    worker_id: Annotated[str, typer.Option("--worker-id", help="ULID of this process; default: a new one.")] = "",
    plugin: Annotated[list[Path] | None, typer.Option("--plugin", help="Manifest of a plugin; repeatable.")] = None,
    hot_reload: Annotated[
        bool, typer.Option("--hot-reload", help="Allow plugins to be reloaded while the worker runs.")
    ] = False,
) -> None:
    """Run a worker until SIGTERM or Ctrl-C, which drain it; a second signal exits at once."""
    settings = settings_for(config, hot_reload=hot_reload, tls_dir=tls_dir)
    if worker_id:
        check_ulid(worker_id, "--worker-id")
    transport = as_joined(settings.transport, also_former=True)
    if not transport.coordinator_addrs:  # one machine: the certificates are its coordinator's
        here = [transport.advertise_addr or transport.listen_addr]
        transport = transport.model_copy(update={"coordinator_addrs": here})
    settings = settings.model_copy(update={"transport": transport})
    keep_going("the log is lost until it can be", log=True)
    configure(settings.logging)
    if found := config_file(config):
        log.info("configuration_read", path=str(found.resolve()))
    raise typer.Exit(event_loop.run(serve(settings, worker_id, plugin or [])))


async def serve(settings: WorkerSettings, worker_id: str, plugins: list[Path]) -> int:
    """Run a worker until it has drained, or is told twice to stop; return its exit code."""
    loop = asyncio.get_running_loop()
    worker: Worker | None = None
    task: asyncio.Task[int] | None = None
    signals: list[int] = []

    def told(number: int) -> None:
        signals.append(number)
        if worker is None or task is None:
            return
        if len(signals) == 1:
            worker.drain(told_by(number), settings.worker.drain_budget_s)
        else:
            task.cancel()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, told, number)
    try:
        worker = Worker(settings, worker_id, plugins)
        task = asyncio.create_task(worker.run())
        drain = partial(worker.drain, "the process that started it has ended", 0.0)  # the next command is waiting
        watch_parent(drain)
        return await task
    except asyncio.CancelledError:
        return INTERRUPTED
    except (ConfigError, InputError, PluginError) as error:
        log.error("worker_config_error", error=error.message)
        return USAGE
    except RolloutError as error:
        log.error("worker_failed_to_run", error=error.message, code=error.code)
        return exit_code_of(error)
    finally:
        # The work is over: a late Ctrl-C must not change the exit code while the interpreter winds up.
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)
            signal.signal(number, signal.SIG_IGN)


@app.command()
def join(
    coordinator: Annotated[str, typer.Option("--coordinator", help="HOST:JOIN_PORT of a coordinator.")],
    token: TokenOption = "",
    token_file: TokenFileOption = None,
    tls_dir: Annotated[Path, typer.Option("--tls-dir", help="Directory of this host's identity.")] = Path("./data/tls"),
) -> None:
    """Enrol this host with a token of role worker: check the cluster's CA, then get a certificate."""
    token = find_token(token, token_file)
    check_role(token, Role.WORKER)
    joined = asyncio.run(join_cluster(coordinator, token, tls_dir, os.uname().nodename))
    typer.echo(joined.told(tls_dir))


@app.command()
def version() -> None:
    """Print the version."""
    typer.echo(version_line("rollout-worker"))


def main() -> None:
    run_program(app, "rollout-worker")


if __name__ == "__main__":
    main()
