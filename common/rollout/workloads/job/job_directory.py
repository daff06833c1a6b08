"""Reads a job's directory, for every command that shows results.

Each trial's result is its record, in a line of trials.jsonl, or else the result.json of its directory. result.json of
the job lists the planned trials: those without a result were skipped, or have not ended. Directories of trials that
were removed from the job do not belong to it. Damaged files are reported and left out.
"""

from __future__ import annotations

import errno
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar, cast

from pydantic import BaseModel, ValidationError

from rollout.config.wording import describe
from rollout.model.errors import ConfigError
from rollout.workloads.job.aggregate import Overrides, PlannedTrial, is_completed, score
from rollout.workloads.job.config import JobConfig
from rollout.workloads.job.errors import is_infrastructure, policy_of
from rollout.workloads.job.pass_at_k import PASS
from rollout.workloads.job.record import TrialRecord
from rollout.workloads.job.result_files import CONFIG, RESULT, STATISTICS, SUMMARY, TRIALS
from rollout.workloads.job.results import JobResult, TrialResult
from rollout.workloads.output import RUN_ID

TrialKey = tuple[str, str, str, int]
"""(dataset, task, agent, attempt)"""
Status = Literal["completed", "failed", "skipped", "pending"]
Model = TypeVar("Model", bound=BaseModel)


@dataclass(frozen=True, slots=True)
class KeptTrial:
    """A trial. `result` is None if it was skipped or has not ended. `record` is None if trials.jsonl has no line for
    it. `tries` counts its attempts, 0 if unknown; `worker` made the last."""

    dataset: str
    task: str
    agent: str
    attempt: int
    result: TrialResult | None = None
    record: TrialRecord | None = None
    tries: int = 0
    worker: str = ""

    @property
    def key(self) -> TrialKey:
        return self.dataset, self.task, self.agent, self.attempt

    @property
    def label(self) -> str:
        """The trial's name for users, and its directory below that of the job."""
        return f"{self.dataset}/{self.task}/{self.agent}/{self.attempt}"

    @property
    def planned(self) -> PlannedTrial:
        rewards = self.record.rewards if self.record is not None else None
        return PlannedTrial(self.task, self.dataset, self.agent, self.attempt, self.result, rewards)


@dataclass(frozen=True, slots=True)
class JobDirectory:
    """A job, with `trials` in its order. `state` and `reason` are those of its run when it ended, such as completed or
    killed; "" if it has not. `earlier` counts trials of an earlier plan that are left out. `metrics` are by agent and
    dataset, as in stats.json. `notes` say what could not be read, and what that means."""

    path: Path
    name: str
    run_id: str
    state: str
    reason: str
    config: JobConfig | None
    result: JobResult | None
    trials: tuple[KeptTrial, ...]
    earlier: int = 0
    metrics: Mapping[tuple[str, str], Mapping[str, float]] = field(default_factory=dict[tuple[str, str], Any])
    notes: tuple[str, ...] = ()

    @property
    def overrides(self) -> Overrides:
        return {} if self.config is None else self.config.override_error_policy

    @property
    def agents(self) -> list[str]:
        return list(dict.fromkeys(trial.agent for trial in self.trials))

    def status(self, trial: KeptTrial) -> Status:
        if trial.result is None:
            return "skipped" if self.state else "pending"
        return "completed" if is_completed(trial.result, self.overrides) else "failed"

    def score(self, trial: KeptTrial) -> float | None:
        """Return the agent's score in the trial, or None if the trial says nothing about the agent."""
        return None if trial.result is None else score(trial.result, self.overrides)

    def not_passed(self, trial: KeptTrial) -> bool:
        """Return whether the trial has ended without passing, also through no fault of its agent. A trial that was not
        to be verified neither passed nor failed."""
        score = self.score(trial)
        return self.status(trial) == "failed" or (score is not None and score < PASS)

    def infrastructure(self, trial: KeptTrial) -> bool:
        """Return whether it failed by a fault that says nothing about the agent."""
        if self.status(trial) != "failed" or trial.result is None or trial.result.error is None:
            return False
        return is_infrastructure(policy_of(trial.result.error.type, self.overrides))

    def find(self, text: str) -> KeptTrial:
        """Return the trial that `text` names: dataset/task/agent/attempt, or a unique part of it.

        Raises ConfigError if there is none, or with the several that match.
        """
        wanted = text.strip("/").split("/")
        found = [trial for trial in self.trials if trial.label == text.strip("/")]
        found = found or [trial for trial in self.trials if _names(trial, wanted)]
        if len(found) == 1:
            return found[0]
        shown = [trial.label for trial in found or self.trials]
        listed = ", ".join(shown[:8]) + (f" and {len(shown) - 8:,} more" if len(shown) > 8 else "")
        if not found:
            raise ConfigError(f'no trial of {self.name} is called "{text}"; it has {listed}')
        raise ConfigError(f'"{text}" may be any of {len(found):,} trials: {listed}')


