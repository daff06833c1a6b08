"""What items of a training run say, and what their results do.

The first item of the chain turns rows into tokens; each one after it is a segment: so many steps from the state that
the one before it left. A result carries what the next segment needs, so that any worker can go on with nothing else.
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

from rollout.model.errors import InputError
from rollout.workloads.json_form import JsonObject, canonical

CHAIN = "train"
TIMES = frozenset({"seconds"})
"""Fields of a metrics line that are of the time it took, and not the same when it is done again."""


@dataclass(frozen=True, slots=True)
class Segment:
    """`first`: steps done before it. `before`: of an item that begins with the state of another chain, the fields of
    the `Result` that left it; where it has no `data`, that of the item before is meant. `through`: of `verify`, (steps
    done before, steps) of the segments that are executed again, one after the other."""

    op: Literal["prepare", "segment", "verify"]
    first: int = 0
    steps: int = 0
    before: JsonObject = field(default_factory=JsonObject)
    through: list[list[int]] = field(default_factory=list[list[int]])

    def encode(self) -> bytes:
        return canonical(asdict(self))

    @staticmethod
    def decode(data: bytes) -> Segment:
        """InputError: this is none."""
        try:
            return Segment(**json.loads(data))
        except (ValueError, TypeError) as error:
            raise InputError(f"this is no segment of a training run: {error}") from error

    def begins_with(self, before: Result | None) -> Result | None:
        """What it goes on from when `before` is of the item before it; None: of that, nothing is known yet."""
        if not self.before:
            return before
        own = Result(**self.before)
        if own.data:
            return own
        return replace(own, data=before.data) if before is not None else None


@dataclass(slots=True)
class Result:
    """Of an item of the chain. `data`: objects of the tokens, by dataset, and how many units each has. `snapshot`:
    empty of the first item. `stopping`: what `stopping_after` gave last; `stopped`: nothing is left.
    `parts`: blake3 of what the snapshot consists of, by name (`rollout.snapshots.parts`)."""

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
    parts: JsonObject = field(default_factory=JsonObject)

    def encode(self) -> bytes:
        return canonical(asdict(self))

    @staticmethod
    def decode(data: bytes) -> Result:
        """InputError: this is none."""
        try:
            return Result(**json.loads(data))
        except (ValueError, TypeError) as error:
            raise InputError(f"this is no result of a training run: {error}") from error

    @property
    def is_last(self) -> bool:
        """Nothing of the run comes after it."""
        return self.stopped or (self.steps > 0 and self.step >= self.steps)


def encode_results(results: list[Result]) -> bytes:
    """Of an item that is `verify`: of each segment that it went through."""
    return canonical([asdict(result) for result in results])


def decode_results(data: bytes) -> list[Result]:
    """InputError: these are none."""
    try:
        return [Result(**one) for one in json.loads(data)]
    except (ValueError, TypeError) as error:
        raise InputError(f"these are no results of segments: {error}") from error


def stopping_after(
    stopping: JsonObject, step: int, loss: float, patience: int, min_delta: float
) -> tuple[JsonObject, bool]:
    """(what is known, whether training ends here) after an evaluation at `step`.

    `best`: the loss that the next one must be lower than, by `min_delta`; `since`: evaluations that were not;
    `best_evaluation`: {step, loss} of the lowest of all, by however little; `last_evaluation`: of this one.
    """
    last: JsonObject = {"step": step, "loss": loss}
    lowest: JsonObject = stopping.get("best_evaluation", last)
    lower = math.isnan(lowest["loss"]) or loss < lowest["loss"]
    told: JsonObject = {"best_evaluation": last if lower else lowest, "last_evaluation": last}
    best: Any = stopping.get("best")
    if best is None or math.isnan(best) or loss < best - min_delta:
        return {"best": loss, "since": 0, **told}, False
    since = int(stopping["since"]) + 1
    return {"best": best, "since": since, **told}, bool(patience) and since >= patience
