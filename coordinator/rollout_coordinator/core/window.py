"""The bounded window of pending items over the ledger.

Fresh items go straight into memory while there is room and nothing before them is on disk only; the rest are counted
and read back by LoadPending. Items that are pending again had their payloads given up and come back by LoadItems.
"""

from __future__ import annotations

import heapq
from itertools import groupby

from rollout.model.item import Blob, Failure, ItemSpec, Outcome

from rollout_coordinator.core.events import Loaded, PendingItem
from rollout_coordinator.core.state import Chain, Chunk, History, LoadNote, Log, SpecQueue, State
from rollout_coordinator.core.step import LoadItems, LoadPending

RELOAD = 1024  # re-pended rows read back at once, at most


def queue_of(c: State, log: Log, spec: int) -> SpecQueue:
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


def enlist(queue: SpecQueue) -> None:
    """Let dispatch see the queue, once."""
    if not queue.queued and queue.size:
        queue.queued = True
        heapq.heappush(queue.info.shape.heap, key_of(queue))
    if queue.place is None and queue.info.shape.prefs is not None:
        index_queue(queue)


def key_of(queue: SpecQueue) -> tuple[int, int, int, int, SpecQueue]:
    return (-queue.info.spec.priority, queue.log.rank, queue.head(), queue.info.index, queue)


def index_queue(queue: SpecQueue) -> None:
    """Where prefer.py finds the queue. One that may have to be parked is served in the order of the schedule only."""
    prefs, info, run = queue.info.shape.prefs, queue.info, queue.log.run
    if prefs is None or not queue.size or queue.chain is not None or info.lane.cap or info.spec.not_before_ms:
        return
    if run.tracked and queue.log.parent is None:
        return
    place = queue.place = run.warm.get(info.spec.affinity, "") if info.spec.affinity else ""
    prefs.costs.add(info.spec.cost)
    heap = prefs.homes.setdefault(place, {}).setdefault(info.spec.cost, [])
    prefs.entries += 1
    heapq.heappush(heap, (queue.head(), prefs.entries, queue))


def unpark(parked: list[SpecQueue]) -> None:
    """What blocked these queues is gone, or may be."""
    for queue in parked:
        queue.queued = False
        enlist(queue)
    parked.clear()


def count(log: Log, n: int, size: int) -> None:
    """So many items and bytes more are pending in memory."""
    log.window += n
    log.window_bytes += size
    log.run.window += n


def add_fresh(c: State, log: Log, spec: int, seqs: list[int], ids: list[bytes], payloads: list[Blob]) -> None:
    """Items never tried before, all of one spec, into the window."""
    queue = queue_of(c, log, spec)
    queue.chunks.append(Chunk(seqs, ids, payloads))
    n = len(seqs)
    queue.size += n
    count(log, n, sum(map(len, payloads)))
    if queue.chain is not None:
        for seq in seqs:
            heapq.heappush(queue.chain.members, seq)
        unpark(queue.chain.parked)
    enlist(queue)
    c.dirty = True


def add_tried(c: State, log: Log, spec: int, seq: int, item: bytes, payload: Blob, history: History) -> None:
    queue = queue_of(c, log, spec)
    heapq.heappush(queue.retry, (seq, item, payload, history))
    queue.size += 1
    count(log, 1, len(payload))
    unpark(log.parked)  # its queue may be parked for a head far behind this item
    if queue.chain is not None:
        heapq.heappush(queue.chain.members, seq)
        unpark(queue.chain.parked)
    enlist(queue)
    c.dirty = True


def landed(c: State, history: History) -> None:
    """A stolen item is given to somebody, or never will be: its thief waits for it no longer."""
    thief = c.workers.get(history.to) if history.to else None
    if thief is not None and thief.incoming:
        thief.incoming -= 1


def room(c: State, log: Log) -> int:
    return 0 if log.window_bytes >= c.settings.window_bytes else c.settings.window_items - log.window


def refill(c: State, log: Log) -> None:
    """Ask the ledger for more, if the window wants it."""
    run = log.run
    if log.closed or not run.specs or run.state.value != "running":
        return
    if log.back and len(log.loading_back) < RELOAD:
        seqs = heapq.nsmallest(RELOAD - len(log.loading_back), log.back)
        for seq in seqs:
            log.loading_back[seq] = log.back.pop(seq)
        load = note_load(c, "items", log)
        c.step.loads.append(LoadItems(load, log.id, seqs))
    if log.loading or log.tail >= log.submitted or log.rereading:
        return
    size, limit = c.settings.window_items, 0
    if log.window < size // 2:
        limit = room(c, log)
    elif blocked(log) and log.window < c.settings.window_items_max:
        limit = min(size, c.settings.window_items_max - log.window)
    if limit > 0:
        log.loading = note_load(c, "pending", log)
        c.step.loads.append(
            LoadPending(log.loading, log.id, log.tail, limit, max(1 << 20, c.settings.window_bytes - log.window_bytes))
        )


def blocked(log: Log) -> bool:
    """Everything in the window waits for a lane or a chain: only rows beyond it could run."""
    heaps = [shape.heap for shape in log.run.shapes.values()]
    return log.window > 0 and not any(entry[-1].log is log for heap in heaps for entry in heap)


def note_load(c: State, kind: str, log: Log) -> int:
    load, c.next_load = c.next_load, c.next_load + 1
    c.loads[load] = LoadNote(kind, log.id, lambda: None, log.submitted)
    return load


