"""The bounded window of pending items over the ledger.

Fresh items go straight into memory while there is room and nothing before them is on disk only; the rest are counted
and read back by LoadPending. Items that are pending again had their payloads given up and come back by LoadItems.
"""

from __future__ import annotations

import heapq
from itertools import groupby

from rollout.model.item import Blob, Failure, ItemSpec, Outcome

from rollout_coordinator.core.capacity import fits, idle
from rollout_coordinator.core.events import Loaded, PendingItem
from rollout_coordinator.core.state import Chain, Chunk, History, LoadNote, Log, SpecQueue, State
from rollout_coordinator.core.step import LoadItems, LoadPending

RELOAD = 1024  # re-pended rows read back at once, at most


def queue_of(state: State, log: Log, spec: int) -> SpecQueue:
    queue = log.queues.get(spec)
    if queue is None:
        info = log.run.specs[spec]
        chain = chain_of(log, info.spec.chain) if info.spec.chain else None
        queue = log.queues[spec] = SpecQueue(log, info, chain)
    return queue


def chain_of(log: Log, name: str) -> Chain:
    chain = log.chains.get(name)
    if chain is None:
        chain = log.chains[name] = Chain(name, known=not log.extra.get("replayed"))
    return chain


def enqueue(queue: SpecQueue) -> None:
    """Let dispatch see the queue, once."""
    if not queue.queued and queue.size:
        queue.queued = True
        heapq.heappush(queue.info.requirements.heap, key_of(queue))
    if queue.place is None and queue.info.requirements.locality is not None:
        index_queue(queue)


def key_of(queue: SpecQueue) -> tuple[int, int, int, int, SpecQueue]:
    return (-queue.info.spec.priority, queue.log.rank, queue.head(), queue.info.index, queue)


def index_queue(queue: SpecQueue) -> None:
    """Where prefer.py finds the queue. One that may have to be blocked is served in the order of the schedule only."""
    locality, info, run = queue.info.requirements.locality, queue.info, queue.log.run
    if locality is None or not queue.size or queue.chain is not None or info.lane.cap or info.spec.not_before_ms:
        return
    if run.tracked and queue.log.parent is None:
        return
    place = queue.place = run.warm.get(info.spec.affinity, "") if info.spec.affinity else ""
    locality.costs.add(info.spec.cost)
    heap = locality.homes.setdefault(place, {}).setdefault(info.spec.cost, [])
    locality.entries += 1
    heapq.heappush(heap, (queue.head(), locality.entries, queue))


def unblock(blocked: list[SpecQueue]) -> None:
    """What blocked these queues is gone, or may be."""
    for queue in blocked:
        queue.queued = False
        enqueue(queue)
    blocked.clear()


def count(log: Log, n: int, size: int) -> None:
    """So many items and bytes more are pending in memory."""
    log.window += n
    log.window_bytes += size
    log.run.window += n


def add_fresh(state: State, log: Log, spec: int, seqs: list[int], ids: list[bytes], payloads: list[Blob]) -> None:
    """Items never tried before, all of one spec, into the window."""
    queue = queue_of(state, log, spec)
    queue.chunks.append(Chunk(seqs, ids, payloads))
    n = len(seqs)
    queue.size += n
    count(log, n, sum(map(len, payloads)))
    if queue.chain is not None:
        for seq in seqs:
            heapq.heappush(queue.chain.members, seq)
        unblock(queue.chain.blocked)
    enqueue(queue)
    state.dirty = True


def add_tried(state: State, log: Log, spec: int, seq: int, item: bytes, payload: Blob, history: History) -> None:
    queue = queue_of(state, log, spec)
    heapq.heappush(queue.retry, (seq, item, payload, history))
    queue.size += 1
    count(log, 1, len(payload))
    unblock(log.blocked)  # its queue may be blocked for a head far behind this item
    if queue.chain is not None:
        heapq.heappush(queue.chain.members, seq)
        unblock(queue.chain.blocked)
    enqueue(queue)
    state.dirty = True


