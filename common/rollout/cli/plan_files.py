"""What each kind of configuration file is, and what it would do."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from rollout.cli.workloads import WORKLOADS
from rollout.client.target import as_joined
from rollout.config.adapters import find_adapter
from rollout.config.load import load_settings, read_values
from rollout.config.settings import CoordinatorSettings, TransportSection, WorkerSettings
from rollout.model.address import parse_address
from rollout.model.errors import ConfigError
from rollout.workloads.infer import InferConfig, InputReport, check_input, resolve_model

_COORDINATOR_ONLY = frozenset(CoordinatorSettings.model_fields) - frozenset(WorkerSettings.model_fields)
_WORKER_ONLY = frozenset(WorkerSettings.model_fields) - frozenset(CoordinatorSettings.model_fields)
_PACKAGE = {"vllm": "vllm", "transformers": "transformers"}


def kind_of(path: Path) -> str:
    """ "coordinator", "worker", or a workload's name, by the sections that the file has. ConfigError."""
    values, _ = read_values(path)
    sections = set(values)
    scores = {workload.name: len(sections & workload.sections) for workload in WORKLOADS}
    scores["coordinator"] = 2 * len(sections & _COORDINATOR_ONLY)
    scores["worker"] = 2 * len(sections & _WORKER_ONLY)
    best = max(scores, key=lambda name: scores[name])
    if scores[best]:
        return best
    if "transport" in sections:  # of either; coordinators listen, workers are told where
        transport = values["transport"]
        listens = isinstance(transport, dict) and "listen_addr" in transport
        return "coordinator" if listens else "worker"
    shared: set[str] = sections & set(CoordinatorSettings.model_fields)
    if shared:
        return "coordinator"
    raise ConfigError(
        f"{path}: this is no known configuration: a coordinator's has [storage], a worker's [worker], a batch's "
        f"[model], [input] and [output]; found {', '.join(sorted(sections)) or 'nothing'}"
    )


def check_coordinator(path: Path) -> list[str]:
    settings = load_settings(CoordinatorSettings, path)
    transport, storage = settings.transport, settings.storage
    _addresses(transport)
    parse_address(transport.listen_addr, "transport.listen_addr")
    where = storage.embedded.path if storage.backend == "embedded" else "PostgreSQL"
    objects = settings.objects.backend or ("postgres" if storage.backend == "postgres" else "fs")
    find_adapter("rollout.objects", objects, "objects.backend:")
    return [
        f"serves {transport.listen_addr} over mutual TLS with certificates in {transport.tls_dir}",
        f"lets hosts join on {transport.join_addr}" if transport.join_addr else "no host can join (join_addr is empty)",
        f"keeps its ledger in {where}, objects in {objects}"
        + (f" ({settings.objects.path})" if objects == "fs" else ""),
        f"fails a silent worker after {transport.coordinator_failure_timeout_ms / 1000:g} s",
        f"metrics and health on {settings.http.listen_addr}" if settings.http.listen_addr else "no metrics port",
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
    find_adapter("rollout.secrets", settings.secrets.backend, "secrets.backend:")
    find_adapter("rollout.compute", settings.compute.backend, "compute.backend:")
    missing = [manifest for manifest in settings.plugins if not Path(manifest).is_file()]
    if missing:
        raise ConfigError(f"{path}: plugins: no such file: {', '.join(missing)}")
    worker = settings.worker
    return [
        f"works for {', '.join(transport.coordinator_addrs)}, certificates in {transport.tls_dir}",
        f"offers {worker.slots} slots" + (f", roles {', '.join(worker.roles)}" if worker.roles else ""),
        f"keeps up to {settings.objects.cache_max_mib} MiB of objects in {settings.objects.cache_dir}",
        f"plugins: {', '.join(settings.plugins) or 'none'}",
    ]


def check_infer(path: Path) -> list[str]:
    config = load_settings(InferConfig, path)
    report = check_batch(config)
    return describe_batch(config, report)


def check_batch(config: InferConfig) -> InputReport:
    """All that can be checked before anything starts, the backend's packages apart. ConfigError, InputError."""
    find_adapter("rollout.backends", config.backend.kind, "backend.kind:")
    resolve_model(config)
    return check_input(config)


def need_backend(config: InferConfig) -> None:
    """ConfigError that names the extra to install when this host's workers could not load the engine."""
    kind = config.backend.kind
    find_adapter("rollout.backends", kind, "backend.kind:")
    package = _PACKAGE.get(kind)
    if package and find_spec(package) is None:
        raise ConfigError(
            f'backend.kind = "{kind}" needs the Python package {package} on this host: pip install '
            f'"rollout-engine[{kind}]", or send the batch to a cluster that has it with --coordinator'
        )


def describe_batch(config: InferConfig, report: InputReport) -> list[str]:
    return [
        f"model {config.model.uri} on backend {config.backend.kind}",
        f"{report.rows} rows in {len(report.files)} file(s) ({report.bytes} bytes)",
        f"writes completions.jsonl, errors.jsonl and summary.json to {config.output.dir}",
        f"{config.workers.count} workers when no coordinator is named",
    ]


def _addresses(transport: TransportSection) -> None:
    for address in transport.coordinator_addrs:
        parse_address(address, "transport.coordinator_addrs", need_port=True)
    for key in ("join_addr", "advertise_addr"):
        if value := getattr(transport, key):
            parse_address(value, f"transport.{key}")
