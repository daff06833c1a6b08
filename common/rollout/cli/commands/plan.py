"""`rollout plan`: checks everything and changes nothing."""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import Annotated, Any, cast

import typer

from rollout.cli.cloud_lines import objects_line, secrets_line, workload_lines
from rollout.cli.options import JsonOption, chosen, one_file
from rollout.client.private import STATE_DIR
from rollout.client.target import DEFAULT_TLS_DIR, ClientSettings, ClientTransport, as_joined, find_target
from rollout.cloud.installed import check_installed
from rollout.config.adapters import find_adapter
from rollout.config.cloud import NO_CLOUD, CloudSection
from rollout.config.load import load_settings, located, read_values
from rollout.config.settings import CoordinatorSettings, TransportSection, WorkerSettings
from rollout.model.address import parse_address
from rollout.model.errors import ConfigError, PluginError
from rollout.objects.opening import backend_name
from rollout.secrets import backend_of
from rollout.workloads.registered import entries, load

_COORDINATOR_ONLY = frozenset(CoordinatorSettings.model_fields) - frozenset(WorkerSettings.model_fields)
_WORKER_ONLY = frozenset(WorkerSettings.model_fields) - frozenset(CoordinatorSettings.model_fields)


def plan(
    file: Annotated[
        Path | None,
        typer.Argument(
            metavar="[FILE]",
            help="Configuration of a workload, coordinator, worker or client (rollout.toml).",
            show_default=False,
        ),
    ] = None,
    config: Annotated[Path | None, typer.Option("--config", metavar="FILE", help="The same as FILE.")] = None,
    json: JsonOption = False,
) -> None:
    """Check a configuration file and its input, and show what it would do.

    It writes nothing and contacts no cluster, but reads input in buckets.
    --json: `{"kind": ..., "ok": true, "plan": [...]}`.
    """
    path = one_file(file, config, "rollout plan rollout.toml")
    kind = kind_of(path)
    if kind == "coordinator":
        lines = check_coordinator(path)
    elif kind == "worker":
        lines = check_worker(path)
    elif kind == "client":
        lines = check_client(path)
    else:
        with located(path):
            lines = check_workload(kind, path)
    if json:
        from rollout.cli.show import print_json

        print_json({"kind": kind, "ok": True, "plan": lines})
        return
    typer.echo(f"{path}: a valid {kind} configuration")
    for line in lines:
        typer.echo(f"  {line}")


def kind_of(path: Path) -> str:
    """Return "coordinator", "worker", "client" or a workload's name, by the file's sections. Raises ConfigError."""
    values, _ = read_values(path)
    sections = set(values)
    scores: dict[str, float] = {}
    known: list[str] = []
    for name in entries():
        try:
            own = load(name).sections
        except PluginError as error:
            typer.echo(f"warning: {error.message}", err=True)
            continue
        scores[name] = _likeness(sections, own)
        if own:
            known.append(f"one of {name} {_listed(own)}")
    scores["coordinator"] = 2 * len(sections & _COORDINATOR_ONLY)
    scores["worker"] = 2 * len(sections & _WORKER_ONLY)
    best = max(scores, key=lambda name: scores[name])
    if scores[best] > 0:
        return best
    if "transport" in sections:  # of any; coordinators listen, the others are told where
        transport: Any = values["transport"]
        keys = set(cast("dict[str, Any]", transport)) if isinstance(transport, dict) else set[str]()
        if keys & {"listen_addr", "join_addr", "advertise_addr"}:
            return "coordinator"
        # What both may say is a client's, unless the file is named after the worker.
        clients = sections == {"transport"} and keys <= set(ClientTransport.model_fields)
        return "client" if clients and "worker" not in path.name else "worker"
    shared: set[str] = sections & set(CoordinatorSettings.model_fields)
    if shared:
        return "coordinator"
    raise ConfigError(
        f"{path}: this is no known configuration: a coordinator's has [storage], a worker's [worker], "
        f"{', '.join(known)}, rollout.toml only [transport] coordinator_addrs and tls_dir; found "
        f"{', '.join(sorted(sections)) or 'nothing'}"
    )


def _likeness(sections: set[str], own: frozenset[str]) -> float:
    """Return how closely a file with `sections` resembles one of a workload with sections `own`; 0 means not at all.

    Most workloads have [input] and [output]. A foreign section therefore counts against the workload, and a missing one
    a little.
    """
    if not sections & own:
        return 0.0
    foreign = sections - own
    misspelt = sum(bool(difflib.get_close_matches(section, own, n=1)) for section in foreign)
    return len(sections & own) + 0.5 * misspelt - 0.5 * (len(foreign) - misspelt) - 0.01 * len(own - sections)


