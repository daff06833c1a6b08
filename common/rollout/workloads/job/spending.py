"""What trials used up of a budget: all their tries, also those that came to nothing."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from rollout.workloads.job.record import TrialRecord, record_from
from rollout.workloads.job.result_files import PLACED, TRIALS
from rollout.workloads.json_form import JsonObject

MICRO = 1_000_000
"""Cost is counted in millionths of a US dollar."""


@dataclass(frozen=True, slots=True)
class Spent:
    tokens: int = 0
    micro_dollars: int = 0

    def __add__(self, other: Spent) -> Spent:
        return Spent(self.tokens + other.tokens, self.micro_dollars + other.micro_dollars)

    @classmethod
    def before(cls, used: JsonObject) -> Spent:
        """By runs of the job before. `used`: of a run's configuration."""
        return cls(used.get("tokens", 0), used.get("micro_dollars", 0))

    def to_json(self) -> JsonObject:
        return {"cost_usd": self.micro_dollars / MICRO, "tokens": self.tokens}


def spent_by(records: Iterable[TrialRecord]) -> Spent:
    """`records`: of tries."""
    tokens = cost = 0
    for record in records:
        tokens += record.usage.n_input_tokens + record.usage.n_output_tokens
        cost += round(record.result.cost * MICRO)
    return Spent(tokens, cost)


def spent_in(lines: Mapping[str, JsonObject]) -> Spent:
    """By all tries of a trial. `lines`: what it has in each file; in that of what was placed stand all its tries."""
    if PLACED in lines:
        return spent_by(record_from(part["record"]) for part in lines[PLACED]["parts"])
    return spent_by([record_from(lines[TRIALS]["record"])]) if TRIALS in lines else Spent()
