"""result.json of trials and jobs, field by field; and what is counted in which denominator."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from datetime import UTC, datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest
from job_files import START, trial
from pydantic import ValidationError
from rollout.model.errors import InputError
from rollout.workloads.job.aggregate import PlannedTrial, counts, job_result, job_statistics, statistics
from rollout.workloads.job.config import MetricSection
from rollout.workloads.job.errors import PolicyOverride
from rollout.workloads.job.metrics import compute, metric_faults
from rollout.workloads.job.results import JobResult, Timestamps, TrialError, TrialResult, rfc3339
from rollout.workloads.job.spending import Spent
from rollout.workloads.job.statistics_file import statistics_json


def result() -> TrialResult:
    times = Timestamps(
        started_at=START,
        environment_setup_started_at=START,
        environment_setup_ended_at=START + timedelta(seconds=2),
        agent_setup_started_at=START + timedelta(seconds=2),
        agent_setup_ended_at=START + timedelta(seconds=2.5),
        agent_execution_started_at=START + timedelta(seconds=3),
        agent_execution_ended_at=START + timedelta(seconds=13),
        verifier_started_at=START + timedelta(seconds=13),
        verifier_ended_at=START + timedelta(seconds=14),
        ended_at=START + timedelta(seconds=15),
    )
    return TrialResult(
        task_name="hello",
        dataset_name="d",
        agent_name="a",
        attempt=1,
        task_git_commit_id=None,
        reward=1.0,
        cost=0.25,
        error=None,
        durations=times.durations(),
        timestamps=times,
    )


def test_a_trials_result_has_these_fields_in_this_order() -> None:
    found = json.loads(result().to_json())
    assert list(found) == [
        "task_name",
        "dataset_name",
        "agent_name",
        "attempt",
        "task_git_commit_id",
        "reward",
        "cost",
        "error",
        "durations",
        "timestamps",
        "rewards",
    ]
    assert list(found["durations"].items()) == [
        ("total_sec", 15.0),
        ("environment_setup_sec", 2.0),
        ("agent_setup_sec", 0.5),
        ("agent_execution_sec", 10.0),
        ("verifier_sec", 1.0),
    ]
    assert list(found["timestamps"].items())[:3] == [
        ("started_at", "2026-01-02T03:04:05.6Z"),
        ("environment_setup_started_at", "2026-01-02T03:04:05.6Z"),
        ("environment_setup_ended_at", "2026-01-02T03:04:07.6Z"),
    ]
    assert list(found["timestamps"])[3:] == [
        "agent_setup_started_at",
        "agent_setup_ended_at",
        "agent_execution_started_at",
        "agent_execution_ended_at",
        "verifier_started_at",
        "verifier_ended_at",
        "ended_at",
    ]
    assert TrialResult.model_validate_json(result().to_json()) == result()


def test_a_trial_that_failed_early_has_no_reward_and_phases_that_never_were() -> None:
    times = Timestamps(started_at=START, ended_at=START)
    failed = result().model_copy(
        update={
            "reward": None,
            "error": TrialError(type="environment_start_failed", message="no room"),
            "timestamps": times,
            "durations": times.durations(),
        }
    )
    found = json.loads(failed.to_json())
    assert (found["reward"], found["error"]) == (None, {"type": "environment_start_failed", "message": "no room"})
    assert found["timestamps"]["agent_setup_started_at"] == "0001-01-01T00:00:00Z"
    assert found["timestamps"]["verifier_started_at"] is None
    assert (found["durations"]["agent_setup_sec"], found["durations"]["verifier_sec"]) == (0.0, None)


@pytest.mark.parametrize(
    ("moment", "text"),
    [
        (datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC), "2026-01-02T03:04:05Z"),
        (datetime(2026, 1, 2, 3, 4, 5, 120_000, tzinfo=UTC), "2026-01-02T03:04:05.12Z"),
        (datetime(2026, 1, 2, 3, 4, 5, tzinfo=timezone(timedelta(hours=2))), "2026-01-02T01:04:05Z"),
    ],
)
def test_times_are_rfc_3339_in_utc(moment: datetime, text: str) -> None:
    assert rfc3339(moment) == text


@pytest.mark.parametrize("change", [{"reward": float("nan")}, {"cost": -1}, {"attempt": 0}, {"extra": 1}])
def test_a_result_that_is_none_is_not_written(change: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        TrialResult.model_validate({**result().model_dump(), **change})


TRIALS = [
    trial("t1", 1.0, cost=1.0),
    trial("t1", 0.0, attempt=2),
    trial("t2", None, "agent_execution_failed"),
    trial("t2", 0.5, "agent_execution_timeout", attempt=2),
    trial("t3", None, "environment_start_failed"),
    trial("t3", None, "verifier_timeout", attempt=2, cost=0.5),
    trial("t4", 1.0, "environment_teardown_failed"),
    PlannedTrial("t4", "d", "a", 2),
]


def test_each_trial_is_counted_once_and_every_denominator_is_there() -> None:
    found = counts(TRIALS, {})
    assert (found.total, found.completed, found.failed, found.skipped) == (8, 4, 3, 1)
    assert (found.infrastructure, found.scored, found.tasks) == (1, 6, 4)


def test_only_what_an_agent_cannot_cause_is_left_out() -> None:
    found = statistics(TRIALS, {})
    assert found.pass_rate is not None
    assert found.mean_reward is not None
    assert found.pass_rate.mean == 2 / 6  # of 1, 0, 0, 0.5, 0 and 1
    assert found.mean_reward.mean == 2.5 / 6
    assert found.errors == {
        "agent_execution_failed": 1,
        "agent_execution_timeout": 1,
        "environment_start_failed": 1,
        "environment_teardown_failed": 1,
        "verifier_timeout": 1,
    }


def test_a_job_may_say_that_a_time_out_is_no_score() -> None:
    overrides = {"agent_execution_timeout": PolicyOverride(has_valid_reward=False)}
    assert counts(TRIALS, overrides).scored == 5
    assert counts(TRIALS, overrides).completed == 3


def test_a_trial_that_was_not_to_be_verified_is_completed_and_not_scored() -> None:
    found = counts([trial("t1")], {})
    assert (found.completed, found.scored) == (1, 0)
    assert statistics([trial("t1")], {}).pass_rate is None


def job(trials: list[PlannedTrial]) -> JobResult:
    return job_result(
        "nightly", trials, started_at=START, ended_at=START + timedelta(seconds=60), cancelled=False, overrides={}
    )


def test_a_jobs_result_has_these_fields_in_this_order() -> None:
    found = json.loads(job([*TRIALS, trial("t1", 0.0, agent="b")]).to_json())
    assert [(key, value) for key, value in found.items() if key not in ("agents", "results")] == [
        ("job_name", "nightly"),
        ("cancelled", False),
        ("total_trials", 9),
        ("completed_trials", 5),
        ("failed_trials", 3),
        ("skipped_trials", 1),
        ("pass_rate", 2 / 7),
        ("mean_reward", 2.5 / 7),
        ("total_cost", 1.5),
        ("total_duration_sec", 60.0),
        ("started_at", "2026-01-02T03:04:05.6Z"),
        ("ended_at", "2026-01-02T03:05:05.6Z"),
    ]
    assert list(found)[-2:] == ["agents", "results"]
    assert found["agents"] == {
        "a": {
            "total_trials": 8,
            "completed_trials": 4,
            "failed_trials": 3,
            "pass_rate": 2 / 6,
            "mean_reward": 2.5 / 6,
            "total_cost": 1.5,
        },
        "b": {
            "total_trials": 1,
            "completed_trials": 1,
            "failed_trials": 0,
            "pass_rate": 0.0,
            "mean_reward": 0.0,
            "total_cost": 0.0,
        },
    }
    assert list(found["agents"]["a"]) == [
        "total_trials",
        "completed_trials",
        "failed_trials",
        "pass_rate",
        "mean_reward",
        "total_cost",
    ]
    assert found["results"][1] == {
        "task_name": "t1",
        "dataset_name": "d",
        "agent_name": "a",
        "attempt": 2,
        "reward": 0.0,
    }
    assert found["results"][7]["reward"] is None


def test_a_job_of_nothing_scored_divides_by_nothing() -> None:
    found = job([PlannedTrial("t", "d", "a", 1)])
    assert (found.pass_rate, found.mean_reward, found.skipped_trials) == (0.0, 0.0, 1)


def test_statistics_are_of_an_agent_in_a_dataset() -> None:
    trials = [trial("t", 1.0), trial("t", 0.0, dataset="e"), trial("t", 0.0, agent="b")]
    assert list(job_statistics(trials, {})) == [("a", "d"), ("a", "e"), ("b", "d")]


def test_stats_json_has_every_rate_with_its_denominator() -> None:
    trials = [trial("t", 1.0), trial("t", 0.0, attempt=2), trial("u", None, "environment_start_failed")]
    metrics = [MetricSection(type="max")]
    found = json.loads(statistics_json("nightly", job_statistics(trials, {}, metrics), Spent()))
    assert (found["job_name"], found["confidence"]) == ("nightly", 0.95)
    (group,) = found["groups"]
    assert list(group) == [
        "agent",
        "dataset",
        "counts",
        "pass_rate",
        "mean_reward",
        "pass_at_k",
        "metrics",
        "metric_errors",
        "errors",
    ]
    assert group["counts"] == {
        "total": 3,
        "completed": 2,
        "failed": 1,
        "skipped": 0,
        "infrastructure": 1,
        "scored": 2,
        "tasks": 2,
    }
    assert group["pass_rate"] == {
        "mean": 0.5,
        "low": None,
        "high": None,
        "standard_error": None,
        "trials": 2,
        "tasks": 1,
    }
    assert group["pass_at_k"] == [
        {"k": k, "mean": mean, "low": None, "high": None, "standard_error": None, "tasks": 1}
        for k, mean in ((1, 0.5), (2, 1.0))
    ]
    assert (group["metrics"], group["errors"]) == ({"max": 1.0}, {"environment_start_failed": 1})


# ---- metrics


@pytest.mark.parametrize(
    ("type", "expected"), [("sum", {"sum": 1.5}), ("min", {"min": 0}), ("max", {"max": 1}), ("mean", {"mean": 0.5})]
)
def test_simple_metrics(type: Any, expected: dict[str, float]) -> None:
    assert compute(MetricSection(type=type), [{"reward": 1.0}, None, {"reward": 0.5}]) == expected


def test_metrics_of_several_rewards_have_their_names() -> None:
    rewards = [{"a": 1.0, "b": 1.0}, {"a": 0.0}, None]
    assert compute(MetricSection(type="sum", name="total"), rewards) == {"total.a": 1.0, "total.b": 1.0}


def test_metrics_are_of_all_rewards_of_a_trial() -> None:
    several = replace(trial("t", 1.0), rewards={"right": 1.0, "fast": 0.5})
    found = statistics([several, trial("u", None, "agent_execution_failed")], {}, [MetricSection()])
    assert found.metrics == {"mean.fast": 0.25, "mean.right": 0.5}
    assert statistics([trial("t", 0.5)], {}, [MetricSection()]).metrics == {"mean": 0.5}


def test_metrics_of_no_trials_and_of_huge_rewards() -> None:
    assert compute(MetricSection(type="mean"), []) == {}
    assert compute(MetricSection(type="mean"), [{"r": 1.7e308}] * 2) == {"mean": 1.7e308}
    with pytest.raises(InputError, match="sum is too large to be a number"):
        compute(MetricSection(type="sum"), [{"r": 1.7e308}] * 2)


def median(rewards: list[dict[str, float] | None]) -> dict[str, float]:
    values = sorted((reward or {}).get("reward", 0.0) for reward in rewards)
    return {"median": values[len(values) // 2], "none": float(rewards.count(None))}


def broken(rewards: list[dict[str, float] | None]) -> float:
    raise KeyError("oops")


def words(rewards: list[dict[str, float] | None]) -> str:
    return "many"


def test_a_metric_of_ones_own() -> None:
    metric = MetricSection(type="custom", function=f"{__name__}:median")
    assert not list(metric_faults([metric]))
    assert compute(metric, [{"reward": 1.0}, None, {"reward": 0.5}]) == {"median": 0.5, "none": 1.0}


def truth(rewards: list[dict[str, float] | None]) -> bool:
    return True


@pytest.mark.parametrize(
    ("function", "what"),
    [
        ("truth", "must give a finite number"),
        ("broken", "failed: KeyError: 'oops'"),
        ("words", "must give a finite number"),
    ],
)
def test_a_metric_of_ones_own_that_fails(function: str, what: str) -> None:
    with pytest.raises(InputError, match=what):
        compute(MetricSection(type="custom", function=f"{__name__}:{function}"), [None])


def test_a_metric_that_fails_is_noted_and_costs_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "gone_metric.py").write_text("import sys\nsys.exit('imported')\ndef f(rewards): pass\n")
    monkeypatch.chdir(tmp_path)
    metrics = [
        MetricSection(type="custom", function=f"{__name__}:broken"),
        MetricSection(type="custom", function="gone_metric:f"),
        MetricSection(type="sum"),
        MetricSection(type="max"),
    ]
    assert not list(metric_faults(metrics))  # nothing is imported
    found = statistics([trial("t", 1e308), trial("u", 1e308)], {}, metrics)
    assert found.metrics == {"max": 1e308}
    assert list(found.metric_errors) == ["broken", "f", "sum"]
    assert b"Infinity" not in statistics_json("j", {("a", "d"): found}, Spent())


def test_pass_at_1_and_the_pass_rate_of_equal_attempts_are_one_estimate() -> None:
    trials = [trial(task, float(task == "t"), attempt=n) for task in ("t", "u", "v") for n in (1, 2)]
    found = statistics(trials, {})
    assert found.pass_rate is not None and found.pass_rate.low is not None
    assert found.pass_at_k[0].value == found.pass_rate


@pytest.mark.parametrize(
    ("metrics", "what"),
    [
        ([{"type": "mean"}, {"type": "mean"}], 'metrics.1: a second metric called "mean"'),
        ([{"type": "custom", "function": "nowhere_at_all:f"}], "there is no module nowhere_at_all"),
        ([{"type": "uv-script", "kwargs": {"script_path": "no.py"}}], "no.py: no such file"),
    ],
)
def test_metrics_that_cannot_be_computed_are_told_before_the_job(metrics: list[dict[str, Any]], what: str) -> None:
    (fault,) = metric_faults([MetricSection.model_validate(metric) for metric in metrics])
    assert what in fault


def test_a_script_of_harbor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a uv that runs the script as uv does."""
    (tmp_path / "uv").write_text(f'#!/bin/sh\nshift\nexec {sys.executable} "$@"\n')
    (tmp_path / "uv").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    (tmp_path / "count.py").write_text(
        "import sys, json\n"
        "rewards = [json.loads(line) for line in open(sys.argv[2])]\n"
        "json.dump({'n': len(rewards), 'none': rewards.count(None)}, open(sys.argv[4], 'w'))\n"
    )
    metric = MetricSection(type="uv-script", kwargs={"script_path": str(tmp_path / "count.py")})
    assert compute(metric, [{"reward": 1.0}, None]) == {"n": 2.0, "none": 1.0}
    (tmp_path / "count.py").write_text("raise SystemExit('no such column')\n")
    with pytest.raises(InputError, match="failed: no such column"):
        compute(metric, [None])
