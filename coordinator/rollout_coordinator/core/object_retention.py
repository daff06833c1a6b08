"""Retention of objects: results that name objects (for the policy `keep_objects`), what attempts handed over, and what
parents keep for their children. All of it is in the log's row, so a new leader knows it."""

from __future__ import annotations

from rollout_coordinator.core.state import Log, State, touch
from rollout_coordinator.core.step import HELD, HeldRow


def note_result(log: Log, seq: int, at_ms: int) -> None:
    """Record that this item's result names objects."""
    if _asks(log):
        log.progress.kept = sorted([*log.progress.kept, (seq, at_ms)])


def spared(log: Log) -> int:
    """Return how many objects of each result of this log, the last ones, are never released."""
    if log.parent is not None:
        return 0
    return sum(int(dict(one.options).get("spare", 0)) for one in log.run.policies if one.name == "keep_objects")


def note_failure(log: Log, seq: int) -> None:
    """Record that a failure of this item, or of an attempt at it, named objects."""
    if _asks(log):
        log.progress.left = sorted({*log.progress.left, seq})


def failures_between(log: Log, first: int, last: int) -> list[int]:
    """Return, and forget, the failures recorded from `first` to `last`."""
    left = log.progress.left
    log.progress.left = [seq for seq in left if not first <= seq <= last]
    return [seq for seq in left if first <= seq <= last]


def _asks(log: Log) -> bool:
    return log.parent is None and any(policy.name == "keep_objects" for policy in log.run.policies)


def hand_over(state: State, log: Log, seq: int, attempt: int, data: bytes) -> None:
    """Keep what an unfinished attempt hands over: the next one continues from `data`. The objects it names stay until
    the item has a result or a further attempt hands over."""
    _settle_handoff(state, log, seq)
    log.progress.handed_over[seq] = attempt, data


def handoff(log: Log, seq: int) -> bytes:
    """Return what was handed over, or nothing."""
    return log.progress.handed_over.get(seq, (0, b""))[1]


def hold(state: State, log: Log, seq: int, worker: str, keeps: tuple[bytes, ...], lets_go: tuple[bytes, ...]) -> None:
    """Keep objects, which `worker` stored, for the children of the parent `seq` until it has a result."""
    if keeps:
        log.progress.holds = sorted({*log.progress.holds, seq})
        touch(state, log)
    state.step.writes.held += [HeldRow(log.id, seq, one, worker) for one in keeps]
    state.step.writes.released_held += [(log.id, seq, one) for one in lets_go]


def has_claims(log: Log) -> bool:
    """Return whether `settle` has anything to do."""
    return bool(log.progress.handed_over or log.progress.holds)


def settle(state: State, log: Log, seq: int) -> None:
    """Release what was handed over of an item with a result, or kept for its children."""
    _settle_handoff(state, log, seq)
    if seq in log.progress.holds:
        log.progress.holds.remove(seq)
        state.step.writes.released_attempts.append((log.id, seq, HELD))


def _settle_handoff(state: State, log: Log, seq: int) -> None:
    found = log.progress.handed_over.pop(seq, None)
    if found is not None:
        state.step.writes.released_attempts.append((log.id, seq, found[0]))
