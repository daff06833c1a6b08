"""Payloads and results of the items of a training run.

The first item of the chain turns rows into tokens. Each later one is a segment: a number of steps from the state that
the one before it left. A result has everything the next segment needs, so any worker can continue.
"""

from __future__ import annotations

import json
import math
import re
from dataclasses import asdict, dataclass, field, replace
from types import NoneType
from typing import Any, Literal, cast

from rollout.model.errors import InputError, InvalidResultError
from rollout.model.item import Outcome
from rollout.workloads.commit import CommitEntry
from rollout.workloads.json_form import JsonObject, canonical, field_in, invalid_result, object_in, parse_result

CHAIN = "train"
_HEX = re.compile(r"[0-9a-f]*")


def timeless(line: JsonObject) -> JsonObject:
    """Return a line of metrics without the fields that depend on time and differ when it is repeated: `seconds`,
    `seconds/...` and rates, `..._per_s`."""
    return {
        name: value for name, value in line.items() if not name.startswith("seconds") and not name.endswith("_per_s")
    }


@dataclass(frozen=True, slots=True)
class Segment:
    """`first` is the number of steps before it. For an item that starts from the state of another chain, `before` has
    fields of the `Result` that left it; if it has no `data`, the previous item's is meant. For `verify`, `through` has
    (steps before, steps) of the segments to execute again, one after the other."""

    op: Literal["prepare", "segment", "verify"]
    first: int = 0
    steps: int = 0
    before: JsonObject = field(default_factory=JsonObject)
    through: list[list[int]] = field(default_factory=list[list[int]])

    def encode(self) -> bytes:
        return canonical(asdict(self))

    @staticmethod
    def decode(data: bytes) -> Segment:
        """Decode a segment. Raises InputError."""
        try:
            return Segment(**json.loads(data))
        except (ValueError, TypeError) as error:
            raise InputError(f"this is no segment of a training run: {error}") from error

    def begins_with(self, before: Result | None) -> Result | None:
        """Return the result that the segment continues. `before` is that of the previous item. Returns None if it is
        not known yet."""
        if not self.before:
            return before
        own = Result(**self.before)
        if own.data:
            return own
        return replace(own, data=before.data) if before is not None else None


@dataclass(slots=True)
class Result:
    """The result of an item of the chain. `data` has objects of the tokens, by dataset, and the number of units of
    each. `snapshot` is empty for the first item. `stopping` is the last value of `stopping_after`; `stopped` means that
    nothing is left to do. `parts` are blake3 hashes of the snapshot's parts by name (`rollout.snapshots.parts`).

    For reinforcement learning, `samples` is the hex id of an object with a line of samples.jsonl for each sample of the
    segment, in order, the last object that the result keeps. `rollouts` are counts of groups: {generated, evaluated,
    regenerated, dropped: {cause: count}, zeroed: {cause: count}}, and the `devices` that generated them.
    """

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
    samples: str = ""
    rollouts: JsonObject = field(default_factory=JsonObject)

    def encode(self) -> bytes:
        return canonical(asdict(self))

    @staticmethod
    def decode(data: bytes) -> Result:
        """Decode a result. Raises InvalidResultError."""
        return _result(parse_result(data, finite=False))

    @property
    def is_last(self) -> bool:
        """Whether nothing of the run comes after it."""
        return self.stopped or (self.steps > 0 and self.step >= self.steps)


def done(entry: CommitEntry, op: str) -> Result | None:
    """Return the result of `entry` if its item does `op` and did not fail, else None."""
    if entry.outcome is not Outcome.DONE or Segment.decode(entry.payload).op != op:
        return None
    try:
        return Result.decode(entry.data)
    except InvalidResultError:
        return None


def seen_of(evidence: bytes) -> Result:
    """Return the `metrics` and `evaluations` that a failed attempt left of its steps; empty if it left nothing
    usable."""
    try:
        return Result.decode(evidence) if evidence else Result()
    except InvalidResultError:
        return Result()


def encode_results(results: list[Result]) -> bytes:
    """Encode the results of a `verify` item, one per segment."""
    return canonical([asdict(result) for result in results])


def decode_results(data: bytes) -> list[Result]:
    """Decode results. Raises InvalidResultError."""
    found = parse_result(data, finite=False)
    if type(found) is not list:
        raise invalid_result("it is no list")
    return [_result(one) for one in cast("list[Any]", found)]


_FIELDS: dict[str, type] = {name: type(value) for name, value in asdict(Result()).items()}
_COUNTS = ("rows", "kept", "dropped", "truncated", "tokens", "supervised_tokens", "longest", "sequences")


def _result(value: Any) -> Result:
    """Check that everything that files, messages and other segments read is present and has the right type."""
    fields = object_in(value, "it")
    for name in fields:
        if name not in _FIELDS:
            raise invalid_result(f"a field {name[:40]!r} is not known")
        field_in(fields, name, _FIELDS[name])
    result = Result(**fields)
    for name in ("snapshot", "samples"):
        if not _HEX.fullmatch(getattr(result, name)):
            raise invalid_result(f"{name} is no hash")
    if result.rollouts:
        _check_rollouts(result.rollouts)
    for line in (*result.metrics, *result.evaluations):
        _check_figures(line)
    for name in ("best_evaluation", "last_evaluation"):
        if name in result.stopping:
            _check_figures(result.stopping[name])
    for one in result.report.values():
        _check_report(object_in(one, "a report"))
    return result


NO_ROLLOUTS: JsonObject = {
    "generated": 0, "evaluated": 0, "regenerated": 0, "dropped": {}, "zeroed": {}, "devices": []
}  # fmt: skip
"""`Result.rollouts` of a segment that generated nothing."""


def _check_rollouts(rollouts: JsonObject) -> None:
    objects: list[Any] = field_in(rollouts, "objects", list) if "objects" in rollouts else []
    if any(type(one) is not str or not _HEX.fullmatch(one) for one in objects):
        raise invalid_result("rollouts names objects by no hash")
    for name in ("generated", "evaluated", "regenerated"):
        field_in(rollouts, name, int)
    devices: list[Any] = field_in(rollouts, "devices", list)
    if any(type(one) is not str for one in devices):
        raise invalid_result("rollouts names devices by no names")
    for name in ("dropped", "zeroed"):
        by_cause = object_in(field_in(rollouts, name, dict), name)
        for cause in by_cause:
            field_in(by_cause, cause, int)


def _check_figures(value: Any) -> None:
    line = object_in(value, "a line of figures")
    field_in(line, "step", int)
    field_in(line, "loss", float, int)
    for name in line:
        field_in(line, name, float, int, bool, NoneType)


def _check_report(report: JsonObject) -> None:
    for name in _COUNTS:
        field_in(report, name, int)
    notes: list[Any] = []
    if "notes" in report:  # reports of older runs have none
        notes += field_in(report, "notes", list)
    faults = [object_in(fault, "a fault") for fault in field_in(report, "faults", dict).values()]
    for fault in faults:
        field_in(fault, "rows", int)
        field_in(fault, "policy", str)
        notes += field_in(fault, "first", list)
    if not all(type(note) is str for note in notes):
        raise invalid_result("a report has notes that are no text")


def stopping_after(
    stopping: JsonObject, step: int, loss: float, patience: int, min_delta: float
) -> tuple[JsonObject, bool]:
    """Return (state, whether training ends here) after an evaluation at `step`.

    `best` is the loss that the next one must undercut by `min_delta`; `since` counts evaluations that did not.
    `best_evaluation` is {step, loss} of the lowest of all, by however little; `last_evaluation` is this one.
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
