"""State of items, and the only way to change it.

An item has no field for its state, which a window of millions of transitions a minute could not afford. Where the item
is kept is its state, and only this module moves it from one place to another:

- `Log.flight` and `AttemptBatch.started`: assigned, or running;
- `Log.accepted`, and in schedule order everything before `Log.cursor`: accepted, or final;
- none of these: pending, be it in memory or in the ledger only.

Every move consults the table, once for all items that move together, with the state that they really have.
"""

from __future__ import annotations

from itertools import repeat

from rollout.model.errors import StateError
from rollout.model.item import ItemState, Outcome

from rollout_coordinator.core.state import AttemptBatch, Log
from rollout_coordinator.core.transitions import ITEM

_COMMIT = {
    Outcome.DONE: "commit_done",
    Outcome.FAILED: "commit_failed",
    Outcome.CANCELLED: "commit_cancelled",
    Outcome.SKIPPED: "commit_skipped",
}


def is_accepted(log: Log, seq: int) -> bool:
    """Return whether it has a result, final or not."""
    return seq in log.accepted or (seq < log.cursor and not log.by_arrival)


def state_of(log: Log, seq: int) -> ItemState:
    """Return PENDING, ASSIGNED, RUNNING or ACCEPTED; only the ledger distinguishes final states."""
    batch = log.flight.get(seq)
    if batch is not None:
        return ItemState.RUNNING if seq in batch.started or batch.maybe_started else ItemState.ASSIGNED
    return ItemState.ACCEPTED if is_accepted(log, seq) else ItemState.PENDING


def assign(batch: AttemptBatch) -> None:
    """Assign pending items to the batch's worker. Its `seqs` ascend."""
    log, seqs = batch.log, batch.seqs
    flight = log.flight
    if log.accepted.lo or seqs[0] < log.cursor:
        _none_has_a_result(log, seqs)
    ITEM.move(ItemState.PENDING, "assign")
    after = len(flight) + len(seqs)
    flight.update(dict.fromkeys(seqs, batch))
    if len(flight) != after:
        raise StateError(f"items of log {log.id} were assigned twice: some of {seqs[0]} to {seqs[-1]} are in flight")


def adopt(batch: AttemptBatch) -> None:
    """Adopt items that a new leader finds in flight, without a transition."""
    batch.log.flight.update(dict.fromkeys(batch.seqs, batch))


def start(batch: AttemptBatch, seqs: list[int], at_ms: int) -> int:
    """Record that the worker runs these items of the batch. Returns how many were not known to run."""
    started = batch.started
    before = len(started)
    for seq in seqs:  # the same one may be named twice
        started.setdefault(seq, at_ms)
    begun = len(started) - before
    if begun and not batch.maybe_started:  # those count as running already
        ITEM.move(ItemState.ASSIGNED, "start")
    return begun


def end(batch: AttemptBatch, seqs: list[int], cause: str) -> int:
    """End attempts; by `cause` their items are pending or accepted. Returns how many had begun. Raises StateError if
    one of them is not in flight in this batch."""
    log, started, n = batch.log, batch.started, len(seqs)
    flight = log.flight
    if n == 1:
        found = int(flight.pop(seqs[0], None) is batch)
    else:
        found = list(map(flight.pop, seqs, repeat(None))).count(batch)
    if found != n:
        raise StateError(f"not all of the items {seqs} of log {log.id} are in the attempts that end by {cause!r}")
    begun = 0
    if started:
        begun = n - list(map(started.pop, seqs, repeat(0))).count(0)
    after = ItemState.PENDING
    if begun or batch.maybe_started:
        after = ITEM.move(ItemState.RUNNING, cause)
    if begun < n and not batch.maybe_started:
        after = ITEM.move(ItemState.ASSIGNED, cause)
    if after is ItemState.ACCEPTED:
        log.accepted.add_many(seqs)
    return begun


def close(log: Log, seqs: list[int]) -> None:
    """End pending items without an attempt."""
    for seq in seqs:
        if seq in log.flight:
            raise StateError(f"item {seq} of log {log.id} is in flight: its attempt must end with it")
        ITEM.move(state_of(log, seq), "close")
    log.accepted.add_many(seqs)


def commit_prefix(log: Log) -> None:
    """Move the cursor past every result up to the first missing one, if nothing needs each outcome."""
    log.cursor = log.accepted.advance(log.cursor)


def commit(log: Log, seq: int, outcome: Outcome | None) -> None:
    """Make an accepted item final. In schedule order it is the one at the cursor, which passes it."""
    if outcome is not None:
        ITEM.move(state_of(log, seq), _COMMIT[outcome])
    if not log.by_arrival:
        log.cursor = seq + 1


def _none_has_a_result(log: Log, seqs: list[int]) -> None:
    if log.accepted.overlaps(seqs[0], seqs[-1]) or (seqs[0] < log.cursor and not log.by_arrival):
        for seq in seqs:  # whichever of them has one raises
            ITEM.move(state_of(log, seq), "assign")
