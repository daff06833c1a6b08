"""The outcome of a trial, from its entry of the commit log, whoever ended it."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

from rollout.model.errors import InputError, InvalidResultError
from rollout.model.item import Outcome
from rollout.workloads.commit import CommitEntry
from rollout.workloads.job.errors import ERRORS, INTERNAL_ERROR
from rollout.workloads.job.record import TrialRecord, as_text
from rollout.workloads.job.results import Timestamps, TrialError, TrialResult
from rollout.workloads.job.trial import TrialSpec
from rollout.workloads.json_form import invalid_result
from rollout.workloads.port import FailedTry, unsuccessful

WORKER_LOST = "environment_lost"
"""Type of error of a trial whose workers were lost together with its sandbox."""


def record_of(entry: CommitEntry, spec: TrialSpec) -> TrialRecord | None:
    """Return the trial's record, or None if the trial did not run. If its executor left no valid record, that is an
    error of this trial alone."""
    if entry.outcome in (Outcome.CANCELLED, Outcome.SKIPPED):
        return None
    ended_ms = entry.accepted_ms
    began_ms = ended_ms - entry.duration_ms
    if entry.data or entry.outcome is Outcome.DONE:
        return _decoded(entry.data, spec, began_ms, ended_ms)
    why = unsuccessful(entry, "trial")
    lost = entry.failure is not None and entry.failure.worker_lost
    return _without_record(spec, WORKER_LOST if lost else why.code, why.message, began_ms, ended_ms)


def record_left(entry: CommitEntry, spec: TrialSpec) -> TrialRecord | None:
    """Return the record of a trial that ran, with any outcome, or None if it left no usable one."""
    try:
        return decoded(entry.data, spec) if entry.data else None
    except InvalidResultError:
        return None


def try_record(failed: FailedTry, spec: TrialSpec) -> TrialRecord:
    """Return the record of a try that was followed by another."""
    if failed.data:
        return _decoded(failed.data, spec, failed.began_ms, failed.ended_ms)
    code = WORKER_LOST if failed.worker_lost else failed.code
    return _without_record(spec, code, failed.message, failed.began_ms, failed.ended_ms)


def decoded(data: bytes, spec: TrialSpec) -> TrialRecord:
    """Decode the executor's record of the trial `spec`. Raises InvalidResultError if it is invalid or of another
    trial."""
    try:
        record = TrialRecord.decode(data)
    except InputError as error:
        raise invalid_result(error.message) from None
    result = record.result
    names = result.dataset_name, result.task_name, result.agent_name
    if record.trial != spec.id or names != as_text((spec.dataset, spec.task, spec.agent)):
        raise invalid_result("the record of another trial")
    return record


def _decoded(data: bytes, spec: TrialSpec, began_ms: int, ended_ms: int) -> TrialRecord:
    try:
        return decoded(data, spec)
    except InvalidResultError as error:
        return _without_record(spec, error.code, error.message, began_ms, ended_ms)


def _without_record(spec: TrialSpec, code: str, message: str, began_ms: int, ended_ms: int) -> TrialRecord:
    """Make the record of a trial whose executor left none: its process or worker was lost, or it has a fault."""
    known = code in ERRORS
    error = TrialError(type=code if known else INTERNAL_ERROR, message=message if known else f"{code}: {message}")
    times = Timestamps(started_at=_moment(began_ms), ended_at=_moment(ended_ms))
    result = TrialResult(
        task_name=spec.task,
        dataset_name=spec.dataset,
        agent_name=spec.agent,
        attempt=spec.attempt,
        task_git_commit_id=spec.commit,
        reward=None,
        cost=0.0,
        error=error,
        durations=times.durations(),
        timestamps=times,
    )
    return TrialRecord(trial=spec.id, result=result)


def _moment(unix_ms: int) -> datetime:
    return datetime(1970, 1, 1, tzinfo=UTC) + timedelta(milliseconds=max(0, unix_ms))
