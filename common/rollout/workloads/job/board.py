"""The live view of a job: statistics of each agent, and running trials."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from rollout.workloads.job.aggregate import Overrides, is_completed, score
from rollout.workloads.job.averages import mean
from rollout.workloads.job.pass_at_k import PASS
from rollout.workloads.job.record import TrialRecord
from rollout.workloads.job.spending import MICRO, Spent
from rollout.workloads.json_form import JsonObject
from rollout.workloads.port import Running, StatusTable

HEADS = ("agent", "trials", "done", "passed", "failed", "running", "pending", "mean reward")


@dataclass(slots=True)
class _Agent:
    """Counts of an agent. `failed` trials have no valid reward. `running` is None if unknown, because more trials run
    than were listed."""

    trials: int = 0
    done: int = 0
    passed: int = 0
    failed: int = 0
    running: int | None = 0
    rewards: list[float] = field(default_factory=list[float])

    @property
    def mean_reward(self) -> float | None:
        return mean(self.rewards) if self.rewards else None

    def to_json(self) -> JsonObject:
        return {
            "trials": self.trials,
            "done": self.done,
            "passed": self.passed,
            "failed": self.failed,
            "running": self.running,
            "pending": None if self.running is None else max(0, self.trials - self.done - self.running),
            "mean_reward": self.mean_reward,
        }


class Tally:
    """Counts the trials of a job as they end. `labels` are those of all trials."""

    def __init__(self, labels: Iterable[str], overrides: Overrides) -> None:
        self._overrides = overrides
        self._agents: dict[str, _Agent] = {}
        for label in labels:
            self._agents.setdefault(_agent_of(label), _Agent()).trials += 1

    def add(self, record: TrialRecord) -> None:
        result = record.result
        agent = self._agents.setdefault(result.agent_name, _Agent())
        agent.done += 1
        agent.failed += not is_completed(result, self._overrides)
        if (value := score(result, self._overrides)) is not None:
            agent.rewards.append(value)
            agent.passed += value >= PASS

    def agents(self) -> JsonObject:
        """Return `trials`, `scored`, `passed` and `mean_reward` (None if nothing is scored) by agent."""
        return {
            name: {
                "trials": one.trials,
                "scored": len(one.rewards),
                "passed": one.passed,
                "mean_reward": one.mean_reward,
            }
            for name, one in self._agents.items()
        }

    def board(self, of_run: Sequence[str], running: Sequence[Running], n_running: int, spent: Spent) -> StatusTable:
        """Return the table. `of_run` has labels by seq. `running` are the first of `n_running`."""
        shown = [(of_run[one.seq], one) for one in running if one.seq < len(of_run)]
        among = Counter(_agent_of(label) for label, _ in shown)
        for name, agent in self._agents.items():
            agent.running = among[name] if len(running) >= n_running else None
        agents = {name: agent.to_json() for name, agent in self._agents.items()}
        tokens, cost = spent.tokens, spent.micro_dollars / MICRO
        return StatusTable(
            heads=HEADS,
            rows=tuple(_row(name, counts) for name, counts in agents.items()),
            running=tuple(_running_row(label, one) for label, one in shown),
            n_running=n_running,
            line=", ".join([*([f"{tokens:,} tokens"] if tokens else []), *([f"${cost:.2f}"] if cost else [])]),
            fields={
                "agents": agents,
                "trials_running": [
                    {"trial": label, "phase": one.note, "seconds": round(one.seconds, 1), "try": one.tries}
                    for label, one in shown
                ],
                "tokens": tokens,
                "cost_usd": cost,
            },
        )


def _agent_of(label: str) -> str:
    return label.split("/")[2]


def _row(name: str, counts: JsonObject) -> tuple[str, ...]:
    reward = counts["mean_reward"]
    keys = ("trials", "done", "passed", "failed", "running", "pending")
    numbers = ["" if counts[key] is None else f"{counts[key]:,}" for key in keys]
    return (name, *numbers, "" if reward is None else f"{reward:.4g}")


def _running_row(label: str, one: Running) -> tuple[str, ...]:
    again = f"try {one.tries}" if one.tries > 1 else ""
    return label, one.note, f"{one.seconds:.0f} s", again