def arrived_at_thief(state: State, history: History) -> None:
    """A stolen item is given to somebody, or never will be: its thief waits for it no longer."""
    thief = state.workers.get(history.to) if history.to else None
    if thief is not None and thief.incoming:
        thief.incoming -= 1


def room(state: State, log: Log) -> int:
    return 0 if log.window_bytes >= state.settings.window_bytes else state.settings.window_items - log.window


def refill(state: State, log: Log) -> None:
    """Ask the ledger for more, if the window wants it."""
    run = log.run
    if log.closed or not run.specs or run.state.value != "running":
        return
    if log.returned and len(log.loading_returned) < RELOAD:
        seqs = heapq.nsmallest(RELOAD - len(log.loading_returned), log.returned)
        for seq in seqs:
            log.loading_returned[seq] = log.returned.pop(seq)
        load = note_load(state, "items", log)
        state.step.loads.append(LoadItems(load, log.id, seqs))
    if log.loading or log.window_end >= log.submitted or log.rereading:
        return
    size, limit = state.settings.window_items, 0
    if log.window < size // 2:
        limit = room(state, log)
    elif log.window < state.settings.window_items_max and (all_blocked(log) or starves(state, log)):
        limit = min(size, state.settings.window_items_max - log.window)
    if limit > 0:
        log.loading = note_load(state, "pending", log)
        state.step.loads.append(
            LoadPending(
                log.loading, log.id, log.window_end, limit, max(1 << 20, state.settings.window_bytes - log.window_bytes)
            )
        )


def all_blocked(log: Log) -> bool:
    """Everything in the window waits for a lane or a chain: only rows beyond it could run."""
    heaps = [requirements.heap for requirements in log.run.requirements.values()]
    return log.window > 0 and not any(entry[-1].log is log for heap in heaps for entry in heap)


def starves(state: State, log: Log) -> bool:
    """A worker idles that could take items of the run, and none of those in the window."""
    every = log.run.requirements.values()
    if len(every) < 2 or log.window_bytes >= state.settings.window_bytes:
        return False
    here = [requirements for requirements in every if any(entry[-1].log is log for entry in requirements.heap)]
    return any(
        idle(worker) and any(fits(worker, some) for some in every) and not any(fits(worker, some) for some in here)
        for worker in state.asking.values()
    )


def note_load(state: State, kind: str, log: Log) -> int:
    load, state.next_load = state.next_load, state.next_load + 1
    state.loads[load] = LoadNote(kind, log.id, lambda: None, log.submitted)
    return load


def loaded(state: State, event: Loaded) -> None:
    note = state.loads.pop(event.load_id, None)
    log = state.logs.get(event.log)
    if note is None or log is None:
        return
    if note.kind == "call":
        note.call(event)
        return
    if note.kind == "items":
        for item in event.items:
            history = log.loading_returned.pop(item.seq, None)
            if history is not None and item.seq not in log.flight and not is_accepted(log, item.seq):
                admit(state, log, item, history)
        state.window_dirty[log.id] = log
        return
    if log.loading != event.load_id:
        return
    log.loading = 0
    fresh: list[PendingItem] = []
    for item in event.items:
        seq = item.seq
        if seq < log.window_end or seq in log.flight or seq in log.loaded_ahead or is_accepted(log, seq):
            continue
        if item.attempts or item.not_before_ms:
            admit(state, log, item, History(item.attempts, item.failures, item.losses, not_before(state, log, item)))
        else:
            fresh.append(item)
    if event.end:  # the read may have seen rows that were submitted after it was asked for
        log.window_end = max(log.window_end, note.submitted, event.items[-1].seq + 1 if event.items else 0)
    else:
        log.window_end = max(log.window_end, event.next_seq)
    if log.loaded_ahead:
        log.loaded_ahead = {seq for seq in log.loaded_ahead if seq >= log.window_end}
    for spec, group in groupby(fresh, key=lambda item: item.spec):
        items = list(group)
        place(state, log, spec, [i.seq for i in items], [i.id for i in items], [i.payload for i in items])
    state.window_dirty[log.id] = log


