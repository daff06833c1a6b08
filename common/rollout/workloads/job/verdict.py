"""Judges whether a task can be trusted: its solution passes, and an agent that does nothing fails."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from rollout.workloads.job.agent_kinds import NOP, ORACLE
from rollout.workloads.job.errors import policy_of
from rollout.workloads.job.job_directory import JobDirectory, KeptTrial
from rollout.workloads.job.pass_at_k import PASS
from rollout.workloads.job.record import SERVICES_ENDED
from rollout.workloads.json_form import JsonObject

TAIL_LINES = 12
_TAIL_BYTES = 1 << 16


@dataclass(frozen=True, slots=True)
class Complaint:
    """A fault of a task, and the trial that shows it."""

    trial: KeptTrial
    message: str


@dataclass(frozen=True, slots=True)
class Verdict:
    """The verdict on a task, which may be good despite `warnings`."""

    dataset: str
    task: str
    trials: tuple[KeptTrial, ...]
    complaints: tuple[Complaint, ...]
    warnings: tuple[str, ...]

    @property
    def ok(self) -> bool:
        return not self.complaints

    def to_json(self) -> JsonObject:
        """Return an object of `rollout task oracle --json`."""
        return {
            "task": self.task,
            "dataset": self.dataset,
            "ok": self.ok,
            "faults": [{"trial": one.trial.label, "message": one.message} for one in self.complaints],
            "warnings": list(self.warnings),
            "trials": [
                {
                    "agent": trial.agent,
                    "attempt": trial.attempt,
                    "reward": trial.result and trial.result.reward,
                    "rewards": trial.record and trial.record.rewards,
                    "error": trial.result and trial.result.error and trial.result.error.model_dump(),
                    "durations": trial.result and trial.result.durations.model_dump(),
                }
                for trial in self.trials
            ],
        }


def verdicts(job: JobDirectory) -> list[Verdict]:
    """Return the verdicts of a job in which `oracle` and `nop` tried each task, in its order."""
    tasks: dict[tuple[str, str], list[KeptTrial]] = {}
    for trial in job.trials:
        tasks.setdefault((trial.dataset, trial.task), []).append(trial)
    return [_verdict(job, *key, trials) for key, trials in tasks.items()]


def _verdict(job: JobDirectory, dataset: str, task: str, trials: Sequence[KeptTrial]) -> Verdict:
    complaints, warnings = list[Complaint](), list[str]()
    for trial in trials:
        if trial.agent == ORACLE and (why := _why_not_passed(job, trial)):
            complaints.append(Complaint(trial, why))
        elif trial.agent == NOP:
            why, warning = _nothing_done(job, trial)
            complaints += [Complaint(trial, why)] if why else []
            warnings += [warning] if warning else []
    return Verdict(dataset, task, tuple(trials), tuple(complaints), tuple(dict.fromkeys(warnings)))


def _why_not_passed(job: JobDirectory, trial: KeptTrial) -> str:
    """Return why it did not pass, or ""."""
    score = job.score(trial)
    if score is not None and score >= PASS and job.status(trial) == "completed":
        return ""
    if trial.result is None:
        return f"{ORACLE} did not run"
    remarks = () if trial.record is None else trial.record.remarks
    ended = next((one for one in remarks if one.startswith(SERVICES_ENDED)), "")
    if trial.result.error is not None:
        why = f"; {ended}" if ended else ""
        return f"{ORACLE}: {trial.result.error.type}: {trial.result.error.message}{why}"
    if score is None:
        return f"{ORACLE} was not verified"
    return f"{ORACLE}: reward {score:g}: {ended or 'the solution does not pass the tests'}"


def _nothing_done(job: JobDirectory, trial: KeptTrial) -> tuple[str, str]:
    """Return (fault, warning) of the trial of an agent that does nothing."""
    score, result = job.score(trial), trial.result
    if result is None:
        return f"{NOP} did not run", ""
    if score is not None and score >= PASS:
        return f"{NOP}: reward {score:g}: an agent that does nothing passes, so the tests test nothing", ""
    if result.error is None:
        return "", ""
    told = f"{NOP}: {result.error.type}: {result.error.message}"
    if policy_of(result.error.type, job.overrides).blame == "verifier":
        return "", f"{told}; it counts as 0, and hides a verifier that is broken: write a reward of 0, and exit with 0"
    return ("", "") if score is not None else (told, "")


def tail(job: JobDirectory, trial: KeptTrial) -> Iterator[tuple[Path, list[str]]]:
    """Yield the last lines that explain why a trial did not pass: the agent's output if it failed, the verifier's if it
    ran, else that of set-up."""
    directory = job.path / trial.label
    for part in ("verifier", "agent", "setup"):
        found = [path for path in sorted(directory.rglob(f"{part}/std*.txt")) if "tries" not in path.parts]
        told = [(path, lines) for path in found if (lines := _last_lines(path))]
        if told:
            yield from told
            return


def _last_lines(path: Path) -> list[str]:
    try:
        with path.open("rb") as file:
            size = file.seek(0, 2)
            file.seek(max(0, size - _TAIL_BYTES))
            return file.read().decode("utf-8", "replace").rstrip().splitlines()[-TAIL_LINES:]
    except OSError:
        return []
