"""Options that several commands share, including those of workloads."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from contextlib import suppress
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

import typer

from rollout.cli.groups import parameters_of
from rollout.client.contexts import Contexts
from rollout.client.target import DEFAULT_TLS_DIR, ClusterSelector
from rollout.config.cores import WORKERS_MAX, auto_count
from rollout.model.errors import ConfigError, RolloutError

CoordinatorOption = Annotated[
    list[str] | None,
    typer.Option(
        "--coordinator",
        metavar="HOST:PORT",
        help=(
            "A coordinator; the cluster reports the others. Default: ROLLOUT_COORDINATOR, ROLLOUT_CONTEXT, "
            "./rollout.toml, the cluster of --tls-dir, the context in use."
        ),
    ),
]
TlsDirOption = Annotated[
    Path | None,
    typer.Option(
        "--tls-dir",
        metavar="DIR",
        help=f"Directory of the certificates. Default: ROLLOUT_TLS_DIR, then ./rollout.toml, then {DEFAULT_TLS_DIR}.",
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON on standard output.")]


def _workers(value: str) -> int:
    """Parse the value of an option. Raises BadParameter."""
    count = auto_count(value)
    if isinstance(count, str):
        count = int(count) if count.isascii() and count.isdigit() else 0
    if not 1 <= count <= WORKERS_MAX:
        raise typer.BadParameter(f"{value!r} is no number from 1 to {WORKERS_MAX}, and not auto")
    return count


NameOption = Annotated[
    str,
    typer.Option("--name", metavar="NAME", help="Name for use in commands; default: the output directory's."),
]
ResumeOption = Annotated[
    str | None,
    typer.Option(
        "--resume",
        metavar="RUN",
        help="Run to resume; default: the one in <output.dir>/run-id.",
    ),
]
WorkersOption = Annotated[
    int | None,
    typer.Option(
        "--workers",
        metavar="N|auto",
        parser=_workers,
        help="Workers to start if no coordinator is named, 1 to 1024; auto: one per core.",
    ),
]
DryRunOption = Annotated[bool, typer.Option("--dry-run", help="Check the configuration and all input, then stop.")]
DetachOption = Annotated[
    bool, typer.Option("--detach", help="Submit everything and exit; the same command collects later.")
]
ExtendOption = Annotated[
    bool,
    typer.Option(
        "--extend",
        help="Run only rows added at the end of the input.",
    ),
]


# ---- what every command that speaks to a cluster takes besides: added to it by `program.complete`


@dataclass(frozen=True, slots=True)
class Chosen:
    """Values of these options for the running command."""

    selector: ClusterSelector = field(default_factory=ClusterSelector)
    go_on: bool = False
    """Whether `--continue` was given, the old name of `--resume RUN`; it also continues a killed run."""
    coordinators: tuple[str, ...] = ()
    tls_dir: Path | None = None


_chosen: ContextVar[tuple[object, Chosen]] = ContextVar("chosen")


def chosen() -> Chosen:
    """Return the values for the running command; outside a command, all are unset."""
    return _chosen.get((None, Chosen()))[1]


def choose_cluster(coordinators: list[str] | None, tls_dir: Path | None) -> None:
    """Record `--coordinator` and `--tls-dir` of the running command, for `same_cluster`."""
    root, known = _chosen.get((None, Chosen()))
    _chosen.set((root, replace(known, coordinators=tuple(coordinators or ()), tls_dir=tls_dir)))


def same_cluster(command: str) -> str:
    """Return `command` with the options that name the running command's cluster, for a message."""
    named = chosen()
    words = [word for address in named.coordinators for word in ("--coordinator", address)]
    words += ["--context", named.selector.context] if named.selector.context else []
    words += ["--dir", str(named.selector.directory)] if named.selector.directory is not None else []
    words += ["--tls-dir", str(named.tls_dir)] if named.tls_dir is not None else []
    return f"`{' '.join([command, *map(shlex.quote, words)])}`"


def _choose(context: typer.Context, change: Callable[[Chosen], Chosen]) -> None:
    root: object = context.find_root()
    known_root, known = _chosen.get((None, Chosen()))
    _chosen.set((root, change(known if known_root is root else Chosen())))


def _wished(name: str) -> Callable[[typer.Context, Any], None]:
    """Return the callback that typer calls with the option for `name` of the selector."""

    def wish(context: typer.Context, value: Any) -> None:
        named = {name: value} if value else {}
        _choose(context, lambda known: replace(known, selector=replace(known.selector, **named)))

    return wish


def _choose_go_on(context: typer.Context, value: bool) -> None:
    _choose(context, lambda known: replace(known, go_on=known.go_on or value))


def complete_context(incomplete: str) -> list[str]:
    """Complete the name of a context."""
    with suppress(RolloutError):
        return [name for name in sorted(Contexts.read().known) if name.startswith(incomplete)]
    return []


def cluster_options(*, workload: bool) -> list[Any]:
    hidden: dict[str, Any] = {"expose_value": False}

    def option(default: Any, *names: str, **options: Any) -> Any:
        return typer.Option(default, *names, **hidden, **options)

    of_context: Any = option(
        "",
        "--context",
        metavar="NAME",
        callback=_wished("context"),
        autocompletion=complete_context,
        help="Use the cluster of this context (`rollout context list`).",
    )
    of_directory: Any = option(
        None,
        "--dir",
        metavar="DIR",
        callback=_wished("directory"),
        help="Use the private cluster of this output directory.",
    )
    of_local: Any = option(
        False,
        "--local",
        callback=_wished("local"),
        help="Start a private cluster even if one is joined.",
    )
    of_go_on: Any = option(
        False,
        "--continue",
        callback=_choose_go_on,
        hidden=True,
        help="As --resume.",
    )

    def work(context: str = of_context, local: bool = of_local, go_on: bool = of_go_on) -> None: ...

    def look(context: str = of_context, directory: Path | None = of_directory) -> None: ...

    return parameters_of(work if workload else look)


def one_file(file: Path | None, config: Path | None, example: str) -> Path:
    """Return the file given by position or by --config. Raises ConfigError if neither or both are given."""
    if (file is None) == (config is None):
        raise ConfigError(
            f"name the file, as `{example}`"
            if file is None
            else "FILE and --config name the file twice: give one of them"
        )
    return file or config or Path()