def loaded(c: State, event: Loaded) -> None:
    note = c.loads.pop(event.load_id, None)
    log = c.logs.get(event.log)
    if note is None or log is None:
        return
    if note.kind == "call":
        note.call(event)
        return
    if note.kind == "items":
        for item in event.items:
            history = log.loading_back.pop(item.seq, None)
            if history is not None and item.seq not in log.flight and not is_accepted(log, item.seq):
                admit(c, log, item, history)
        c.window_dirty[log.id] = log
        return
    if log.loading != event.load_id:
        return
    log.loading = 0
    fresh: list[PendingItem] = []
    for item in event.items:
        seq = item.seq
        if seq < log.tail or seq in log.flight or seq in log.ahead or is_accepted(log, seq):
            continue
        if item.attempts or item.not_before_ms:
            admit(c, log, item, History(item.attempts, item.failures, item.losses, not_before(c, log, item)))
        else:
            fresh.append(item)
    if event.end:  # the read may have seen rows that were submitted after it was asked for
        log.tail = max(log.tail, note.submitted, event.items[-1].seq + 1 if event.items else 0)
    else:
        log.tail = max(log.tail, event.next_seq)
    if log.ahead:
        log.ahead = {seq for seq in log.ahead if seq >= log.tail}
    for spec, group in groupby(fresh, key=lambda item: item.spec):
        items = list(group)
        place(c, log, spec, [i.seq for i in items], [i.id for i in items], [i.payload for i in items])
    c.window_dirty[log.id] = log


def longest_backoff_ms(c: State, spec: ItemSpec, failures: int) -> int:
    """Before its jitter: the delay of a retry after one failure more than `failures`."""
    return int(min(spec.retry_backoff_ms * 2 ** min(failures, 30), c.settings.retry_backoff_cap * 1000))


def not_before(c: State, log: Log, item: PendingItem) -> float:
    """When a row that is read may be tried again. It has a time of the wall clock, which may have jumped since (or was
    another host's): it never waits for longer than its delay was."""
    rest = max(0, item.not_before_ms - c.now.wall_ms)
    longest = longest_backoff_ms(c, log.run.specs[item.spec].spec, max(0, item.failures - 1))
    return c.now.mono + min(rest, longest) / 1000


def is_accepted(log: Log, seq: int) -> bool:
    return seq in log.accepted or (seq < log.cursor and not log.by_arrival)


def place(c: State, log: Log, spec: int, seqs: list[int], ids: list[bytes], payloads: list[Blob]) -> None:
    """Into the window, unless a policy already decided about them."""
    verdict = decided(log, spec)
    if log.closed:
        return
    if verdict is None:
        add_fresh(c, log, spec, seqs, ids, payloads)
    else:
        from rollout_coordinator.core.commit import close_pending

        close_pending(c, log, spec, seqs, *verdict)


def admit(c: State, log: Log, item: PendingItem, history: History) -> None:
    verdict = decided(log, item.spec)
    if log.closed:
        return
    if verdict is not None:
        landed(c, history)
        from rollout_coordinator.core.commit import close_pending

        close_pending(c, log, item.spec, [item.seq], *verdict)
    elif history.not_before > c.now.mono:
        from rollout_coordinator.core.attempts import repend

        log.ahead.add(item.seq)
        repend(c, log, item.seq, history)
    else:
        add_tried(c, log, item.spec, item.seq, item.id, item.payload, history)


def decided(log: Log, spec: int) -> tuple[Outcome, Failure] | None:
    """How items of this spec end without running: their lane is pruned, or their group is won."""
    info = log.run.specs[spec]
    if info.lane.pruned_at >= 0:
        lane = info.lane
        return Outcome.SKIPPED, Failure("lane_pruned", f"lane {lane.name!r} was pruned at {lane.pruned_at}", False)
    winner = log.groups.get(info.spec.group) if info.spec.group else None
    if winner is not None:
        return Outcome.CANCELLED, Failure("group_won", f"group {info.spec.group!r} was won by seq {winner}", False)
    return None


def drop_window(c: State, log: Log) -> None:
    """Forget pending items; the ledger has them."""
    for history in (*log.back.values(), *log.loading_back.values()):
        landed(c, history)
    for queue in log.queues.values():
        for entry in queue.retry:
            landed(c, entry[3])
        queue.chunks.clear()
        queue.retry.clear()
        queue.size = 0
    count(log, -log.window, -log.window_bytes)
    log.back.clear()
    log.loading_back.clear()
    log.ahead.clear()
    log.loading = 0


def fire_timers(c: State) -> None:
    """Retries whose delay is over are pending again; queues parked for their items' `not_before` are seen again."""
    while c.timers and c.timers[0][0] <= c.now.wall_ms:
        _, _, log_id, queue = heapq.heappop(c.timers)
        log = c.logs.get(log_id)
        if log is not None and not log.closed:
            unpark([queue])
            c.dirty = True
    while c.retries and c.retries[0][0] <= c.now.mono:
        _, _, log_id, (seq, history) = heapq.heappop(c.retries)
        log = c.logs.get(log_id)
        if log is not None and not log.closed:
            log.back[seq] = history
            c.window_dirty[log.id] = log
            c.dirty = True
    if c.retries:
        c.wake_by(c.retries[0][0])
    if c.timers:
        c.wake_by(c.now.mono + max(0.001, (c.timers[0][0] - c.now.wall_ms) / 1000))
