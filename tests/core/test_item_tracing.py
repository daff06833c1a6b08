"""Spans of items from what a coordinator commits: another coordinator goes on, and retries wait anew."""

from __future__ import annotations

from typing import Any, cast

import pytest
from rollout.config.settings import TelemetrySection
from rollout.model.errors import ConfigError
from rollout.model.item import DEFAULT_SPEC, AttemptEnd, Outcome
from rollout.telemetry.identity import LogTraces
from rollout.telemetry.spans import Spans, open_spans
from rollout_coordinator.core.events import Now
from rollout_coordinator.core.step import (
    AssignGroup,
    AttemptRow,
    ItemRows,
    LogRow,
    ResultRows,
    SendAssign,
    Step,
    Writes,
)
from rollout_coordinator.tracing import ItemTracing

RUN = "01J0000000000000000000000A"
LOG = 7
MS = 1_000_000
TRACES = LogTraces(RUN, LOG, 1.0)
ROW = LogRow(LOG, RUN, 0, 0, 1, True, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0)


class Kept:
    """What would be exported, by name and attempt."""

    def __init__(self) -> None:
        self.spans: dict[tuple[str, int], tuple[Any, ...]] = {}

    def add(self, name: str, ids: Any, start_ns: int, end_ns: int, attributes: dict[str, Any], error: str) -> None:
        self.spans[name, attributes.get("rollout.attempt", 0)] = (ids, start_ns // MS, end_ns // MS, error)


def tracing() -> tuple[ItemTracing, Kept]:
    kept = Kept()
    return ItemTracing(Spans(cast(Any, kept), 1.0)), kept


def assigned(attempt: int) -> Step:
    group = AssignGroup(LOG, RUN, None, [0], [attempt], [b"i" * 32], [b""], [DEFAULT_SPEC], [], [])
    return Step(sends=[SendAssign("s", [group])])


def accepted(attempt: int) -> Step:
    rows = ResultRows(LOG, [0], [attempt], [Outcome.DONE], [b""], {}, [1], [0], [0], "w", 0)
    return Step(Writes(logs={LOG: ROW}, results=[rows]))


def ids(name: str, attempt: int, above: str, above_attempt: int) -> tuple[int, int, int]:
    return TRACES.trace_id(0), TRACES.span_id(0, name, attempt), TRACES.span_id(0, above, above_attempt)


def test_an_item_waits_from_its_commit_and_again_after_a_failure() -> None:
    traced, kept = tracing()
    traced.replayed(Now(0.0, 500))
    traced.committed(
        Step(Writes(logs={LOG: ROW}, items=[ItemRows(LOG, 0, [b"i" * 32], [b""], [0])])), Now(1.0, 1000), 1.002
    )
    traced.committed(assigned(1), Now(2.0, 2000), 2.003)
    lost = AttemptRow(LOG, 0, 1, "w", AttemptEnd.FAILED, "boom", "", 3000)
    traced.committed(Step(Writes(logs={LOG: ROW}, attempts=[lost])), Now(3.0, 3000), 3.0)
    traced.committed(assigned(2), Now(5.0, 5000), 5.0)
    assert kept.spans == {
        ("queue", 1): (ids("queue", 1, "submit", 0), 1002, 2003, ""),
        ("queue", 2): (ids("queue", 2, "submit", 0), 3000, 5000, ""),
    }


def test_a_coordinator_that_took_over_continues_the_traces() -> None:
    traced, kept = tracing()
    traced.replayed(Now(0.0, 500))
    traced.committed(accepted(3), Now(1.0, 1000), 1.004)  # it was assigned by the one before
    traced.committed(assigned(4), Now(2.0, 2000), 2.0)
    assert kept.spans == {
        ("commit", 3): (ids("commit", 3, "attempt", 3), 1000, 1004, ""),
        ("queue", 4): (ids("queue", 4, "submit", 0), 500, 2000, ""),
    }


def test_a_smaller_ratio_picks_among_the_items_of_a_larger_one_evenly() -> None:
    def picked(ratio: float) -> set[int]:
        log = LogTraces(RUN, LOG, ratio)
        return {seq for seq in range(100_000) if log.is_sampled(seq)}

    assert picked(0.0) == set() and picked(0.01) < picked(0.1) < picked(1.0) == set(range(100_000))
    assert abs(len(picked(0.01)) - 1000) <= 2
    assert all(abs(sum(seq % 8 == at for seq in picked(0.01)) - 125) <= 12 for at in range(8))


def test_spans_beyond_the_queue_or_without_a_collector_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_BSP_MAX_QUEUE_SIZE", "4")
    with pytest.raises(ConfigError, match="OTEL_"):  # a batch of 512 does not fit
        open_spans(TelemetrySection(otlp_endpoint="http://127.0.0.1:9"), "s", "i", lambda _: None)
    monkeypatch.setenv("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", "4")
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "3600000")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "0.01")
    dropped: list[int] = []
    spans = open_spans(TelemetrySection(otlp_endpoint="http://127.0.0.1:9"), "s", "i", dropped.append)
    assert spans is not None
    for seq in range(50):
        spans.add((TRACES, seq), "submit", 0, 1, 2)
    spans.close()
    assert sum(dropped) == 50
    monkeypatch.setenv("OTEL_SDK_DISABLED", "true")
    assert open_spans(TelemetrySection(otlp_endpoint="http://127.0.0.1:9"), "s", "i", dropped.append) is None
