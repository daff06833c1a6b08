"""Agents and tasks of a job or experiment as its trials end, for the live page and reports."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rollout.model.errors import InputError, InvalidResultError
from rollout.model.item import Outcome
from rollout.workloads.commit import CommitEntry
from rollout.workloads.digest import Archive, Cell, Chart, Curve, Interval, Intervals, Link, Part, Sheet, Text
from rollout.workloads.job.aggregate import Overrides, is_completed, score
from rollout.workloads.job.intervals import Estimate, estimate, group
from rollout.workloads.job.record import TrialRecord
from rollout.workloads.json_form import JsonObject

_TASKS = 200
_SLOWEST = 10


@dataclass(frozen=True, slots=True)
class _Trial:
    agent: str
    task: str
    seq: int
    score: float | None
    completed: bool
    error: str
    seconds: float
    cost: float


class TrialsDigest:
    """Collects the `Digest` of trials. `overrides` are the job's for the table of errors. `of` is the heading for
    agents, `note` a text below their table."""

    def __init__(self, overrides: Overrides, of: str = "agent", note: str = "") -> None:
        self._overrides = overrides
        self._of = of
        self._note = note
        self._trials: list[_Trial] = []
        self._spent = Curve()
        self._cost = 0.0

    def add(self, entry: CommitEntry) -> None:
        if entry.outcome not in (Outcome.DONE, Outcome.FAILED) or not entry.data:
            return
        try:
            record = TrialRecord.decode(entry.data)
        except InputError as error:
            raise InvalidResultError(error.message) from error
        result = record.result
        cost = (record.usage.cost_usd or result.cost) + record.environment_cost_usd
        self._trials.append(
            _Trial(
                agent=result.agent_name,
                task=f"{result.dataset_name}/{result.task_name}",
                seq=entry.seq,
                score=score(result, self._overrides),
                completed=is_completed(result, self._overrides),
                error=result.error.type if result.error else "",
                seconds=result.durations.total_sec,
                cost=cost,
            )
        )
        self._cost += cost
        self._spent.add(len(self._trials), self._cost)

    def parts(self, figures: JsonObject) -> Sequence[Part]:
        if not self._trials:
            return ()
        agents = list(dict.fromkeys(trial.agent for trial in self._trials))
        parts: list[Part] = [
            Sheet(
                f"By {self._of}",
                (
                    self._of,
                    "trials",
                    "completed",
                    "scored",
                    "mean score",
                    "95 % interval",
                    "errors",
                    "median time",
                    "cost",
                ),
                [self._agent(agent) for agent in agents],
                f"Intervals are clustered by task. {self._note}".rstrip(),
            ),
        ]
        means = [
            Interval(agent, found.mean, found.low, found.high)
            for agent in agents
            if (found := self._estimate(agent)) is not None
        ]
        if means:
            parts.append(Intervals(f"Mean score by {self._of}", self._of, means))
        parts.append(self._grid(agents))
        errors = Counter(trial.error for trial in self._trials if trial.error)
        if errors:
            rows = [(name, f"{count:,}", self._example(name)) for name, count in errors.most_common()]
            parts.append(Sheet("Errors", ("error", "trials", "the last one"), rows))
        slowest = sorted(self._trials, key=lambda trial: -trial.seconds)[:_SLOWEST]
        slow = [(Link(trial.task, trial.seq), trial.agent, f"{trial.seconds:,.1f} s") for trial in slowest]
        parts.append(Sheet("Slowest trials", ("task", self._of, "time"), slow))
        if self._cost:
            parts.append(Chart("Cost in US dollars", "trials", {"cost": self._spent.shown()}))
        return parts

    def _example(self, error: str) -> Cell:
        last = next(trial for trial in reversed(self._trials) if trial.error == error)
        return Link(f"{last.task}, {last.agent}", last.seq)

    def _estimate(self, agent: str) -> Estimate | None:
        trials = (trial for trial in self._trials if trial.agent == agent)
        return estimate(group((trial.task, trial.score) for trial in trials if trial.score is not None))

    def _agent(self, agent: str) -> tuple[Cell, ...]:
        trials = [trial for trial in self._trials if trial.agent == agent]
        found = self._estimate(agent)
        times = sorted(trial.seconds for trial in trials)
        return (
            agent,
            f"{len(trials):,}",
            f"{sum(trial.completed for trial in trials):,}",
            f"{sum(trial.score is not None for trial in trials):,}",
            f"{found.mean:.3f}" if found else "",
            _interval(found),
            f"{sum(bool(trial.error) for trial in trials):,}",
            f"{times[len(times) // 2]:,.1f} s",
            f"${cost:,.4g}" if (cost := math.fsum(trial.cost for trial in trials)) else "",
        )

    def _grid(self, agents: Sequence[str]) -> Sheet:
        cells: dict[str, dict[str, list[_Trial]]] = {}
        for trial in self._trials:
            cells.setdefault(trial.task, {}).setdefault(trial.agent, []).append(trial)
        tasks = sorted(cells)
        rows = [(task, *(_cell(cells[task].get(agent, [])) for agent in agents)) for task in tasks[:_TASKS]]
        note = "The mean score; a link leads to the last trial."
        if len(tasks) > _TASKS:
            note += f" {len(tasks) - _TASKS:,} more tasks are not shown."
        return Sheet("By task", ("task", *agents), rows, note)


def trial_parts(record: TrialRecord) -> Sequence[Part]:
    """Return phases of a trial, its scores, and its files: output, changes by the agent, evidence."""
    result, times = record.result, record.result.durations
    phases = [
        ("environment", times.environment_setup_sec),
        ("agent's setup", times.agent_setup_sec),
        ("agent", times.agent_execution_sec),
        ("verifier", times.verifier_sec or 0.0),
        ("all", times.total_sec),
    ]
    parts: list[Part] = [Sheet("Phases", ("phase", "time"), [(name, f"{took:,.2f} s") for name, took in phases])]
    rewards = record.rewards or result.rewards or {}
    if rewards:
        parts.append(Sheet("Scores", ("score", "value"), [(name, f"{value:.6g}") for name, value in rewards.items()]))
    if record.steps:
        rows = [(step.name, json.dumps(step.rewards), ": ".join(step.error or ())) for step in record.steps]
        parts.append(Sheet("Steps", ("step", "scores", "error"), rows))
    if result.error:
        parts.append(Text(result.error.type, result.error.message))
    if record.remarks:
        parts.append(Text("Remarks", "\n".join(record.remarks)))
    if record.files:
        parts.append(Archive("Files: output of the phases, what the agent left, evidence", record.files))
    return parts


def _scores(trials: Sequence[_Trial]) -> Iterator[float]:
    return (trial.score for trial in trials if trial.score is not None)


def _cell(trials: Sequence[_Trial]) -> Cell:
    if not trials:
        return ""
    scores = list(_scores(trials))
    text = f"{math.fsum(scores) / len(scores):.2f}" if scores else trials[-1].error or "no score"
    return Link(f"{text} ({len(trials)})" if len(trials) > 1 else text, trials[-1].seq)


def _interval(found: Estimate | None) -> str:
    return "" if found is None or found.low is None or found.high is None else f"{found.low:.3f} to {found.high:.3f}"
