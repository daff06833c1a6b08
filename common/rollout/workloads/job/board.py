"""What a person sees of a job that goes on: how each agent does, and what runs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import fsum

from rollout.workloads.job.aggregate import is_completed, score
from rollout.workloads.job.averages import mean
from rollout.workloads.job.config import JobConfig
from rollout.workloads.job.pass_at_k import PASS
from rollout.workloads.job.record import TrialRecord
from rollout.workloads.json_form import JsonObject
from rollout.workloads.port import Board, Running

HEADS = ("agent", "trials", "done", "passed", "failed", "running", "pending", "mean reward")


@dataclass(slots=True)
class _Agent:
    """`failed`: without a valid reward."""

    trials: int = 0
    done: int = 0
    failed: int = 0
    running: int | None = 0
    """None: not known, since more run than were asked for."""
    scores: list[float] = field(default_factory=list[float])

    def to_json(self) -> JsonObject:
        return {
            "trials": self.trials,
            "done": self.done,
            "passed": sum(value >= PASS for value in self.scores),
            "failed": self.failed,
            "running": self.running,
            "pending": None if self.running is None else max(0, self.trials - self.done - self.running),
            "mean_reward": mean(self.scores) if self.scores else None,
        }


def make_board(
    planned: Sequence[tuple[str, str]],
    of_run: Sequence[str],
    records: Mapping[str, TrialRecord],
    job: JobConfig,
    running: Sequence[Running],
    n_running: int,
) -> Board:
    """`planned`: id and label of all trials. `of_run`: labels by seq. `running`: the first of `n_running`."""
    agents: dict[str, _Agent] = {}
    for trial, label in planned:
        agent = agents.setdefault(label.split("/")[2], _Agent())
        agent.trials += 1
        if (record := records.get(trial)) is None:
            continue
        agent.done += 1
        agent.failed += not is_completed(record.result, job.override_error_policy)
        if (value := score(record.result, job.override_error_policy)) is not None:
            agent.scores.append(value)
    shown = [(of_run[one.seq], one) for one in running if one.seq < len(of_run)]
    among = Counter(label.split("/")[2] for label, _ in shown)
    for name, agent in agents.items():
        agent.running = among[name] if len(running) >= n_running else None
    usage = [record.usage for record in records.values()]
    tokens = sum(one.n_input_tokens + one.n_output_tokens for one in usage)
    cost = fsum(record.result.cost for record in records.values())
    return Board(
        heads=HEADS,
        rows=tuple(_row(name, agent.to_json()) for name, agent in agents.items()),
        running=tuple(_running_row(label, one) for label, one in shown),
        n_running=n_running,
        line=", ".join([*([f"{tokens:,} tokens"] if tokens else []), *([f"${cost:.2f}"] if cost else [])]),
        fields={
            "agents": {name: agent.to_json() for name, agent in agents.items()},
            "trials_running": [
                {"trial": label, "phase": one.note, "seconds": round(one.seconds, 1), "try": one.tries}
                for label, one in shown
            ],
            "tokens": tokens,
            "cost_usd": cost,
        },
    )


def _row(name: str, counts: JsonObject) -> tuple[str, ...]:
    reward = counts["mean_reward"]
    keys = ("trials", "done", "passed", "failed", "running", "pending")
    numbers = ["" if counts[key] is None else f"{counts[key]:,}" for key in keys]
    return (name, *numbers, "" if reward is None else f"{reward:.3f}")


def _running_row(label: str, one: Running) -> tuple[str, ...]:
    again = f"try {one.tries}" if one.tries > 1 else ""
    return label, one.note, f"{one.seconds:.0f} s", again
