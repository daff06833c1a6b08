"""Regrading: which trials of a job can be verified again, and what that changed."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, cast

from rollout.model.errors import ConfigError
from rollout.workloads.job.averages import mean
from rollout.workloads.job.errors import ERRORS
from rollout.workloads.job.job_directory import JobDirectory, KeptTrial
from rollout.workloads.job.pass_at_k import PASS
from rollout.workloads.job.record import ARTIFACTS
from rollout.workloads.job.result_files import TRIES
from rollout.workloads.json_form import JsonObject

COMPARISON = "regrade.json"
_MANIFEST = "manifest.json"


@dataclass(frozen=True, slots=True)
class Chosen:
    """The trials to verify. `notes` say which are left out, and why."""

    trials: tuple[KeptTrial, ...]
    notes: tuple[str, ...]


def choose(job: JobDirectory, globs: Sequence[str] = ()) -> Chosen:
    """Choose the trials whose agent finished and left files. `globs` select tasks, as TASK or DATASET/TASK; empty means
    all.

    Raises ConfigError for a glob that selects no task, or if no trial can be verified again.
    """
    for glob in globs:
        if not any(_matches(trial, glob) for trial in job.trials):
            tasks = list(dict.fromkeys(trial.task for trial in job.trials))
            raise ConfigError(f'--tasks: no task of {job.name} is called "{glob}"; it has {", ".join(tasks[:10])}')
    wanted = [trial for trial in job.trials if not globs or any(_matches(trial, glob) for glob in globs)]
    left_out: dict[str, int] = {}
    chosen: list[KeptTrial] = []
    for trial in wanted:
        if why := _why_not(trial) or _not_kept(job.path / trial.label):
            left_out[why] = left_out.get(why, 0) + 1
        else:
            chosen.append(trial)
    notes = tuple(
        f"{count:,} {'trial is' if count == 1 else 'trials are'} left out: {why}" for why, count in left_out.items()
    )
    if not chosen:
        raise ConfigError("\n".join([f"no trial of {job.name} can be verified again", *notes]))
    return Chosen(tuple(chosen), notes)


def _matches(trial: KeptTrial, glob: str) -> bool:
    return fnmatchcase(trial.task, glob) or fnmatchcase(f"{trial.dataset}/{trial.task}", glob)


def _why_not(trial: KeptTrial) -> str:
    """Return why the trial cannot be verified again, or ""."""
    if trial.result is None:
        return "they did not run"
    error = trial.result.error
    if error is not None:
        policy = ERRORS.get(error.type)
        after_agent = policy is not None and policy.phase in ("verify", "teardown")
        if policy is None or not (after_agent or policy.graded):
            return f"{error.type}: no agent worked to its end"
        if not after_agent and trial.result.timestamps.verifier_started_at is None:
            return f"{error.type}, after which a task of this format is not verified"
    if trial.record is None or trial.record.files is None:
        return "nothing was kept of them"
    return ""


def _not_kept(directory: Path) -> str:
    """Return why the kept files in `directory` are not what the agent left, or ""."""
    manifests = [path for path in sorted(directory.rglob(f"{ARTIFACTS}/{_MANIFEST}")) if TRIES not in path.parts]
    rows: list[Any] = []
    for path in manifests:
        try:
            rows += cast("list[Any]", json.loads(path.read_bytes()))
        except (OSError, ValueError):
            return f"{path.name} cannot be read"
    if not rows:
        return (
            "they kept no artifacts: declare those that the tests look at, with artifacts = [...] in task.toml or "
            "artifacts: in job.yaml, and run them again"
        )
    lost = next((row for row in rows if row["status"] not in ("ok", "missing")), None)
    return "" if lost is None else f"the artifact {lost['source']} was not kept ({lost['status']})"


@dataclass(frozen=True, slots=True)
class Regraded:
    """A regraded trial. Scores are those that rates use, None if not scored."""

    trial: str
    agent: str
    before: float | None
    after: float | None
    error_before: str | None
    error_after: str | None

    @property
    def changed(self) -> bool:
        """Whether the result changed. The agent's error alone does not count, because no agent runs again."""
        return self.before != self.after or (self.before is None and self.error_before != self.error_after)


@dataclass(frozen=True, slots=True)
class AgentChange:
    """Changes over the `trials` that were scored both before and after; None if there are none."""

    agent: str
    trials: int
    pass_rate_before: float | None
    pass_rate_after: float | None
    mean_reward_before: float | None
    mean_reward_after: float | None


def regraded(before: JobDirectory, after: JobDirectory) -> list[Regraded]:
    """Pair each finished trial of `after` with its earlier result."""
    earlier = {trial.key: trial for trial in before.trials}
    return [
        Regraded(
            trial=trial.label,
            agent=trial.agent,
            before=before.score(earlier[trial.key]),
            after=after.score(trial),
            error_before=_error(earlier[trial.key]),
            error_after=_error(trial),
        )
        for trial in after.trials
        if trial.result is not None and trial.key in earlier
    ]


def _error(trial: KeptTrial) -> str | None:
    return trial.result.error.type if trial.result is not None and trial.result.error is not None else None


def by_agent(found: Sequence[Regraded]) -> list[AgentChange]:
    changes: list[AgentChange] = []
    for agent in dict.fromkeys(one.agent for one in found):
        both = [
            (one.before, one.after)
            for one in found
            if one.agent == agent and one.before is not None and one.after is not None
        ]
        before, after = [one for one, _ in both], [one for _, one in both]
        changes.append(
            AgentChange(agent, len(both), _passing(before), _passing(after), _mean(before), _mean(after))
        )  # fmt: skip
    return changes


def _mean(values: Sequence[float]) -> float | None:
    return mean(values) if values else None


def _passing(values: Sequence[float]) -> float | None:
    return _mean([float(value >= PASS) for value in values])


def comparison_json(found: Sequence[Regraded]) -> JsonObject:
    """Return the content of regrade.json; `trials` are those that changed."""
    return {
        "regraded": len(found),
        "changed": sum(one.changed for one in found),
        "agents": [asdict(one) for one in by_agent(found)],
        "trials": [asdict(one) for one in found if one.changed],
    }


def comparison_file(found: Sequence[Regraded]) -> bytes:
    return json.dumps(comparison_json(found), indent=2, ensure_ascii=False).encode() + b"\n"