def longest_backoff_ms(state: State, spec: ItemSpec, failures: int) -> int:
    """Before its jitter: the delay of a retry after one failure more than `failures`."""
    return int(min(spec.retry_backoff_ms * 2 ** min(failures, 30), state.settings.retry_backoff_cap * 1000))


def not_before(state: State, log: Log, item: PendingItem) -> float:
    """When a row that is read may be tried again. It has a time of the wall clock, which may have jumped since (or was
    another host's): it never waits for longer than its delay was."""
    rest = max(0, item.not_before_ms - state.now.wall_ms)
    longest = longest_backoff_ms(state, log.run.specs[item.spec].spec, max(0, item.failures - 1))
    return state.now.mono + min(rest, longest) / 1000


def is_accepted(log: Log, seq: int) -> bool:
    return seq in log.accepted or (seq < log.cursor and not log.by_arrival)


def place(state: State, log: Log, spec: int, seqs: list[int], ids: list[bytes], payloads: list[Blob]) -> None:
    """Into the window, unless a policy already verdict_on about them."""
    verdict = verdict_on(log, spec)
    if log.closed:
        return
    if verdict is None:
        add_fresh(state, log, spec, seqs, ids, payloads)
    else:
        from rollout_coordinator.core.commit import close_pending

        close_pending(state, log, spec, seqs, *verdict)


def admit(state: State, log: Log, item: PendingItem, history: History) -> None:
    verdict = verdict_on(log, item.spec)
    if log.closed:
        return
    if verdict is not None:
        arrived_at_thief(state, history)
        from rollout_coordinator.core.commit import close_pending

        close_pending(state, log, item.spec, [item.seq], *verdict)
    elif history.not_before > state.now.mono:
        from rollout_coordinator.core.attempts import repend

        log.loaded_ahead.add(item.seq)
        repend(state, log, item.seq, history)
    else:
        add_tried(state, log, item.spec, item.seq, item.id, item.payload, history)


def verdict_on(log: Log, spec: int) -> tuple[Outcome, Failure] | None:
    """How items of this spec end without running: their lane is pruned, or their group is won."""
    info = log.run.specs[spec]
    if info.lane.pruned_at >= 0:
        lane = info.lane
        return Outcome.SKIPPED, Failure("lane_pruned", f"lane {lane.name!r} was pruned at {lane.pruned_at}", False)
    winner = log.groups.get(info.spec.group) if info.spec.group else None
    if winner is not None:
        return Outcome.CANCELLED, Failure("group_won", f"group {info.spec.group!r} was won by seq {winner}", False)
    return None


def drop_window(state: State, log: Log) -> None:
    """Forget pending items; the ledger has them."""
    for history in (*log.returned.values(), *log.loading_returned.values()):
        arrived_at_thief(state, history)
    for queue in log.queues.values():
        for entry in queue.retry:
            arrived_at_thief(state, entry[3])
        queue.chunks.clear()
        queue.retry.clear()
        queue.size = 0
    count(log, -log.window, -log.window_bytes)
    log.returned.clear()
    log.loading_returned.clear()
    log.loaded_ahead.clear()
    log.loading = 0


def fire_timers(state: State) -> None:
    """Retries whose delay is over are pending again; queues blocked for their items' `not_before` are seen again, and
    chains whose worker did not come in time."""
    while state.timers and state.timers[0][0] <= state.now.wall_ms:
        _, _, log_id, queue = heapq.heappop(state.timers)
        log = state.logs.get(log_id)
        if log is not None and not log.closed:
            unblock([queue])
            state.dirty = True
    while state.retries and state.retries[0][0] <= state.now.mono:
        _, _, log_id, (seq, history) = heapq.heappop(state.retries)
        log = state.logs.get(log_id)
        if log is not None and not log.closed:
            log.returned[seq] = history
            state.window_dirty[log.id] = log
            state.dirty = True
    if state.chains_due <= state.now.mono:
        state.dirty = True
    elif state.chains_due != float("inf"):
        state.wake_by(state.chains_due)
    if state.retries:
        state.wake_by(state.retries[0][0])
    if state.timers:
        state.wake_by(state.now.mono + max(0.001, (state.timers[0][0] - state.now.wall_ms) / 1000))
