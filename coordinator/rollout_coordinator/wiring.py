"""Builds all parts of a coordinator in one place. lifecycle.py starts and stops them."""

from __future__ import annotations

import platform
from dataclasses import dataclass
from pathlib import Path

from rollout.config.settings import CoordinatorSettings
from rollout.objects.opening import open_store
from rollout.objects.port import ObjectStore
from rollout.security.hosts import Revocations, host_name
from rollout.storage import Storage, open_storage
from rollout.telemetry.spans import Spans, open_spans

from rollout_coordinator.clock import Clock, SystemClock
from rollout_coordinator.core.core import Core
from rollout_coordinator.core.settings import CoreSettings
from rollout_coordinator.doctor_service import DoctorService
from rollout_coordinator.driver import Driver
from rollout_coordinator.heartbeat_service import ControlService, HeartbeatService
from rollout_coordinator.history import History
from rollout_coordinator.history_service import HistoryService
from rollout_coordinator.http.metrics import Metrics
from rollout_coordinator.leadership import Gate, Leadership
from rollout_coordinator.lease import LeaseKeeper, file_lock_path
from rollout_coordinator.ledger import Ledger, open_ledger
from rollout_coordinator.members import KEEP_LOCAL_S, KEEP_S, Members
from rollout_coordinator.objects_child import ObjectsChild
from rollout_coordinator.objects_gate import ObjectsGate
from rollout_coordinator.relay import Relay
from rollout_coordinator.run_views import RunViews
from rollout_coordinator.runs_service import RunsService
from rollout_coordinator.serve_service import ServeService
from rollout_coordinator.sessions import Router
from rollout_coordinator.tracing import ItemTracing
from rollout_coordinator.watchers import Watchers
from rollout_coordinator.work_service import WorkService


def tls_directory(settings: CoordinatorSettings) -> Path:
    return Path(settings.transport.tls_dir).expanduser()


def core_settings(settings: CoordinatorSettings) -> CoreSettings:
    """Convert the configuration's milliseconds to seconds."""
    t = settings.transport
    return CoreSettings(
        heartbeat_interval=t.heartbeat_interval_ms / 1000,
        coordinator_failure_timeout=t.coordinator_failure_timeout_ms / 1000,
        clock_skew_budget=t.clock_skew_budget_ms / 1000,
        orphan_grace=t.orphan_grace_ms / 1000,
        ended_on_disk=True,
    )


@dataclass(slots=True)
class Parts:
    """The parts that lifecycle.py starts and stops."""

    settings: CoordinatorSettings
    clock: Clock
    incarnation: str
    ledger: Ledger
    storage: Storage
    store: ObjectStore
    leadership: Leadership
    metrics: Metrics
    watchers: Watchers
    router: Router
    driver: Driver
    views: RunViews
    objects_gate: ObjectsGate
    objects_child: ObjectsChild
    gate: Gate
    revocations: Revocations
    work: WorkService
    runs: RunsService
    relay: Relay
    serve: ServeService
    heartbeat: HeartbeatService
    control: ControlService
    doctor: DoctorService
    history: History
    history_service: HistoryService
    members: Members
    spans: Spans | None = None


def build(
    settings: CoordinatorSettings,
    *,
    clock: Clock | None = None,
    ledger: Ledger | None = None,
    store: ObjectStore | None = None,
) -> Parts:
    """Build all parts without opening them. `clock`, `ledger` and `store` are seams for simulations and tests."""
    clock = clock or SystemClock()
    transport = settings.transport
    ttl = transport.coordinator_failure_timeout_ms / 1000
    ledger = ledger or open_ledger(settings.storage, ttl=ttl)
    storage = open_storage(settings.storage)
    store = store or open_store(settings.objects, settings.storage, settings.cloud)
    incarnation = clock.ulid()
    metrics = Metrics()
    leadership = Leadership()
    watchers = Watchers()
    history = History(ledger, clock)
    router = Router(watchers, history.note)
    objects_gate = ObjectsGate(store, metrics.object_errors.inc)
    revocations = Revocations(storage)
    gate = Gate(leadership, metrics, clock, revocations.is_revoked)
    core = core_settings(settings)
    spans = open_spans(settings.telemetry, "rollout-coordinator", incarnation, metrics.spans_dropped.inc)
    driver = Driver(
        ledger=ledger,
        make_core=lambda snapshot, now: Core.replay(core, snapshot, now),
        clock=clock,
        deliver=router.deliver,
        tick_interval=core.heartbeat_interval / 2,
        metrics=metrics,
        tracing=ItemTracing(spans) if spans is not None else None,
    )
    router.find_run = driver.run_view
    views = RunViews(driver, ledger, clock)
    members = Members(
        storage,
        transport.coordinator_addrs,
        lambda: clock.now().wall_ms,
        keep_s=KEEP_LOCAL_S if settings.storage.backend == "embedded" else KEEP_S,
    )
    relay = Relay(metrics)
    work = WorkService(gate, driver, router, objects_gate, relay, transport.cluster)
    runs = RunsService(
        gate=gate,
        driver=driver,
        ledger=ledger,
        views=views,
        watchers=watchers,
        objects=objects_gate,
        store=store,
        clock=clock,
        note=history.note,
        told=lambda: members.told,
        host_name=lambda host_id: host_name(storage, host_id),
    )

    def objects_at(addr: str) -> None:
        work.objects_addr = runs.objects_addr = addr

    return Parts(
        settings=settings,
        clock=clock,
        incarnation=incarnation,
        ledger=ledger,
        storage=storage,
        store=store,
        leadership=leadership,
        metrics=metrics,
        watchers=watchers,
        router=router,
        driver=driver,
        views=views,
        objects_gate=objects_gate,
        objects_child=ObjectsChild(settings, clock, objects_at, metrics.object_errors.inc),
        gate=gate,
        revocations=revocations,
        work=work,
        runs=runs,
        relay=relay,
        serve=ServeService(gate, relay, views),
        heartbeat=HeartbeatService(gate, driver, router, clock, metrics, lambda: members.told),
        control=ControlService(gate, router),
        doctor=DoctorService(gate, leadership, storage, settings, clock),
        history=history,
        history_service=HistoryService(gate, history, ledger, views),
        members=members,
        spans=spans,
    )


def advertised(settings: CoordinatorSettings, bound: str) -> str:
    """Return the address to publish to workers and clients, given the one that was bound."""
    if settings.transport.advertise_addr:
        return settings.transport.advertise_addr
    host, _, port = bound.rpartition(":")
    return f"{platform.node()}:{port}" if host in ("0.0.0.0", "[::]", "") else bound


def build_lease(parts: Parts, address: str) -> LeaseKeeper:
    """Return the lease of this process, whose row names `address`."""
    settings, clock = parts.settings, parts.clock
    ttl = settings.transport.coordinator_failure_timeout_ms / 1000
    embedded = settings.storage.backend == "embedded"
    return LeaseKeeper(
        parts.ledger,
        parts.incarnation,
        address,
        ttl,
        clock=lambda: clock.now().mono,
        margin=min(0.5, ttl / 5),
        file_lock=file_lock_path(settings.storage.embedded.path) if embedded else None,
    )
