"""Pending items in memory: a queue for each log and spec. `index.py` decides where dispatch finds it."""

from __future__ import annotations

import heapq

from rollout.model.item import Blob

from rollout_coordinator.core import index
from rollout_coordinator.core.state import NEVER, Chain, Chunk, History, Log, SpecQueue, State


def queue_of(log: Log, spec: int, avoid_worker: str = "") -> SpecQueue:
    """Return the queue. Items that failed last on `avoid_worker` have their own, so that this worker takes others."""
    of_spec = log.queues.get(spec)
    if of_spec is None:
        of_spec = log.queues[spec] = {}
    queue = of_spec.get(avoid_worker)
    if queue is None:
        info = log.run.specs[spec]
        chain = chain_of(log, info.spec.chain) if info.spec.chain else None
        queue = of_spec[avoid_worker] = SpecQueue(log, info, chain, avoid_worker=avoid_worker)
    return queue


def chain_of(log: Log, name: str) -> Chain:
    chain = log.chains.get(name)
    if chain is None:
        chain = log.chains[name] = Chain(name, known=not log.replayed)
    return chain


# ---- items come and go


def add_fresh(state: State, log: Log, spec: int, seqs: list[int], ids: list[bytes], payloads: list[Blob]) -> None:
    """Add items that were never tried, all of one spec, ascending."""
    queue = queue_of(log, spec)
    queue.chunks.append(Chunk(seqs, ids, payloads))
    count(queue, len(seqs), sum(map(len, payloads)))
    if queue.chain is not None:
        join_chain(log, queue.chain, seqs)
    index.add(queue)
    state.effects.dispatch = True


def add_tried(state: State, log: Log, spec: int, seq: int, item: bytes, payload: Blob, history: History) -> None:
    """Add an item that was tried before."""
    queue = queue_of(log, spec, history.failed_on)
    heapq.heappush(queue.retry, (seq, item, payload, history))
    count(queue, 1, len(payload))
    index.release(log.run.index, log)  # its queue may wait for a head far behind this item
    if queue.chain is not None:
        join_chain(log, queue.chain, [seq])
    index.add(queue)
    index.settle(queue)  # its head may come before that of its entry
    state.effects.dispatch = True


def join_chain(log: Log, chain: Chain, seqs: list[int]) -> None:
    for seq in seqs:
        heapq.heappush(chain.members, seq)
    index.release(log.run.index, chain)


def count(queue: SpecQueue, n: int, size: int) -> None:
    """Count `n` more items of `size` bytes in total, or fewer if negative."""
    log = queue.log
    queue.size += n
    log.window += n
    log.window_bytes += size
    log.run.window += n


def take_all(state: State, queue: SpecQueue) -> list[int]:
    """Take every item out of the queue, and return their seqs."""
    seqs = [seq for chunk in queue.chunks for seq in chunk.seqs[chunk.pos :]]
    size = sum(len(p) for chunk in queue.chunks for p in chunk.payloads[chunk.pos :])
    for entry in queue.retry:
        arrived(state, entry[3])
    seqs += [entry[0] for entry in queue.retry]
    size += sum(len(entry[2]) for entry in queue.retry)
    queue.chunks.clear()
    queue.retry.clear()
    count(queue, -queue.size, -size)
    index.settle(queue)
    return seqs


def take_one(state: State, log: Log, seq: int) -> History | None:
    """Take a pending item out of memory, and return its history if it was tried."""
    for delayed in [retry for retry in state.retries if retry[2] == log.id and retry[3][0] == seq]:
        state.retries.remove(delayed)
        heapq.heapify(state.retries)
        return _left(state, delayed[3][1])
    history = log.returned.pop(seq, None) or log.loading_returned.pop(seq, None)
    if history is not None:
        return _left(state, history)
    for queue in log.all_queues():
        for entry in [entry for entry in queue.retry if entry[0] == seq]:
            queue.retry.remove(entry)
            heapq.heapify(queue.retry)
            count(queue, -1, -len(entry[2]))
            index.settle(queue)
            return _left(state, entry[3])
        for chunk in queue.chunks:
            if seq in chunk.seqs[chunk.pos :]:
                at = chunk.seqs.index(seq, chunk.pos)
                count(queue, -1, -len(chunk.payloads[at]))
                for column in (chunk.seqs, chunk.ids, chunk.payloads):
                    del column[at]
                if chunk.pos == len(chunk.seqs):
                    queue.chunks.remove(chunk)
                index.settle(queue)
                return None
    return None


def _left(state: State, history: History) -> History:
    arrived(state, history)
    return history


def forget_pending(state: State, log: Log) -> None:
    """Drop all pending items of the log from memory; the ledger has them."""
    for history in (*log.returned.values(), *log.loading_returned.values()):
        arrived(state, history)
    for queue in log.all_queues():
        take_all(state, queue)
    log.returned.clear()
    log.loading_returned.clear()
    log.loaded_ahead.clear()
    log.loading = 0
    for gate in (log, *log.chains.values()):
        log.run.index.waiting.pop(gate, None)
    log.chains.clear()
    log.queues.clear()
    state.timers = [timer for timer in state.timers if timer[2] != log.id]
    state.retries = [retry for retry in state.retries if retry[2] != log.id]


def arrived(state: State, history: History) -> None:
    """Stop waiting for a stolen item that is assigned, or never will be."""
    thief = state.workers.get(history.to) if history.to else None
    if thief is not None and thief.incoming:
        thief.incoming -= 1


# ---- items that are pending again


def put_back(state: State, log: Log, seq: int, history: History) -> None:
    """Make an item pending; its payload is read back when the window has room and its time has come."""
    if log.closed:
        return
    if seq >= log.window_end:
        log.loaded_ahead.add(seq)
    if history.not_before > state.now.mono:
        log.loading_returned.pop(seq, None)
        heapq.heappush(state.retries, (history.not_before, next(state.numbers), log.id, (seq, history)))
    else:
        log.returned[seq] = history
        state.effects.window[log.id] = log
    state.effects.dispatch = True


def forget_delays(state: State, log: Log) -> None:
    """Make its delayed retries pending now, because they are not to be retried."""
    mine = [retry for retry in state.retries if retry[2] == log.id]
    state.retries = [retry for retry in state.retries if retry[2] != log.id]
    heapq.heapify(state.retries)
    log.returned.update(seq_and_history for *_, seq_and_history in mine)


def fire_timers(state: State) -> None:
    """Handle timers: retries after their delay, queues whose `not_before` has come, and queues that were reserved for a
    worker that did not come in time."""
    while state.timers and state.timers[0][0] <= state.now.wall_ms:
        _, _, log_id, queue = heapq.heappop(state.timers)
        log = state.logs.get(log_id)
        if log is not None and not log.closed:
            queue.queued = False
            index.add(queue)
            state.effects.dispatch = True
    while state.retries and state.retries[0][0] <= state.now.mono:
        _, _, log_id, (seq, history) = heapq.heappop(state.retries)
        log = state.logs.get(log_id)
        if log is not None and not log.closed:
            log.returned[seq] = history
            state.effects.window[log.id] = log
            state.effects.dispatch = True
    if state.defer_until <= state.now.mono:
        state.effects.dispatch = True
    elif state.defer_until != NEVER:
        state.wake_by(state.defer_until)
    if state.retries:
        state.wake_by(state.retries[0][0])
    if state.timers:
        state.wake_by(state.now.mono + max(0.001, (state.timers[0][0] - state.now.wall_ms) / 1000))
