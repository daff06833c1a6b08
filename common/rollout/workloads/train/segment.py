"""What items of a training run say, and what their results do.

The first item of the chain turns rows into tokens; each one after it is a segment: so many steps from the state that
the one before it left. A result carries what the next segment needs, so that any worker can go on with nothing else.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from rollout.model.errors import InputError
from rollout.workloads.json_form import JsonObject, canonical

CHAIN = "train"


@dataclass(frozen=True, slots=True)
class Segment:
    """`first`: steps done before it. `start`: the snapshot to begin with, of an item that has none before it; empty:
    the base model. `expected`: of `verify`, the snapshot that has to come out."""

    op: Literal["prepare", "segment", "verify"]
    first: int = 0
    steps: int = 0
    start: str = ""
    data: JsonObject = field(default_factory=JsonObject)
    expected: str = ""
    label: str = ""

    def encode(self) -> bytes:
        return canonical(asdict(self))

    @staticmethod
    def decode(data: bytes) -> Segment:
        """InputError: this is none."""
        try:
            return Segment(**json.loads(data))
        except (ValueError, TypeError) as error:
            raise InputError(f"this is no segment of a training run: {error}") from error


@dataclass(slots=True)
class Result:
    """Of an item of the chain. `data`: objects of the tokens, by dataset, and how many units each has. `snapshot`:
    empty of the first item. `stopping`: best evaluation loss, and evaluations since; `stopped`: nothing is left."""

    step: int = 0
    steps: int = 0  # of the whole run
    snapshot: str = ""
    size: int = 0
    algorithm: str = ""
    data: JsonObject = field(default_factory=JsonObject)
    report: JsonObject = field(default_factory=JsonObject)
    metrics: list[JsonObject] = field(default_factory=list[JsonObject])
    evaluations: list[JsonObject] = field(default_factory=list[JsonObject])
    fingerprint: JsonObject = field(default_factory=JsonObject)
    model: JsonObject = field(default_factory=JsonObject)
    stopping: JsonObject = field(default_factory=JsonObject)
    stopped: bool = False
    label: str = ""
    weights: str = ""  # blake3 over the sorted tensors, of the last segment

    def encode(self) -> bytes:
        return canonical(asdict(self))

    @staticmethod
    def decode(data: bytes) -> Result:
        """InputError: this is none."""
        try:
            return Result(**json.loads(data))
        except (ValueError, TypeError) as error:
            raise InputError(f"this is no result of a training run: {error}") from error


def stopping_after(stopping: JsonObject, loss: float, patience: int, min_delta: float) -> tuple[JsonObject, bool]:
    """(best loss and evaluations since, whether training ends here) after an evaluation with this loss."""
    best: Any = stopping.get("best")
    if best is None or loss < best - min_delta:
        return {"best": loss, "since": 0}, False
    since = int(stopping["since"]) + 1
    return {"best": best, "since": since}, bool(patience) and since >= patience
