"""What trials used of a budget: all their tries, including failed ones."""

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
        """Return what earlier runs of the job used. `used` is that of a run's configuration."""
        return cls(used.get("tokens", 0), used.get("micro_dollars", 0))

    def to_json(self) -> JsonObject:
        return {"cost_usd": self.micro_dollars / MICRO, "tokens": self.tokens}


def spent_by(records: Iterable[TrialRecord]) -> Spent:
    """Return what these tries used."""
    tokens = cost = 0
    for record in records:
        tokens += record.usage.n_input_tokens + record.usage.n_output_tokens
        cost += round(record.result.cost * MICRO)
    return Spent(tokens, cost)


def spent_in(lines: Mapping[str, JsonObject]) -> Spent:
    """Return what all tries of a trial used. `lines` are its lines by file; that of placed files lists all its
    tries."""
    if PLACED in lines:
        return spent_by(record_from(part["record"]) for part in lines[PLACED]["parts"])
    return spent_by([record_from(lines[TRIALS]["record"])]) if TRIALS in lines else Spent()
