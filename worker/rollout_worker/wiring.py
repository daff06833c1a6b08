"""Builds a worker from its settings: the only place that knows every part."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Mapping, Sequence
from importlib.metadata import entry_points
from importlib.metadata import version as installed_version
from pathlib import Path
from typing import Any

import structlog
from prometheus_client import CollectorRegistry, Counter
from rollout.compute.opening import open_compute
from rollout.compute.port import Compute, Host
from rollout.config.settings import WorkerSection, WorkerSettings
from rollout.model.errors import ConfigError, RolloutError
from rollout.model.worker import Inventory
from rollout.secrets import open_secrets
from rollout.security.credentials import Credentials
from rollout.security.roles import Role
from rollout.telemetry.spans import open_spans
from rollout.wire.epoch import EpochGuard

from rollout_worker.driver import Driver, Parts, new_ulid
from rollout_worker.environment import AllowedSecrets
from rollout_worker.executors.port import Executor
from rollout_worker.hosting.host import PluginHost
from rollout_worker.http import WorkerHttp
from rollout_worker.processes.plans import planner
from rollout_worker.session import Session, SessionSettings

log = structlog.get_logger()

EXECUTORS = "rollout.executors"


def load_executors(wanted: Sequence[str] = ()) -> dict[str, type[Executor]]:
    """Return the `wanted` executors, or all installed ones, that can be imported; the others are reported and not
    offered.

    If a wanted one is not installed, all are returned: `offered` reports it.
    """
    found: dict[str, type[Executor]] = {}
    installed = entry_points(group=EXECUTORS)
    names = set(wanted) if wanted and installed.names.issuperset(wanted) else installed.names
    for entry in sorted((one for one in installed if one.name in names), key=lambda e: e.name):
        try:
            found[entry.name] = entry.load()
        except ImportError as error:
            log.warning("executor_unavailable", executor=entry.name, error=str(error))
    return found


def offered(installed: Mapping[str, type[Executor]], wanted: Sequence[str]) -> dict[str, type[Executor]]:
    """Return the executors that `[worker] executors` names, or all. Raises ConfigError if one is not installed."""
    missing = [name for name in wanted if name not in installed]
    if missing:
        raise ConfigError(
            f"[worker] executors names {', '.join(map(repr, missing))}, not installed here (installed: "
            f"{', '.join(sorted(installed)) or 'none'}); install the package that provides it, or take it off the list"
        )
    return {name: installed[name] for name in wanted or installed}


def devices_to_lease(worker: WorkerSection, host: Host) -> tuple[str, ...]:
    """Return the devices of `[worker] devices`, or those found. Raises ConfigError for duplicates, or too few for
    `gpus`."""
    devices = tuple(worker.devices) or tuple(gpu.device for gpu in host.gpus)
    twice = sorted({device for device in devices if devices.count(device) > 1})
    if twice:
        raise ConfigError(f"[worker] devices names {', '.join(twice)} twice: two processes would be given it")
    declared = worker.capacity.get("gpus")
    if devices and declared is not None and declared > len(devices):
        raise ConfigError(
            f"[worker.capacity] gpus = {declared:g}, but this worker has {len(devices)} devices "
            f"({', '.join(devices)}): leave it out, or name the others in [worker] devices"
        )
    return devices


def inventory(
    settings: WorkerSettings, host: Host, devices: tuple[str, ...], plugins: tuple[str, ...], executors: tuple[str, ...]
) -> Inventory:
    capacity: dict[str, float] = {
        "cpus": float(host.cpus),
        "memory_mib": float(host.memory_mib),
        "gpus": float(len(devices)),
        **settings.worker.capacity,
        "slots": float(settings.worker.slots),
    }
    return Inventory(
        capacity=tuple(sorted(capacity.items())),
        roles=tuple(settings.worker.roles),
        labels=tuple(sorted({**dict(host.labels), **settings.worker.labels}.items())),
        plugins=plugins,
        host=socket.gethostname(),
        version=installed_version("rollout-engine"),
        executors=executors,
        pid=os.getpid(),
        devices=devices,
    )


_WHY_STOPPED = {
    "drained": "everything it had is finished or given back",
    "orphaned": "no coordinator came back in time, so what it had was given up; it starts anew",
    "refused": "the cluster refused it; it starts anew",
    "not_allowed": "the cluster does not let it in",
}


class Worker:
    """Daemon: one incarnation after another, until it has drained or must not continue."""

    def __init__(self, settings: WorkerSettings, worker_id: str = "", plugins: list[Path] | None = None) -> None:
        self._settings = settings
        self._next_id = worker_id
        self._manifests = [*map(Path, settings.plugins), *(plugins or [])]
        self.host = PluginHost(hot_reload=settings.worker.dev_hot_reload)
        self._secrets = AllowedSecrets(open_secrets(settings.secrets, settings.cloud))
        self._registry = CollectorRegistry()
        dropped = Counter(
            "rollout_worker_spans_dropped", "Spans of traces that were not exported.", registry=self._registry
        )
        self._spans = open_spans(settings.telemetry, "rollout-worker", socket.gethostname(), dropped.inc)
        self._driver: Driver | None = None
        self._credentials: Credentials | None = None
        self._drain: tuple[str, float, bool] | None = None
        self._waiting: asyncio.Task[Any] | None = None

    @property
    def driver(self) -> Driver | None:
        return self._driver

    def _session(self) -> Session | None:
        return self._driver.session if self._driver is not None else None

    def _certificate_ends(self) -> float:
        return self._credentials.not_after if self._credentials is not None else 0.0

    def drain(self, reason: str, budget_s: float, preempted: bool = False) -> None:
        self._drain = (reason, budget_s, preempted)
        if self._driver is not None:
            self._driver.drain(reason, budget_s, preempted)
        elif self._waiting is not None:
            self._waiting.cancel()

    async def run(self) -> int:
        """Run and return the exit code: 0 drained, 1 the cluster refused this worker."""
        settings = self._settings
        compute = open_compute(settings.compute, settings.cloud)
        listen = settings.http.listen_addr
        http = self._http(listen) if listen else None
        notice: asyncio.Task[None] | None = None
        try:
            for manifest in self._manifests:
                await self.host.load(manifest)
            if http is not None:
                log.info("http_ready", addr=await http.start())
            executors = offered(
                await asyncio.to_thread(load_executors, settings.worker.executors), settings.worker.executors
            )
            host = await compute.inventory()
            devices = devices_to_lease(settings.worker, host)
            offer = inventory(settings, host, devices, tuple(self.host.names()), tuple(executors))
            notice = asyncio.create_task(self._preemption(compute))
            while True:
                how = await self._incarnation(offer, devices, executors)
                log.info("worker_stopped", how=how, why=_WHY_STOPPED.get(how, how))
                if how == "drained":
                    return 0
                if how == "not_allowed":
                    return 1
                # What it held is lost to it; a fresh incarnation takes new work.
        finally:
            if notice is not None:
                notice.cancel()
            if http is not None:
                await http.close()
            await self.host.close()
            await self._secrets.close()
            await compute.close()
            if self._spans is not None:
                await asyncio.to_thread(self._spans.close)

    def _http(self, listen: str) -> WorkerHttp:
        directories = self._settings.worker.scratch_dir, self._settings.objects.cache_dir
        return WorkerHttp(listen, self._session, self._certificate_ends, self._registry, directories)

    async def _incarnation(
        self, offer: Inventory, devices: tuple[str, ...], executors: dict[str, type[Executor]]
    ) -> str:
        settings = self._settings
        incarnation, self._next_id = self._next_id or new_ulid(), ""
        transport = settings.transport
        while True:
            if self._drain is not None:
                return "drained"
            self._waiting = asyncio.create_task(
                Credentials.obtain(
                    tls_dir=Path(transport.tls_dir),
                    cluster=transport.cluster,
                    role=Role.WORKER,
                    incarnation=incarnation,
                    lifetime_s=transport.certificate_lifetime_s,
                    addresses=transport.coordinator_addrs,
                )
            )
            try:
                credentials = await self._waiting
                break
            except asyncio.CancelledError:
                if self._drain is None:
                    raise
            except RolloutError as error:
                if not error.retryable:
                    raise
                log.warning("certificate_unavailable", error=error.message)
            finally:
                self._waiting = None
        worker = settings.worker
        session = Session(
            SessionSettings(
                incarnation=incarnation,
                inventory=offer,
                slots=worker.slots,
                max_engines=worker.max_engines,
                devices=devices,
                start_timeout_s=worker.start_timeout_s,
                self_fence_s=transport.worker_self_fence_timeout_ms / 1000,
                orphan_grace_s=transport.orphan_grace_ms / 1000,
            ),
            planner(executors),
        )
        parts = Parts(
            settings=settings,
            session=session,
            credentials=credentials,
            guard=EpochGuard(),
            incarnation=incarnation,
            reload_plugins=self._reload,
            call_plugin=self.host.call,
            secrets=self._secrets.read,
            spans=self._spans,
        )
        self._credentials = credentials
        driver = self._driver = Driver(parts)
        log.info("worker_starting", worker=incarnation, slots=worker.slots, pid=os.getpid())
        self._pass_on_drain(driver)
        try:
            return await driver.run()
        finally:
            self._driver = self._credentials = None

    def _pass_on_drain(self, driver: Driver) -> None:
        """Pass on a drain that came while there was no incarnation."""
        if self._drain is not None:
            driver.drain(*self._drain)

    async def _reload(self, names: list[str]) -> None:
        for name in names or self.host.names():
            try:
                await self.host.reload(name, "control")
            except RolloutError as error:
                log.error("plugin_reload_failed", plugin=name, error=error.message)

    async def _preemption(self, compute: Compute) -> None:
        notice = await compute.preemption()
        log.warning("preemption_notice", reason=notice.reason, lead_s=notice.lead_s, budget_s=notice.budget_s)
        self.drain(f"its machine goes away (preemption): {notice.reason}", notice.budget_s, preempted=True)
