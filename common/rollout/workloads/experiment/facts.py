"""Turns a committed slot into its rows of facts. They depend on the slot and the run's configuration alone: whichever
worker ran a trial, and in whatever order trials ended, the rows are equal except for `VOLATILE`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rollout.model.item import Outcome
from rollout.workloads.experiment.contracts import (
    MODEL,
    PASS_RATE_NAMES,
    SCORE,
    EvidenceRecord,
    HookEvent,
    PrimaryMetric,
    SlotStatus,
    TrialInput,
    sha256_of,
)
from rollout.workloads.experiment.engines import engines_of
from rollout.workloads.experiment.layout import EVENTS, METRICS, SNAPSHOTS, TRIALS
from rollout.workloads.experiment.resolve import config_of
from rollout.workloads.experiment.trial_files import TrialFiles
from rollout.workloads.job.errors import policy_of
from rollout.workloads.job.record import TrialRecord
from rollout.workloads.job.results import rfc3339
from rollout.workloads.json_form import JsonObject, canonical

VOLATILE = [
    *("run_id", "name", "created_at", "worker_id", "started_at", "ended_at", "duration_ms"),
    *("cost_usd", "error_message"),
]
"""Fields that differ between two runs of one experiment whose agents do the same."""
GRADE_INVALID = "grade_invalid"
"""The grade lacks `score`."""
STATUSES: dict[Outcome, SlotStatus] = {
    Outcome.DONE: "completed",
    Outcome.FAILED: "failed",
    Outcome.SKIPPED: "skipped_pruned",
    Outcome.CANCELLED: "cancelled",
}


@dataclass(frozen=True, slots=True)
class Setting:
    """Settings that all slots of a run share. `models` are those of variants, as the experiment names them."""

    run_id: str
    digest: str
    baseline: str
    is_graded: bool
    passed_from: float
    metric: PrimaryMetric
    models: Mapping[str, str]

    @classmethod
    def of(cls, resolved: JsonObject, digest: str, run_id: str) -> Setting:
        """Make the setting. `resolved` is resolved_experiment.json."""
        metric = resolved["primary_metric"]
        return cls(
            run_id=run_id,
            digest=digest,
            baseline=resolved["baseline"]["variant_id"],
            is_graded=resolved["grading"] is not None,
            passed_from=metric["passed_from"],
            metric=PrimaryMetric(name=metric["name"], direction=metric["direction"]),
            models={name: engine.model.uri for name, _, engine in engines_of(config_of(resolved))},
        )

    def is_lowest_score(self, objective: str | None) -> bool:
        """Return whether the lowest score is the best for a trial with this objective."""
        return self.metric.is_lowest_score(graded=self.is_graded, objective=objective)

    @property
    def is_highest_score(self) -> bool:
        """Whether the highest score is the best, whatever the agent's objective."""
        metric = self.metric
        return not self.is_lowest_score(None) and (
            metric.direction == "maximize" or self.is_graded or metric.name in PASS_RATE_NAMES
        )


@dataclass(frozen=True, slots=True)
class CommittedSlot:
    """A committed slot. `given` is its trial's input, with the id of the run. `record` is None if the trial did not
    run, or if its variant was pruned meanwhile; `evidence_only` is then what it left. `retried` has the type of error
    of each try that was followed by another, except those whose worker was lost."""

    given: TrialInput
    outcome: Outcome
    record: TrialRecord | None = None
    files: TrialFiles = field(default_factory=TrialFiles)
    retried: Sequence[str] = ()
    worker: str = ""
    evidence_only: EvidenceRecord | None = None

    @property
    def attempt(self) -> int:
        return 1 + len(self.retried)

    @property
    def status(self) -> SlotStatus:
        return STATUSES[self.outcome]

    def commit_id(self, digest: str) -> str:
        return sha256_of(canonical([digest, self.given.schedule_index, self.attempt]))


def rows(slot: CommittedSlot, setting: Setting) -> Iterator[tuple[str, JsonObject]]:
    """Yield (file, row) for all facts of a slot."""
    trial = _trial(slot, setting)
    for name, found in (
        (TRIALS, [trial]),
        (METRICS, list(_metrics(slot, setting))),
        (EVENTS, list(_events(slot, trial["classification"]))),
        (SNAPSHOTS, list(_snapshots(slot, setting))),
    ):
        for sequence, row in enumerate(found):
            yield name, {**_key(slot, setting, sequence), **row}


def _key(slot: CommittedSlot, setting: Setting, sequence: int) -> JsonObject:
    return {
        "run_id": setting.run_id,
        "schedule_index": slot.given.schedule_index,
        "slot_commit_id": slot.commit_id(setting.digest),
        "attempt": slot.attempt,
        "row_sequence": sequence,
    }


def _named(slot: CommittedSlot) -> JsonObject:
    ids = slot.given.ids
    return {"trial_id": ids.trial_id, "variant_id": ids.variant_id, "task_id": ids.task_id}


