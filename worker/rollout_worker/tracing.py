"""Spans `attempt` and `engine` of traced items, from the session's events and actions."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence

from rollout.telemetry.spans import Spans
from rollout.wire.v1 import work_pb2

from rollout_worker import session_events as ev

HELD_MAX = 10_000


class AttemptTracing:
    """Tracing of attempts. `engine` ends when the child process has reported, and lasts as long as it says."""

    def __init__(self, spans: Spans, worker: str) -> None:
        self._spans = spans
        self._attributes = {"rollout.worker": worker}
        self._since: dict[tuple[int, int, int], int] = {}  # (log, seq, attempt): Unix time in ns

    def seen(self, event: ev.Event, actions: Iterable[ev.Action]) -> None:
        """Record an event of the session and its actions."""
        now_ns = time.time_ns()
        if isinstance(event, ev.Frame) and event.frame.HasField("assign"):
            for assigned in event.frame.assign.groups:
                self._assigned(assigned, now_ns)
        elif isinstance(event, ev.ChildResults):
            self._ran(event.group, now_ns)
        for action in actions:
            if isinstance(action, ev.Send) and action.frame.HasField("results"):
                for group in action.frame.results.groups:
                    self._ended(group, now_ns)

    def _assigned(self, group: work_pb2.AssignGroup, now_ns: int) -> None:
        traces = self._spans.of(group.run.run_id, group.log)
        for seq, attempt in zip(group.seq, group.attempt, strict=False):
            if traces.is_sampled(seq):
                if len(self._since) >= HELD_MAX:
                    del self._since[next(iter(self._since))]
                self._since[group.log, seq, attempt] = now_ns

    def _ran(self, group: work_pb2.ResultGroup, now_ns: int) -> None:
        traces = self._spans.known(group.log)
        if traces is None or not self._since:
            return
        for i, (seq, attempt) in enumerate(zip(group.seq, group.attempt, strict=False)):
            if (group.log, seq, attempt) in self._since:
                start_ns = now_ns - _at(group.duration_ms, i) * 1_000_000
                units = {"rollout.units_in": _at(group.units_in, i), "rollout.units_out": _at(group.units_out, i)}
                attributes = self._attributes | units
                self._spans.add((traces, seq), "engine", attempt, start_ns, now_ns, attributes, _error(group, i))

    def _ended(self, group: work_pb2.ResultGroup, now_ns: int) -> None:
        traces = self._spans.known(group.log)
        if traces is None or not self._since:
            return
        for i, (seq, attempt) in enumerate(zip(group.seq, group.attempt, strict=False)):
            start_ns = self._since.pop((group.log, seq, attempt), None)
            if start_ns is not None:
                item = traces, seq
                self._spans.add(item, "attempt", attempt, start_ns, now_ns, self._attributes, _error(group, i))


def _at(column: Sequence[int], index: int) -> int:
    """Return the value, or 0 if the column is empty or incomplete."""
    return column[index] if index < len(column) else 0


def _error(group: work_pb2.ResultGroup, index: int) -> str:
    return next((error.code for error in group.errors if error.index == index), "")
