"""Which items of a log name objects in what they came to, where the policy `keep_objects` will ask."""

from __future__ import annotations

from rollout_coordinator.core.state import Log


def note_result(log: Log, seq: int, at_ms: int) -> None:
    """The result of this item names objects."""
    if _asks(log):
        kept: list[list[int]] = log.extra.get("kept", [])
        log.extra["kept"] = sorted([*kept, [seq, at_ms]])


def note_failure(log: Log, seq: int) -> None:
    """What failed at this item, an attempt or the item itself, named objects."""
    if _asks(log):
        log.extra["left"] = sorted({*log.extra.get("left", []), seq})


def failures_between(log: Log, first: int, last: int) -> list[int]:
    """Those noted from `first` to `last`, which are forgotten with that."""
    left: list[int] = log.extra.get("left", [])
    log.extra["left"] = [seq for seq in left if not first <= seq <= last]
    return [seq for seq in left if first <= seq <= last]


def _asks(log: Log) -> bool:
    return log.parent is None and any(policy.name == "keep_objects" for policy in log.run.policies)
