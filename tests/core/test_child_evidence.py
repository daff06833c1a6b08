"""What a child process makes of the errors that user code raises: failures that travel, and evidence that is some."""

from __future__ import annotations

from typing import Any

import pytest
from rollout.model.errors import AttemptError
from rollout.model.item import Failure, Outcome
from rollout.wire.codec import RETRY_AFTER_MAX_MS, failure_to_wire, failures_from_wire
from rollout_worker.executors.port import Done
from rollout_worker.processes.runner import NOTHING, evidence_of, failure_of

OBJECT = b"o" * 32


def test_evidence_is_what_the_executor_left() -> None:
    error = AttemptError(
        "no", code="c", retry=False, data=b"d", keeps=(OBJECT,), units_in=1, units_out=2, retry_after_ms=3
    )
    assert failure_of(error) == Failure("c", "no", False, retry_after_ms=3)
    assert evidence_of(error) == Done(b"d", 1, 2, Outcome.FAILED, (OBJECT,))


@pytest.mark.parametrize(
    "wrong",
    [{"data": "text"}, {"keeps": [OBJECT]}, {"keeps": (b"short",)}, {"units_in": -1}, {"units_out": 1 << 40},
     {"units_in": 1.5}, {"retry_after_ms": -1}, {"retry_after_ms": float("nan")}],
)  # fmt: skip
def test_evidence_that_is_none_is_left_out_and_named(wrong: dict[str, Any]) -> None:
    error = AttemptError("no", code="c", **({"data": b"d", "keeps": (OBJECT,), "retry_after_ms": 3} | wrong))
    failure = failure_of(error)
    assert failure.message == f"no; the executor left evidence of it that is none: {', '.join(wrong)}"
    assert evidence_of(error) is NOTHING
    assert failure.retry_after_ms == (None if "retry_after_ms" in wrong else 3)
    failure_to_wire(0, failure)


@pytest.mark.parametrize(("told", "meant"), [(None, None), (0, 0), (7, 7), (10**12, RETRY_AFTER_MAX_MS)])
def test_a_delay_travels_and_is_at_most_a_day(told: int | None, meant: int | None) -> None:
    (failure,) = failures_from_wire([failure_to_wire(0, Failure("c", "m", retry_after_ms=told))]).values()
    assert failure.retry_after_ms == meant
