"""Rows of facts: what a slot that was committed becomes."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from typing import Any

import pytest
from experiments import resolved
from rollout.model.item import Outcome
from rollout.workloads.experiment.compile import Items, job_of
from rollout.workloads.experiment.contracts import HookEvent, RunManifest, TrialOutcome
from rollout.workloads.experiment.facts import VOLATILE, CommittedSlot, Setting, rows
from rollout.workloads.experiment.layout import EVENTS, METRICS, SNAPSHOTS, TRIALS
from rollout.workloads.experiment.trial_files import TrialFiles
from rollout.workloads.job.record import TrialRecord, Usage
from rollout.workloads.job.results import Timestamps, TrialError, TrialResult

NOW = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
GRADED = {"grading": {"command": "grade"}}
KEY = ["run_id", "schedule_index", "slot_commit_id", "attempt", "row_sequence"]


def record(error: str = "", rewards: dict[str, float] | None = None) -> TrialRecord:
    times = Timestamps(started_at=NOW, ended_at=NOW)
    result = TrialResult(
        task_name="t0",
        dataset_name="e",
        agent_name="b",
        attempt=1,
        task_git_commit_id=None,
        reward=None,
        cost=0.5,
        error=TrialError(type=error, message="why") if error else None,
        durations=times.durations(),
        timestamps=times,
    )
    return TrialRecord(trial="00", result=result, rewards=rewards, usage=Usage(n_input_tokens=3, n_output_tokens=4))


def left(outcome: Any = "success", **keys: Any) -> TrialOutcome:
    return TrialOutcome.of({"outcome": outcome, "exit_status": 0, **keys})


def facts(
    outcome: Outcome = Outcome.DONE,
    found: TrialRecord | None = None,
    files: TrialFiles | None = None,
    retried: tuple[str, ...] = (),
    **sections: Any,
) -> dict[str, list[dict[str, Any]]]:
    """By file, of the slot of variant b at task t0."""
    experiment = resolved(**sections)
    job = job_of(experiment)
    items = Items(experiment, job, {})
    slot = CommittedSlot(
        items.input(1), outcome, found or record(), files or TrialFiles(outcome=left()), retried, "worker"
    )
    if outcome is Outcome.SKIPPED:
        slot = CommittedSlot(items.input(1), outcome)
    made: dict[str, list[dict[str, Any]]] = {TRIALS: [], METRICS: [], EVENTS: [], SNAPSHOTS: []}
    for name, row in rows(slot, Setting.of(experiment.json, experiment.digest, "run")):
        made[name].append(row)
    return made


def trial(*args: Any, **keys: Any) -> dict[str, Any]:
    (row,) = facts(*args, **keys)[TRIALS]
    return row


def test_every_row_begins_with_its_key_and_a_trial_has_the_columns_of_the_analysis() -> None:
    made = facts(files=TrialFiles(outcome=left(metrics={"m": 1}), events=[HookEvent(event_type="e")]))
    assert all(list(row)[:5] == KEY for found in made.values() for row in found)
    assert list(made[TRIALS][0])[5:] == [
        *("trial_id", "variant_id", "task_id", "repl_idx", "chain_id", "baseline", "status", "outcome"),
        *("classification", "exit_status", "grade_exit_status", "score", "passed", "objective_name"),
        *("objective_value", "answer_sha256", "image", "tokens_in", "tokens_out", "cost_usd", "error_message"),
        *("worker_id", "started_at", "ended_at", "duration_ms"),
    ]
    assert (made[METRICS][0]["metric_name"], made[METRICS][0]["metric_value"]) == ("m", 1.0)
    assert (made[EVENTS][0]["event_type"], made[EVENTS][0]["payload"]) == ("e", {})
    assert (made[SNAPSHOTS][0]["binding_name"], made[SNAPSHOTS][0]["binding_text"]) == ("k", "2")


def test_the_key_of_a_commit_depends_on_experiment_slot_and_attempt_alone() -> None:
    assert trial()["slot_commit_id"] == trial(found=record("x"))["slot_commit_id"]
    assert trial()["slot_commit_id"] != trial(retried=("api_overloaded",))["slot_commit_id"]
    assert trial()["slot_commit_id"] != trial(design={"seed": 1})["slot_commit_id"]


def test_tries_that_failed_are_counted_and_told_of() -> None:
    made = facts(retried=("api_overloaded", "environment_lost"))
    assert made[TRIALS][0]["attempt"] == 3
    assert [row["payload"]["classification"] for row in made[EVENTS]] == ["api_overloaded", "environment_lost"]


@pytest.mark.parametrize(
    ("files", "rewards", "sections", "score", "passed"),
    [
        (left("success"), None, {}, 1.0, True),
        (left("failure"), None, {}, 0.0, False),
        (left("missing"), None, {}, None, None),
        (left("failure", objective={"name": "o", "value": 7}), None, {}, 7.0, True),
        (left("success"), {"score": 0.4, "style": 1.0}, GRADED, 0.4, False),
        (left("success"), {"score": 0.4}, {**GRADED, "primary_metric": {"passed_from": 0.3}}, 0.4, True),
        (left("success"), {"score": 0.4}, {**GRADED, "primary_metric": {"direction": "minimize"}}, 0.4, True),
    ],
)
def test_a_score_is_the_grades_else_the_objective_else_the_outcome(
    files: TrialOutcome, rewards: Any, sections: Any, score: Any, passed: Any
) -> None:
    row = trial(found=record(rewards=rewards), files=TrialFiles(outcome=files), **sections)
    assert (row["score"], row["passed"], row["classification"]) == (score, passed, None)


@pytest.mark.parametrize(
    ("error", "outcome", "score", "passed"),
    [
        ("agent_execution_timeout", "error", 0.0, False),
        ("agent_execution_failed", "error", 0.0, False),
        ("environment_lost", "error", None, None),
        ("verifier_reward_invalid", "error", 0.0, False),
        ("verifier_not_runnable", "error", 0.0, False),
    ],
)
def test_a_trial_that_failed_counts_where_its_agent_can_be_the_cause(
    error: str, outcome: str, score: Any, passed: Any
) -> None:
    row = trial(Outcome.FAILED, record(error), TrialFiles())
    assert (row["status"], row["classification"], row["error_message"]) == ("failed", error, "why")
    assert (row["outcome"], row["score"], row["passed"]) == (outcome, score, passed)


LOSS = {"primary_metric": {"name": "loss", "direction": "minimize"}}


@pytest.mark.parametrize(
    ("sections", "objective", "passed", "crashed"),
    [
        (GRADED | LOSS, None, False, 0.0),  # the score is another number than the metric
        (GRADED | LOSS, {"name": "loss", "value": 0.5}, False, 0.0),
        (GRADED | {"primary_metric": {"direction": "minimize"}}, None, True, None),
        (LOSS, {"name": "loss", "value": 0.5}, True, None),
        (LOSS, {"name": "other", "value": 0.5}, False, None),
        ({"primary_metric": {"name": "pass_rate", "direction": "minimize"}}, {"name": "o", "value": 0.5}, False, 0.0),
    ],
)
def test_the_lowest_score_is_the_best_where_the_score_is_what_is_minimized(
    sections: Any, objective: Any, passed: bool, crashed: float | None
) -> None:
    files = TrialFiles(outcome=left(objective=objective))
    row = trial(found=record(rewards={"score": 0.5} if "grading" in sections else None), files=files, **sections)
    assert (row["score"], row["passed"]) == (0.5, passed)
    row = trial(Outcome.FAILED, record("agent_execution_failed"), TrialFiles(), **sections)
    assert (row["score"], row["passed"]) == (crashed, False)


def test_a_grade_without_a_score_is_a_failure_of_its_own_type() -> None:
    row = trial(found=record(rewards={"style": 1.0}), **GRADED)
    assert (row["status"], row["classification"], row["score"]) == ("failed", "grade_invalid", 0.0)


def test_a_slot_that_was_pruned_has_one_trial_and_says_so() -> None:
    made = facts(Outcome.SKIPPED)
    (row,) = made[TRIALS]
    assert (row["status"], row["outcome"], row["score"], row["passed"]) == ("skipped_pruned", "missing", None, None)
    assert [one["event_type"] for one in made[EVENTS]] == ["pruned"] and not made[METRICS]


def test_a_timeout_is_an_event() -> None:
    made = facts(Outcome.FAILED, record("agent_execution_timeout"), TrialFiles())
    assert [one["event_type"] for one in made[EVENTS]] == ["timeout"]


def test_the_model_of_a_variant_is_among_its_bindings() -> None:
    engine = {"model": {"uri": "m"}, "backend": {"kind": "mock"}}
    found = facts(variant_plan=[{"variant_id": "b", "bindings": {"k": 2}, "engine": engine}])[SNAPSHOTS]
    assert {row["binding_name"]: row["binding_value"] for row in found} == {"k": 2, "engine.model": "m"}


def test_what_differs_from_run_to_run_is_listed() -> None:
    columns = set(trial()) | set(RunManifest.model_fields)
    assert set(VOLATILE) <= columns


def test_rows_are_json() -> None:
    assert json.loads(json.dumps(facts())) == facts()