def _names(trial: KeptTrial, wanted: list[str]) -> bool:
    parts = iter((trial.dataset, trial.task, trial.agent, str(trial.attempt)))
    return all(word in parts for word in wanted)


def is_job_directory(path: Path) -> bool:
    """Return whether the directory has files of a job."""
    return any((path / name).is_file() for name in (TRIALS, CONFIG)) or (
        (path / RESULT).is_file() and (path / RUN_ID).is_file()
    )


def read_job_directory(path: Path) -> JobDirectory:
    """Read a job's directory. Raises ConfigError if there is no job."""
    if not path.is_dir():
        raise ConfigError(f"{path}: {'a file, and no directory of a job' if path.exists() else 'no such directory'}")
    if not is_job_directory(path) and next(_result_files(path), None) is None:
        raise ConfigError(
            f"{path}: no job was run there: it has no {TRIALS}, no {CONFIG} and no trial's {RESULT}; the directory of "
            "a job is <jobs_dir>/<name>"
        )
    reader, run_id = _Reader(path), _text(path / RUN_ID)
    state, reason = reader.state(run_id)
    result = reader.model(path / RESULT, JobResult)
    return JobDirectory(
        path=path,
        name=result.job_name if result is not None else path.resolve().name,
        run_id=run_id,
        state=state,
        reason=reason,
        config=reader.model(path / CONFIG, JobConfig),
        result=result,
        trials=tuple(reader.trials(result)),
        earlier=reader.earlier,
        metrics=reader.metrics(),
        notes=tuple(reader.notes),
    )


class _Line(BaseModel):
    """The fields of a line of trials.jsonl that are used here."""

    record: TrialRecord
    tries: int = 0
    worker: str = ""