def _trial(slot: CommittedSlot, setting: Setting) -> JsonObject:
    ids, record, left = slot.given.ids, slot.record, slot.files.outcome
    classification, message = _classification(slot, setting)
    outcome = "missing" if slot.record is None else "error"
    if left is not None and (slot.outcome is Outcome.DONE or left.outcome != "success"):
        outcome = left.outcome
    elif classification == "agent_result_missing":
        outcome = "missing"
    score = _score(slot, setting, classification)
    result = None if record is None else record.result
    return {
        **_named(slot),
        "repl_idx": ids.repl_idx,
        "chain_id": None if slot.given.chain is None else slot.given.chain.chain_id,
        "baseline": ids.variant_id == setting.baseline,
        "status": "failed" if classification == GRADE_INVALID else slot.status,
        "outcome": outcome,
        "classification": classification,
        "exit_status": None if left is None else left.exit_status,
        "grade_exit_status": slot.files.grade_exit_status,
        "score": score,
        "passed": _passed(slot, score, setting, classification),
        "objective_name": None if left is None or left.objective is None else left.objective.name,
        "objective_value": None if left is None or left.objective is None else left.objective.value,
        "answer_sha256": None if left is None else left.answer_sha256,
        "image": slot.given.policy.sandbox.image,
        "tokens_in": None if record is None else record.usage.n_input_tokens,
        "tokens_out": None if record is None else record.usage.n_output_tokens,
        "cost_usd": None if result is None else result.cost,
        "error_message": message,
        "worker_id": slot.worker or None,
        "started_at": None if result is None else rfc3339(result.timestamps.started_at),
        "ended_at": None if result is None else rfc3339(result.timestamps.ended_at),
        "duration_ms": None if result is None else round(result.durations.total_sec * 1000),
    }


def _classification(slot: CommittedSlot, setting: Setting) -> tuple[str | None, str | None]:
    """Return the type of the error and its message, or None."""
    error = None if slot.record is None else slot.record.result.error
    if error is not None and slot.outcome is Outcome.FAILED:
        return error.type, error.message
    if slot.outcome is Outcome.DONE and setting.is_graded and SCORE not in _grade(slot):
        return GRADE_INVALID, "$AGENTLAB_GRADE_PATH has no score"
    return None, None


def _grade(slot: CommittedSlot) -> dict[str, float]:
    return (slot.record.rewards if slot.record is not None else None) or {}


def _score(slot: CommittedSlot, setting: Setting, classification: str | None) -> float | None:
    """Return the grade's score, else the agent's objective, else 1 or 0 by its outcome. A trial that failed in a way
    that an agent can cause has 0 where more is better; otherwise an agent could escape the mean by breaking itself or
    its grader. Where the lowest score is, or may be, the best, it has none."""
    left = slot.files.outcome
    if setting.is_graded and SCORE in _grade(slot):
        return _grade(slot)[SCORE]
    if classification is not None:
        return 0.0 if setting.is_highest_score and _counts(classification) else None
    if setting.is_graded or left is None or slot.outcome is not Outcome.DONE:
        return None
    if left.objective is not None:
        return left.objective.value
    return {"success": 1.0, "failure": 0.0}.get(left.outcome)


def _counts(classification: str) -> bool:
    """Return whether an agent can cause the error, by the table of errors; if not, the trial says nothing about the
    agent."""
    return classification == GRADE_INVALID or policy_of(classification).valid_reward


def _passed(slot: CommittedSlot, score: float | None, setting: Setting, classification: str | None) -> bool | None:
    if classification is not None:
        return False if _counts(classification) else None
    if score is None:
        return None
    left = slot.files.outcome
    objective = None if left is None or left.objective is None else left.objective.name
    return score <= setting.passed_from if setting.is_lowest_score(objective) else score >= setting.passed_from


def _metrics(slot: CommittedSlot, setting: Setting) -> Iterator[JsonObject]:
    left = slot.files.outcome
    if slot.outcome in (Outcome.SKIPPED, Outcome.CANCELLED):
        return
    agent = {} if left is None else dict(left.metrics)
    if left is not None and left.objective is not None:
        agent.setdefault(left.objective.name, left.objective.value)
    for source, values in (("agent", agent), ("grade", _grade(slot) if setting.is_graded else {})):
        for name, value in values.items():
            yield {
                **_named(slot),
                "repl_idx": slot.given.ids.repl_idx,
                "metric_name": name,
                "metric_value": value,
                "source": source,
            }


def _events(slot: CommittedSlot, classification: str | None) -> Iterator[JsonObject]:
    found = [HookEvent(event_type="retried", payload={"classification": one}) for one in slot.retried]
    found += slot.files.events if slot.record is not None else []
    if slot.outcome is Outcome.SKIPPED:
        found.append(HookEvent(event_type="pruned"))
    if classification is not None and classification.endswith("_timeout"):
        found.append(HookEvent(event_type="timeout", payload={"classification": classification}))
    for event in found:
        yield {**_named(slot), "event_type": event.event_type, "payload": event.payload}


def _snapshots(slot: CommittedSlot, setting: Setting) -> Iterator[JsonObject]:
    ids = slot.given.ids
    model = {MODEL: setting.models[ids.variant_id]} if ids.variant_id in setting.models else {}
    for name, value in {**slot.given.bindings, **model}.items():
        yield {
            "trial_id": ids.trial_id,
            "variant_id": ids.variant_id,
            "binding_name": name,
            "binding_value": value,
            "binding_text": _text(value),
        }


def _text(value: Any) -> str:
    return value if isinstance(value, str) else canonical(value).decode("utf-8", "surrogateescape")
