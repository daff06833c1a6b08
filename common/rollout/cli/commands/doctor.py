"""`rollout doctor`: checks this machine and its cluster, and says what to do."""

from __future__ import annotations

import asyncio
import sys
import tempfile
from collections import Counter
from dataclasses import asdict, replace
from functools import partial
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as installed_version
from pathlib import Path
from typing import Annotated

import typer
from rich.text import Text

from rollout.cli.boundary import FAILED, OK
from rollout.cli.commands.plan import check_coordinator, check_worker, kind_of
from rollout.cli.doctor import machine
from rollout.cli.doctor.cluster import cluster
from rollout.cli.doctor.engines import ENGINES, LIMIT_S, engine
from rollout.cli.doctor.finding import Check, Finding, examine, fault, ok
from rollout.cli.doctor.identity import identity
from rollout.cli.options import CoordinatorOption, TlsDirOption, chosen
from rollout.cli.show import console
from rollout.cli.version import DISTRIBUTION
from rollout.client.target import Target, as_joined, find_target, owned
from rollout.config.load import load_settings
from rollout.config.settings import CoordinatorSettings, WorkerSettings
from rollout.model.errors import ConfigError, RolloutError
from rollout.security import files

CLUSTER_LIMIT_S = 25.0


def doctor(
    coordinator: CoordinatorOption = None,
    tls_dir: TlsDirOption = None,
    config: Annotated[
        Path | None,
        typer.Option("--config", metavar="FILE", help="Also check the node of this coordinator.toml or worker.toml."),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON on standard output.")] = False,
) -> None:
    """Check this machine and its cluster; each warning or fault comes with a remedy.

    It checks versions, packages, open files, disks, GPUs, engines and certificates, and a cluster's coordinators,
    clocks, ports, database and workers. Exit codes: 0 all well, or warnings only; 1 a fault.

    --json: `{"ok": bool, "checks": [{"name", "level", "text", "remedy"}]}`; keys are only ever added.
    """
    findings = asyncio.run(_examine(coordinator, tls_dir, config))
    counts = Counter(finding.level for finding in findings)
    if json:
        from rollout.cli.show import print_json

        print_json({"ok": not counts["fault"], "checks": [asdict(finding) for finding in findings]})
    else:
        _show(findings)
        said = [
            f"{counts[level]} {level}{'s' * (counts[level] > 1)}" for level in ("fault", "warning") if counts[level]
        ]
        typer.echo(", ".join(said) if said else "all is well")
    raise typer.Exit(FAILED if counts["fault"] else OK)


async def _examine(coordinators: list[str] | None, tls_dir: Path | None, config: Path | None) -> list[Finding]:
    places = {"this directory": Path.cwd(), "temporary files": Path(tempfile.gettempdir())}
    checks = [
        Check("versions", machine.versions),
        Check("open files", machine.open_files),
        Check("gpu", machine.accelerators, limit_s=15.0),
        *(Check(f"engine ({kind})", partial(engine, kind), LIMIT_S) for kind in ENGINES),
    ]
    try:
        target = find_target(coordinators, tls_dir, chosen().selector)
        if target.private is not None:
            places["private cluster"] = target.private
            target = owned(target)
        if config is not None:
            target = _with_node(config, target, places, checks, named=tls_dir is not None)
        checks.append(Check("certificates", partial(identity, target.tls_dir)))
        checks.append(Check("cluster", partial(cluster, target, _version()), CLUSTER_LIMIT_S))
    except RolloutError as error:
        checks.append(Check("configuration", partial(_broken, error)))
    checks.insert(2, Check("disks", partial(machine.disks, places)))
    return await examine(checks, lambda text: (sys.stderr.write(f"{text}\n"), sys.stderr.flush(), None)[2])


def _with_node(config: Path, target: Target, places: dict[str, Path], checks: list[Check], *, named: bool) -> Target:
    """Add the checks of the node's file, its directories and its cluster; return the cluster to check."""
    kind = kind_of(config)
    if kind == "coordinator":
        settings = load_settings(CoordinatorSettings, config)
        lines = check_coordinator(config)
        transport = settings.transport
        if settings.storage.backend == "embedded":
            places["database"] = Path(settings.storage.embedded.path).expanduser().parent
        places["objects"] = Path(settings.objects.path).expanduser()
        addresses = transport.coordinator_addrs or [transport.advertise_addr or transport.listen_addr]
    elif kind == "worker":
        worker = load_settings(WorkerSettings, config)
        lines = check_worker(config)
        transport = as_joined(worker.transport)
        places["scratch"] = Path(worker.worker.scratch_dir).expanduser()
        places["object cache"] = Path(worker.objects.cache_dir).expanduser()
        addresses = transport.coordinator_addrs
    else:
        raise ConfigError(f"{config}: a {kind} configuration; `rollout plan --config {config}` checks that")
    checks.insert(0, Check("configuration", partial(_said, f"{config}: a valid {kind} configuration", lines)))
    return replace(
        target,
        addresses=target.addresses if target.explicit else addresses,
        tls_dir=target.tls_dir if named else files.expand(Path(transport.tls_dir)),
        cluster=transport.cluster,
    )


async def _said(text: str, lines: list[str]) -> list[Finding]:
    return [ok("configuration", line) for line in (text, *lines)]


async def _broken(error: RolloutError) -> list[Finding]:
    return [fault("configuration", error.message, "correct what it names")]


def _version() -> str:
    try:
        return installed_version(DISTRIBUTION)
    except PackageNotFoundError:
        return "unknown"


_MARKS: dict[str, tuple[str, str]] = {
    "ok": ("ok", "green"),
    "warning": ("warning", "yellow"),
    "fault": ("fault", "red"),
}


def _show(findings: list[Finding]) -> None:
    width = max(len(finding.name) for finding in findings)
    for finding in findings:
        mark, colour = _MARKS[finding.level]
        line = Text.assemble((f"{mark:<8}", colour), f" {finding.name:<{width}}  {finding.text}")
        console().print(line, soft_wrap=True)
        if finding.remedy and finding.level != "ok":
            typer.echo(f"{'':<8} {'':<{width}}  -> {finding.remedy}")
