"""Which items of a log name objects in their results, where the policy `keep_objects` will ask; what attempts handed
over to the next; and which parents keep objects for their children. All of it is in the log's row, so a new leader
knows it."""

from __future__ import annotations

from rollout_coordinator.core.state import Log, State, touch
from rollout_coordinator.core.step import HELD, HeldRow


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
    _settle_handoff(state, log, seq)
    log.extra["handed_over"] = {**log.extra.get("handed_over", {}), str(seq): [attempt, data.hex()]}


def handoff(log: Log, seq: int) -> bytes:
    """Empty: nothing."""
    found: dict[str, tuple[int, str]] = log.extra.get("handed_over", {})
    return bytes.fromhex(found[str(seq)][1]) if str(seq) in found else b""


def hold(state: State, log: Log, seq: int, worker: str, keeps: tuple[bytes, ...], lets_go: tuple[bytes, ...]) -> None:
    """The parent `seq` keeps these objects, which `worker` stored, for its children, until it has a result."""
    if keeps:
        log.extra["holds"] = sorted({*log.extra.get("holds", []), seq})
        touch(state, log)
    state.step.writes.held += [HeldRow(log.id, seq, one, worker) for one in keeps]
    state.step.writes.released_held += [(log.id, seq, one) for one in lets_go]


def has_claims(log: Log) -> bool:
    """Whether `settle` has anything to do."""
    return "handed_over" in log.extra or "holds" in log.extra


def settle(state: State, log: Log, seq: int) -> None:
    """The item has a result: what was handed over of it, or kept for its children, is needed no longer."""
    _settle_handoff(state, log, seq)
    holds: list[int] = log.extra.get("holds", [])
    if seq in holds:
        log.extra["holds"] = [one for one in holds if one != seq]
        if not log.extra["holds"]:
            del log.extra["holds"]
        state.step.writes.released_attempts.append((log.id, seq, HELD))


def _settle_handoff(state: State, log: Log, seq: int) -> None:
    found: dict[str, tuple[int, str]] = log.extra.get("handed_over", {})
    if str(seq) in found:
        log.extra["handed_over"] = {key: value for key, value in found.items() if key != str(seq)}
        if not log.extra["handed_over"]:
            del log.extra["handed_over"]
        state.step.writes.released_attempts.append((log.id, seq, found[str(seq)][0]))