def _listed(sections: frozenset[str]) -> str:
    return ", ".join(f"[{section}]" for section in sorted(sections))


def check_workload(name: str, path: Path) -> list[str]:
    from rollout.cli.checking import verdict  # commands start faster without

    workload = load(name)
    private = not find_target([], None, chosen().selector).addresses
    if private:
        workload.works_here()
    settings = workload.load(path)
    state = workload.directory(settings) / STATE_DIR if private else None
    cloud = getattr(settings, "cloud", NO_CLOUD)
    check_installed(cloud)
    said: set[str] = set()

    def tell(text: str) -> None:
        if text.startswith("waiting") and text not in said:
            said.add(text)
            typer.echo(text, err=True)

    found = verdict(workload, settings, tell)
    queued = bool(getattr(getattr(settings, "input", None), "queue", False))
    return [*found.plan, *workload_lines(cloud, private=state, queued=queued), *found.notes]


def check_coordinator(path: Path) -> list[str]:
    settings = load_settings(CoordinatorSettings, path)
    transport, storage = settings.transport, settings.storage
    _addresses(transport)
    parse_address(transport.listen_addr, "transport.listen_addr")
    where = storage.embedded.path if storage.backend == "embedded" else "PostgreSQL"
    objects = backend_name(settings.objects, storage, settings.cloud)
    find_adapter("rollout.objects", objects, "objects.backend")
    with located(path):
        check_installed(settings.cloud)
    return [
        f"serves {transport.listen_addr} over mutual TLS with certificates in {transport.tls_dir}",
        f"lets hosts join on {transport.join_addr}" if transport.join_addr else "no host can join (join_addr is empty)",
        f"keeps its ledger in {where}, objects in "
        + (f"fs ({settings.objects.path})" if objects == "fs" else _place(objects, settings.cloud)),
        f"fails a silent worker after {transport.coordinator_failure_timeout_ms / 1000:g} s",
        f"metrics and health on {settings.http.listen_addr}" if settings.http.listen_addr else "no metrics port",
    ]


def _place(backend: str, cloud: CloudSection) -> str:
    return objects_line(cloud) if backend in ("s3", "gcs") else backend


def check_client(path: Path) -> list[str]:
    settings = load_settings(ClientSettings, path)
    addresses = settings.transport.coordinator_addrs
    for address in addresses:
        parse_address(address, "transport.coordinator_addrs", need_port=True)
    tls_dir = settings.transport.tls_dir or DEFAULT_TLS_DIR
    return [
        "is read as rollout.toml by `rollout` commands that are started in its directory",
        f"they speak to {', '.join(addresses)}" if addresses else "it names no coordinator",
        f"with the certificates in {tls_dir}",
    ]


def check_worker(path: Path) -> list[str]:
    settings = load_settings(WorkerSettings, path)
    transport = as_joined(settings.transport)
    _addresses(transport)
    if not transport.coordinator_addrs:
        raise ConfigError(
            f"{path}: transport.coordinator_addrs is empty and {transport.tls_dir} has not joined a cluster: name the "
            "coordinators, as host:port, or join first"
        )
    find_adapter("rollout.secrets", backend_of(settings.secrets, settings.cloud), "secrets.backend")
    find_adapter("rollout.compute", settings.compute.backend or "local", "compute.backend")
    with located(path):
        check_installed(settings.cloud)
    missing = [manifest for manifest in settings.plugins if not Path(manifest).is_file()]
    if missing:
        raise ConfigError(f"{path}: plugins: no such file: {', '.join(missing)}")
    worker = settings.worker
    return [
        f"works for {', '.join(transport.coordinator_addrs)}, certificates in {transport.tls_dir}",
        f"offers {worker.slots} slots" + (f", roles {', '.join(worker.roles)}" if worker.roles else ""),
        f"keeps up to {settings.objects.cache_max_mib} MiB of objects in {settings.objects.cache_dir}",
        f"plugins: {', '.join(settings.plugins) or 'none'}",
        *([secrets_line(settings.cloud)] if secrets_line(settings.cloud) else []),
    ]


def _addresses(transport: TransportSection) -> None:
    for address in transport.coordinator_addrs:
        parse_address(address, "transport.coordinator_addrs", need_port=True)
    for key in ("join_addr", "advertise_addr"):
        if value := getattr(transport, key):
            parse_address(value, f"transport.{key}")
