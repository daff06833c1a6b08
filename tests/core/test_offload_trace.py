"""The timeline of a run."""

from __future__ import annotations

import json

from rollout.workloads.test.cases import CaseResult, Outcome, Try
from rollout.workloads.test.trace import chrome_trace


def test_a_row_for_each_slot_and_an_event_for_each_try() -> None:
    def ran(worker: str, process: str, started: float, outcome: Outcome = Outcome.PASSED) -> Try:
        return Try(outcome=outcome, started=started, seconds=1.0, worker=worker, process=process)

    results = [
        CaseResult(id="a", tries=(ran("w1", "10", 100.0, Outcome.FAILED), ran("w2", "7", 103.5))),
        CaseResult(id="b", tries=(ran("w1", "11", 100.5),)),  # beside 10
        CaseResult(id="c", tries=(ran("w1", "12", 101.0, Outcome.CRASHED),)),  # in the place of 10
        CaseResult(id="skipped before it began", tries=(Try(outcome=Outcome.SKIPPED),)),
    ]
    trace = json.loads(chrome_trace(results))
    events = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    assert [(e["name"], e["args"]["try"], e["pid"], e["tid"], e["ts"], e["dur"]) for e in events] == [
        ("a", 1, 1, 1, 0, 1_000_000),
        ("b", 1, 1, 2, 500_000, 1_000_000),
        ("c", 1, 1, 1, 1_000_000, 1_000_000),
        ("a", 2, 2, 1, 3_500_000, 1_000_000),
    ]
    named = [(e["name"], e["pid"], e["tid"], e["args"]["name"]) for e in trace["traceEvents"] if e["ph"] == "M"]
    assert named == [
        ("process_name", 1, 0, "w1"),
        ("process_name", 2, 0, "w2"),
        ("thread_name", 1, 1, "slot 1"),
        ("thread_name", 1, 2, "slot 2"),
        ("thread_name", 2, 1, "slot 1"),
    ]
    assert json.loads(chrome_trace([]))["traceEvents"] == []
