"""What an operator finds in the history: which rows failed and why, and who gave which order."""

from __future__ import annotations

from typing import Any

from core_world import World
from rollout.config.sentences import sentence_of
from rollout.model.item import INVALID, Failure
from rollout_coordinator.core import step as st
from rollout_coordinator.core.events import WorkerCommand
from rollout_coordinator.core.row_failures import TOLD_MAX


def told(step: st.Step, *events: str) -> list[dict[str, Any]]:
    return [send.fields for send in step.sends if isinstance(send, st.Emit) and send.event in events]


def test_of_rows_that_fail_each_cause_is_told_once_and_the_rest_is_counted() -> None:
    w = World()
    a = w.worker("A", credit=100)
    w.open()
    w.submit(40)
    w.seal(40)
    log, found = w.root(), []
    messages = ["boom at row 7", "boom at row 8", *(f"other {chr(97 + n)}" for n in range(22))]
    for seq, message in enumerate(messages):
        found += told(a.finish((log, seq), failure=Failure("exception", message, False)), "row_failed")
    found += told(a.finish((log, 30), failure=Failure(INVALID, "no row", False)), "row_failed")
    assert [event["row"] for event in found] == ["1", *(str(n) for n in range(3, 2 + TOLD_MAX))]
    assert sentence_of("row_failed", found[0]) == (
        "row 1 of run R failed for good on worker A, exception: boom at row 7"
    )  # fmt: skip
    (rest,) = told(a.finish(), "more_rows_failed")
    assert rest == {"run_id": "R", "count": len(messages) - TOLD_MAX}


def test_who_gave_an_order_is_told() -> None:
    w = World()
    w.worker("A")
    w.open()
    w.submit(4)
    by = "operator on host desk"
    for verb in ("pause", "resume", "kill", "continue"):
        w.verb(verb, by=by, reason="why")
    w.ask(WorkerCommand, "A", "drain", by=by)
    names = ("run_paused", "run_resumed", "run_killed", "run_continued", "worker_told_to_drain")
    said = [sentence_of(name, *w.events(name)) for name in names]
    assert said[0] is not None and said[0].startswith("run R is paused by the operator on host desk: why")
    assert said[1] == "run R goes on, resumed by the operator on host desk: why"
    assert said[2] is not None and said[2].startswith("run R was killed by the operator on host desk: why")
    assert said[3] == "run R goes on, continued by the operator on host desk: why"
    assert said[4] is not None and "gets no new work: drained by the operator on host desk" in said[4]
