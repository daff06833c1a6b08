"""Which items of a log name objects in what they came to, where the policy `keep_objects` will ask; and what attempts
handed over to the next. Both are in the log's row, so a new leader knows them."""

from __future__ import annotations

from rollout_coordinator.core.state import Log, State


def note_result(log: Log, seq: int, at_ms: int) -> None:
    """The result of this item names objects."""
    if _asks(log):
        kept: list[list[int]] = log.extra.get("kept", [])
        log.extra["kept"] = sorted([*kept, [seq, at_ms]])


def spared(log: Log) -> int:
    """So many objects that a result of this log names, the last ones, are never let go."""
    if log.parent is not None:
        return 0
    return sum(int(dict(one.options).get("spare", 0)) for one in log.run.policies if one.name == "keep_objects")


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


def hand_over(state: State, log: Log, seq: int, attempt: int, data: bytes) -> None:
    """This attempt was given back in the middle: the next one goes on from `data`, and what that names stays until the
    item has a result or somebody hands over more of it."""
    settle(state, log, seq)
    log.extra["handed_over"] = {**log.extra.get("handed_over", {}), str(seq): [attempt, data.hex()]}


def handoff(log: Log, seq: int) -> bytes:
    """Empty: nothing."""
    found: dict[str, tuple[int, str]] = log.extra.get("handed_over", {})
    return bytes.fromhex(found[str(seq)][1]) if str(seq) in found else b""


def settle(state: State, log: Log, seq: int) -> None:
    """What was handed over of this item is needed no longer."""
    found: dict[str, tuple[int, str]] = log.extra.get("handed_over", {})
    if str(seq) in found:
        log.extra["handed_over"] = {key: value for key, value in found.items() if key != str(seq)}
        if not log.extra["handed_over"]:
            del log.extra["handed_over"]
        state.step.writes.released_attempts.append((log.id, seq, found[str(seq)][0]))
