"""Chains: items of one log that run one at a time, in order, each with the result of the one before.

The predecessor of an item is the last item of its chain that is DONE. A failed item passes its own predecessor on, and
the worker can see the gap by the sequence number. A pipelined item may go to the worker that still runs its
predecessor; it is dropped when that attempt ends with anything but a DONE result.
"""

from __future__ import annotations

import heapq

from rollout.model.item import Blob, Outcome

from rollout_coordinator.core import index
from rollout_coordinator.core.capacity import ASIDE, Verdict, fits
from rollout_coordinator.core.events import ResultsLoaded
from rollout_coordinator.core.items import is_accepted
from rollout_coordinator.core.queues import chain_of
from rollout_coordinator.core.state import AttemptBatch, Chain, Log, SpecQueue, State, Worker
from rollout_coordinator.core.step import LoadResults

LOOK_BACK = 1024  # results read at once to find a chain's last one after a replay


def attempts_ended(state: State, batch: AttemptBatch, seqs: list[int]) -> None:
    """Free the chains of these attempts."""
    chain = chain_of(batch.log, batch.info.spec.chain)
    for seq in seqs:
        chain.flying.pop(seq, None)
    chain.last_worker = batch.worker.id
    chain.free_at = state.now.mono
    index.release(batch.log.run.index, chain)


def next_open(log: Log, chain: Chain) -> int | None:
    """Return the first member that is neither accepted nor in flight."""
    members = chain.members
    while members and is_accepted(log, members[0]):
        heapq.heappop(members)
    if not members:
        return None
    if not chain.flying:
        return members[0]
    rest = [seq for seq in members if seq not in chain.flying and not is_accepted(log, seq)]
    return min(rest) if rest else None


def waits_for_earlier(queue: SpecQueue) -> bool:
    """Return whether an earlier item of its chain has no result."""
    if queue.chain is None:
        return False
    head = queue.head()
    return any(seq < head and not is_accepted(queue.log, seq) for seq in queue.chain.members)


def may_run(state: State, queue: SpecQueue, worker: Worker) -> Verdict:
    """Return the verdict on the head of the queue."""
    chain, log, spec = queue.chain, queue.log, queue.info.spec
    assert chain is not None
    # One that is exclusive and dropped might not have stopped yet.
    if chain.flying and (not spec.pipelined or spec.exclusive or len(chain.flying) > 1):
        return Verdict(0, chain)
    if next_open(log, chain) != queue.head():
        return Verdict(0, chain)
    if chain.flying:
        seq, batch = next(iter(chain.flying.items()))
        return Verdict(1) if seq < queue.head() and batch.worker is worker else ASIDE
    if not chain.known:
        look_back(state, log, chain, queue.head())
        if not chain.known:
            return Verdict(0, chain)
    if chain.last_worker and chain.last_worker not in (worker.id, queue.avoid_worker):
        last = state.workers.get(chain.last_worker)
        until = chain.free_at + state.settings.chain_grace
        here = last is not None and last.session and last.state.value == "ready" and fits(last, queue.info.requirements)
        if here and state.now.mono < until:
            state.defer_until = min(state.defer_until, until)
            state.wake_by(until)
            return ASIDE
    return Verdict(1)


def predecessor(queue: SpecQueue) -> tuple[int, int, Blob] | None:
    """Return (seq, attempt, data) of the head's predecessor; without data if pipelined, because the worker has or will
    have it."""
    chain = queue.chain
    assert chain is not None
    if chain.flying:
        seq, batch = next(iter(chain.flying.items()))
        return seq, batch.attempt, b""
    return chain.last_done


def item_done(batch: AttemptBatch, seq: int, data: Blob) -> None:
    """Pass this result to the chain's next item."""
    chain = chain_of(batch.log, batch.info.spec.chain)
    if chain.last_done is None or chain.last_done[0] < seq:
        chain.last_done = (seq, batch.attempt, data)


def predecessor_committed(log: Log, batch: AttemptBatch) -> bool:
    """Return whether the predecessor of a pipelined attempt is final."""
    last = chain_of(log, batch.info.spec.chain).last_done
    return last is not None and last[:2] == batch.predecessor


def dependents(batch: AttemptBatch, seq: int) -> list[tuple[int, AttemptBatch]]:
    """Return (seq, batch) of attempts that build on this one."""
    chain = chain_of(batch.log, batch.info.spec.chain)
    return [(later, other) for later, other in chain.flying.items() if other.predecessor == (seq, batch.attempt)]


def resume_chains(log: Log) -> None:
    """Restore the chains from what is in flight, of an earlier leader or from before its run ended."""
    for seq, batch in sorted(log.flight.items()):
        if batch.info.spec.chain:
            chain = chain_of(log, batch.info.spec.chain)
            for before, other in chain.flying.items():
                batch.predecessor = (before, other.attempt)
            heapq.heappush(chain.members, seq)
            chain.flying[seq] = batch


def look_back(state: State, log: Log, chain: Chain, before: int) -> None:
    """Find the chain's last result after a replay, page by page, newest first."""
    if chain.looking_back:
        return
    if before <= 0:
        chain.known = True
        return
    chain.looking_back = True
    first = max(0, before - LOOK_BACK)

    def found(event: ResultsLoaded) -> None:
        chain.looking_back = False
        for i in range(len(event.seq) - 1, -1, -1):
            spec = log.run.specs[event.spec[i]].spec
            if spec.chain == chain.name and event.outcome[i] is Outcome.DONE:
                if chain.last_done is None or chain.last_done[0] < event.seq[i]:
                    chain.last_done = (event.seq[i], event.attempt[i], event.data[i])
                chain.known = True
                break
        else:
            look_back(state, log, chain, first)
        if chain.known:
            index.release(log.run.index, chain)
            state.effects.dispatch = True

    state.ask(log, lambda load: LoadResults(load, log.id, first, before - first, True), found)
