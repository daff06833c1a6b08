"""Emits the spans `queue` and `commit` of traced items, from what the driver committed and sends."""

from __future__ import annotations

from collections.abc import Iterable

from rollout.telemetry.identity import LogTraces
from rollout.telemetry.spans import Spans

from rollout_coordinator.core.events import Now
from rollout_coordinator.core.step import AssignGroup, ItemRows, ResultRows, SendAssign, Step, Writes

WAITING_MAX = 50_000
"""Maximum number of traced items whose waiting time is known. Others count from the start of this coordinator."""


class ItemTracing:
    """Is told what became durable, right afterwards; it never waits and never raises."""

    def __init__(self, spans: Spans) -> None:
        self._spans = spans
        self._since: dict[tuple[int, int], int] = {}  # (log, seq): Unix time in ns
        self._began_ns = 0

    def replayed(self, now: Now) -> None:
        """Trace what was submitted before as if it had waited since now."""
        self._began_ns = now.wall_ms * 1_000_000

    def committed(self, step: Step, began: Now, committed: float) -> None:
        """Trace a committed step. `committed` is on the clock of `began.mono`."""
        start_ns = began.wall_ms * 1_000_000
        end_ns = start_ns + round((committed - began.mono) * 1e9)
        writes = step.writes
        for items in writes.items:
            self._submitted(items, self._of(items.log, writes), end_ns)
        for rows in writes.results:
            self._accepted(rows, self._of(rows.log, writes), start_ns, end_ns)
        for attempt in writes.attempts:
            traces = self._of(attempt.log, writes)
            if traces is not None and traces.is_sampled(attempt.seq):
                self._wait(((attempt.log, attempt.seq),), end_ns)
        for send in step.sends:
            if isinstance(send, SendAssign):
                for group in send.groups:
                    self._assigned(group, end_ns)

    def _of(self, log: int, writes: Writes) -> LogTraces | None:
        row = writes.logs.get(log)
        return self._spans.of(row.run_id, log) if row is not None else self._spans.known(log)

    def _wait(self, keys: Iterable[tuple[int, int]], since_ns: int) -> None:
        for key in keys:
            if len(self._since) >= WAITING_MAX:
                del self._since[next(iter(self._since))]
            self._since[key] = since_ns

    def _submitted(self, items: ItemRows, traces: LogTraces | None, now_ns: int) -> None:
        if traces is not None:
            seqs = range(items.first_seq, items.first_seq + len(items.ids))
            self._wait([(items.log, seq) for seq in seqs if traces.is_sampled(seq)], now_ns)

    def _assigned(self, group: AssignGroup, now_ns: int) -> None:
        traces = self._spans.of(group.run_id, group.log)
        for seq, attempt in zip(group.seq, group.attempt, strict=True):
            if traces.is_sampled(seq):
                since_ns = self._since.pop((group.log, seq), self._began_ns)
                self._spans.add((traces, seq), "queue", attempt, since_ns, now_ns)

    def _accepted(self, rows: ResultRows, traces: LogTraces | None, start_ns: int, end_ns: int) -> None:
        if traces is None:
            return
        for i, seq in enumerate(rows.seq):
            if traces.is_sampled(seq):
                failure = rows.failures.get(i)
                attributes = {"rollout.worker": rows.worker, "rollout.outcome": rows.outcome[i].name.lower()}
                error = failure.code if failure is not None else ""
                self._spans.add((traces, seq), "commit", rows.attempt[i], start_ns, end_ns, attributes, error)