class _Reader:
    def __init__(self, path: Path) -> None:
        self._path = path
        self.notes = list[str]()
        self.earlier = 0

    def model(self, path: Path, model: type[Model]) -> Model | None:
        """Parse a file. Returns None if it is missing or damaged; damage is noted."""
        try:
            return model.model_validate_json(_regular(path).read_bytes())
        except FileNotFoundError:
            return None
        except OSError as error:
            self._damaged(path, f"cannot be read: {error.strerror or error}")
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            place = ".".join(map(str, first["loc"]))
            self._damaged(path, f"{place}: {describe(first, place)}" if place else "not JSON as it was written")
        return None

    def _damaged(self, path: Path, what: str) -> None:
        self.notes.append(f"{path}: {what}: it is left out")

    def trials(self, result: JobResult | None) -> Iterator[KeptTrial]:
        """Yield trials of the current plan: those that the job's result.json lists and those with a line; before
        result.json exists, all that are there."""
        lines = {_key(line.record.result): line for line in self._lines()}
        results = {key: line.record.result for key, line in lines.items()}
        listed = result.results if result is not None else []
        planned = [(one.dataset_name, one.task_name, one.agent_name, one.attempt) for one in listed]
        known = {*planned, *lines}
        for path in sorted(_result_files(self._path)):
            dataset, task, agent, attempt = path.relative_to(self._path).parts[:4]
            key = dataset, task, agent, int(attempt)
            if key in results:
                continue
            if planned and key not in known:
                self.earlier += 1
                continue
            found = self.model(path, TrialResult)
            if found is not None and _key(found) != key:
                self._damaged(path, f"it is of the trial {'/'.join(map(str, _key(found)))}")
            elif found is not None:
                results[key] = found
        for key in dict.fromkeys([*planned, *results]):
            line = lines.get(key)
            if line is None:
                yield KeptTrial(*key, result=results.get(key))
            else:
                yield KeptTrial(
                    *key, result=line.record.result, record=line.record, tries=line.tries, worker=line.worker
                )

    def _lines(self) -> Iterator[_Line]:
        """Yield the lines of trials.jsonl; of two about one trial, the later one."""
        path = self._path / TRIALS
        try:
            with _regular(path).open("rb") as file:
                for number, line in enumerate(file, 1):
                    if not line.endswith(b"\n"):
                        return  # it is being written
                    try:
                        yield _Line.model_validate_json(line)
                    except ValidationError as error:
                        place = ".".join(map(str, error.errors(include_url=False)[0]["loc"])) or "no JSON"
                        self.notes.append(f"{path}:{number}: not a trial's line ({place}): it is left out")
        except FileNotFoundError:
            return
        except OSError as error:
            self._damaged(path, f"cannot be read: {error.strerror or error}")

    def state(self, run_id: str) -> tuple[str, str]:
        """Return the state in which the run `run_id` ended, and the reason."""
        try:
            summary: Any = json.loads(_regular(self._path / SUMMARY).read_bytes())
            return (str(summary["state"]), str(summary.get("reason", ""))) if summary["run_id"] == run_id else ("", "")
        except FileNotFoundError:
            return "", ""
        except (OSError, ValueError, KeyError, TypeError) as error:
            self._damaged(self._path / SUMMARY, f"not as it was written ({type(error).__name__})")
            return "", ""

    def metrics(self) -> dict[tuple[str, str], dict[str, float]]:
        path = self._path / STATISTICS
        try:
            value: Any = json.loads(_regular(path).read_bytes())
            groups = cast("list[dict[str, Any]]", value["groups"])
            for one in groups:
                for name, why in one.get("metric_errors", {}).items():
                    self.notes.append(f"the metric {name} has no value for {one['agent']} in {one['dataset']}: {why}")
            return {(str(one["agent"]), str(one["dataset"])): dict(one["metrics"]) for one in groups if one["metrics"]}
        except FileNotFoundError:
            return {}
        except (OSError, ValueError, KeyError, TypeError) as error:
            self._damaged(path, f"not as it was written ({type(error).__name__})")
            return {}


def _key(result: TrialResult) -> TrialKey:
    return result.dataset_name, result.task_name, result.agent_name, result.attempt


def _result_files(path: Path) -> Iterator[Path]:
    """Yield result.json of the trials' directories; those of trials that ran again were renamed."""
    for found in path.glob(f"*/*/*/*/{RESULT}"):
        dataset, *_, attempt, _ = found.relative_to(path).parts
        if not dataset.startswith(".") and attempt.isdecimal() and attempt.isascii():
            yield found


def _regular(path: Path) -> Path:
    """Return the path if it is a regular file. Raises OSError otherwise: a pipe, for example, might block for ever."""
    if path.exists() and not path.is_file():
        raise OSError(errno.EINVAL, "it is no regular file", str(path))
    return path


def _text(path: Path) -> str:
    try:
        return _regular(path).read_text("ascii").strip()
    except (OSError, ValueError):
        return ""
