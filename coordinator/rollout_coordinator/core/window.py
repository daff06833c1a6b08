"""Bounded window of pending items over the ledger.

Fresh items go straight into memory while there is room and nothing before them is in the ledger only; the rest are
counted and read back by LoadPending. Items that are pending again had their payloads dropped, and come back by
LoadItems.
"""

from __future__ import annotations

import heapq
from itertools import groupby

from rollout.model.item import Blob
from rollout.model.run import RunState

from rollout_coordinator.core.capacity import fits, idle
from rollout_coordinator.core.commit import close_pending, verdict_on
from rollout_coordinator.core.events import Loaded, PendingItem
from rollout_coordinator.core.items import is_accepted
from rollout_coordinator.core.queues import add_fresh, add_tried, arrived, put_back
from rollout_coordinator.core.run_limits import count_over
from rollout_coordinator.core.state import History, Log, State
from rollout_coordinator.core.step import LoadItems, LoadPending

RELOAD = 1024  # rows that are pending again read back at once, at most


def free_rows(state: State, log: Log) -> int:
    if log.window_bytes >= state.settings.window_bytes:
        return 0
    return state.settings.window_items - log.window


def refill(state: State, log: Log) -> None:
    """Load more from the ledger if the window wants it."""
    run = log.run
    if log.closed or not run.specs or run.state is not RunState.RUNNING:
        return
    if log.returned and len(log.loading_returned) < RELOAD:
        seqs = heapq.nsmallest(RELOAD - len(log.loading_returned), log.returned)
        for seq in seqs:
            log.loading_returned[seq] = log.returned.pop(seq)
        state.ask(log, lambda load: LoadItems(load, log.id, seqs), lambda event: returned_loaded(state, log, event))
    if log.loading or log.window_end >= log.submitted or log.rereading:
        return
    size, limit = state.settings.window_items, 0
    if log.window < size // 2:
        limit = free_rows(state, log)
    elif log.window < state.settings.window_items_max and (all_blocked(log) or starves(state, log)):
        limit = min(size, state.settings.window_items_max - log.window)
    if limit > 0:
        max_bytes = max(1 << 20, state.settings.window_bytes - log.window_bytes)
        submitted = log.submitted
        log.loading = state.ask(
            log,
            lambda load: LoadPending(load, log.id, log.window_end, limit, max_bytes),
            lambda event: pending_loaded(state, log, event, submitted),
        )


def all_blocked(log: Log) -> bool:
    """Return whether everything in the window waits for a lane or a chain, so that only later rows could run."""
    heaps = log.run.index.ready.values()
    return log.window > 0 and not any(entry[-1].log is log for heap in heaps for entry in heap)


def starves(state: State, log: Log) -> bool:
    """Return whether an idle worker could take items of the run, but none of those in the window."""
    every = log.run.requirements.values()
    if len(every) < 2 or log.window_bytes >= state.settings.window_bytes:
        return False
    here = [some for some, heap in log.run.index.ready.items() if any(entry[-1].log is log for entry in heap)]
    return any(
        idle(worker) and any(fits(worker, some) for some in every) and not any(fits(worker, some) for some in here)
        for worker in state.ready.values()
    )


def returned_loaded(state: State, log: Log, event: Loaded) -> None:
    """Add items that are pending again."""
    for item in event.items:
        history = log.loading_returned.pop(item.seq, None)
        if history is not None and item.seq not in log.flight and not is_accepted(log, item.seq):
            admit(state, log, item, history)
    state.effects.window[log.id] = log


def pending_loaded(state: State, log: Log, event: Loaded, submitted: int) -> None:
    """Add the next rows of the log. `submitted` is the number it had when they were requested."""
    if log.loading != event.load_id:
        return
    log.loading = 0
    fresh: list[PendingItem] = []
    for item in event.items:
        seq = item.seq
        if seq < log.window_end or seq in log.flight or seq in log.loaded_ahead or is_accepted(log, seq):
            continue
        if item.attempts or item.not_before_ms:
            history = History(
                item.attempts, item.failures, item.losses, not_before(state, item), "", item.failed_on, item.failed_by
            )
            admit(state, log, item, history)
        else:
            fresh.append(item)
    if event.end:  # the read may have seen rows that were submitted after it was asked for
        log.window_end = max(log.window_end, submitted, event.items[-1].seq + 1 if event.items else 0)
    else:
        log.window_end = max(log.window_end, event.next_seq)
    if log.loaded_ahead:
        log.loaded_ahead = {seq for seq in log.loaded_ahead if seq >= log.window_end}
    for spec, group in groupby(fresh, key=lambda item: item.spec):
        rows = list(group)
        place(state, log, spec, [i.seq for i in rows], [i.id for i in rows], [i.payload for i in rows])
    state.effects.window[log.id] = log


def not_before(state: State, item: PendingItem) -> float:
    """Return when a loaded row may be retried. The row has a time of the wall clock, which may have jumped since or be
    another host's; so it never waits for longer than its delay."""
    return state.now.mono + min(max(0, item.not_before_ms - state.now.wall_ms), item.delay_ms) / 1000


def place(state: State, log: Log, spec: int, seqs: list[int], ids: list[bytes], payloads: list[Blob]) -> None:
    """Add items never tried before to the window, unless a policy already decided about them."""
    if log.closed:
        return
    verdict = verdict_on(log, spec)
    if verdict is None:
        add_fresh(state, log, spec, seqs, ids, payloads)
    else:
        close_pending(state, log, spec, seqs, *verdict)


def admit(state: State, log: Log, item: PendingItem, history: History) -> None:
    """Add an item that was tried before to the window, unless a policy already decided about it."""
    if log.closed:
        return
    verdict = verdict_on(log, item.spec)
    if verdict is not None:
        arrived(state, history)
        count_over(log, history.failed_by, 1)
        close_pending(state, log, item.spec, [item.seq], *verdict)
    elif history.not_before > state.now.mono:
        log.loaded_ahead.add(item.seq)
        put_back(state, log, item.seq, history)
    else:
        add_tried(state, log, item.spec, item.seq, item.id, item.payload, history)
