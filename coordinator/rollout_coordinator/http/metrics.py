"""Prometheus metrics of one coordinator, in a registry of its own."""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from rollout.model.item import Outcome
from rollout.model.worker import WorkerState

from rollout_coordinator.core.step import Writes
from rollout_coordinator.core.views import RunView, WorkerView

_FAST = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0)
_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)


class Metrics:
    def __init__(self) -> None:
        r = self.registry = CollectorRegistry()
        self.leader = Gauge("rollout_leader", "1 while this coordinator serves as leader.", registry=r)
        self.epoch = Gauge("rollout_lease_epoch", "Epoch of the lease this coordinator holds or last saw.", registry=r)
        self.step_seconds = Histogram("rollout_step_seconds", "Core time of a batch.", buckets=_FAST, registry=r)
        self.commit_seconds = Histogram("rollout_commit_seconds", "Ledger commit.", buckets=_FAST, registry=r)
        self.batch_events = Histogram("rollout_batch_events", "Events of a batch.", buckets=_SIZES, registry=r)
        self.queue = Gauge("rollout_events_queued", "Events waiting for the core.", registry=r)
        self.submitted = Counter("rollout_items_submitted", "Items made durable.", registry=r)
        self.results = Counter("rollout_results", "Results accepted, by outcome.", ["outcome"], registry=r)
        self.assigned = Counter("rollout_attempts_assigned", "Attempts given to workers.", registry=r)
        self.ended = Counter("rollout_attempts_ended", "Attempts that did not end their item.", ["end"], registry=r)
        self.beats = Counter("rollout_heartbeats", "Heartbeats read.", registry=r)
        self.loads = Counter("rollout_ledger_loads", "Reads that the core asked for.", registry=r)
        self.replays = Counter("rollout_replays", "Times the ledger was replayed after a store fault.", registry=r)
        self.replay_seconds = Gauge("rollout_replay_seconds", "Duration of the last replay.", registry=r)
        self.sessions = Gauge("rollout_work_streams", "Open Work streams.", registry=r)
        self.watchers = Gauge("rollout_watchers", "Open Watch streams.", registry=r)
        self.gateways = Gauge("rollout_gateway_streams", "Open streams of gateways.", registry=r)
        self.relayed = Counter(
            "rollout_relayed_bytes", "Bytes relayed between gateways and replicas.", ["direction"], registry=r
        )
        self.workers = Gauge("rollout_workers", "Workers by state.", ["state"], registry=r)
        self.workers_lost = Counter("rollout_workers_lost", "Workers declared failed.", registry=r)
        self.object_errors = Counter(
            "rollout_object_store_errors", "Calls that the object store failed, and ends of its server.", registry=r
        )
        self.runs = Gauge("rollout_runs", "Runs that have not ended, by state.", ["state"], registry=r)
        self.items = Gauge("rollout_items", "Items of runs that have not ended, by state.", ["state"], registry=r)
        self.core = Gauge("rollout_core", "Numbers of the core since it began, by name.", ["name"], registry=r)
        self.tasks = Gauge("rollout_asyncio_tasks", "Tasks of the event loop.", registry=r)
        self.certificate = Gauge(
            "rollout_certificate_not_after_seconds", "Unix time at which this process's certificate ends.", registry=r
        )
        self.spans_dropped = Counter("rollout_spans_dropped", "Spans of traces that were not exported.", registry=r)
        self.refused = Counter("rollout_calls_refused", "Calls refused, by error code.", ["code"], registry=r)

    def committed(self, writes: Writes, step_s: float, commit_s: float) -> None:
        """Count what a transaction made durable."""
        self.step_seconds.observe(step_s)
        self.commit_seconds.observe(commit_s)
        for items in writes.items:
            self.submitted.inc(len(items.ids))
        for rows in writes.results:
            for outcome in Outcome:
                count = rows.outcome.count(outcome)
                if count:
                    self.results.labels(outcome.name.lower()).inc(count)
        for batch in writes.assignments:
            self.assigned.inc(sum(len(keys.seq) for keys in batch.keys))
        for attempt in writes.attempts:
            self.ended.labels(str(attempt.end)).inc()
        for worker in writes.workers.values():
            self.workers_lost.inc(worker.state is WorkerState.FAILED)

    def observe(self, runs: Iterable[RunView], workers: Iterable[WorkerView], core: dict[str, float]) -> None:
        """Set the gauges that are read from the core at a scrape."""
        for gauge in (self.workers, self.runs, self.items):
            gauge.clear()
        self.core.clear()
        for name, value in core.items():
            self.core.labels(name).set(value)
        for worker in workers:
            self.workers.labels(str(worker.state)).inc()
        for run in runs:
            self.runs.labels(str(run.state)).inc()
            ended = run.done + run.failed + run.cancelled + run.skipped
            self.items.labels("pending").inc(max(0, run.submitted - ended - run.in_flight))
            self.items.labels("assigned").inc(max(0, run.in_flight - run.running))
            self.items.labels("running").inc(run.running)
            for name in ("done", "failed", "cancelled", "skipped"):
                self.items.labels(name).inc(getattr(run, name))

    def render(self) -> bytes:
        return generate_latest(self.registry)
