"""Which queue a worker is served from, where items with equal requirements differ: long ones early, a prefix together.

Order is the schedule's, but for two wishes. An item of higher `cost` is begun before others, so that none of the long
ones is left to run alone at the end. Items of one `affinity` go to the worker that had the last of them, which goes on
with them before it turns to others. No wish lets an item be overtaken by one more than `reorder_items` behind it, and
no worker is left without work for one: what remains in the order of the schedule is for whoever asks.
"""

from __future__ import annotations

import heapq
from bisect import bisect_right

from rollout_coordinator.core.queues import index_queue, key_of
from rollout_coordinator.core.state import ROOT_RANK, Entry, Locality, Requirements, Run, SpecQueue, State, Worker

HOMES_MAX = 64  # places of workers that are gone which are remembered


def track_locality(run: Run, requirements: Requirements) -> None:
    """From now on items with these requirements differ: what is pending already is looked at as well."""
    if requirements.locality is None:
        requirements.locality = Locality()
        for log in run.logs.values():
            for queue in log.all_queues():
                index_queue(queue)


def eldest(requirements: Requirements) -> SpecQueue | None:
    """The queue whose head comes first in the schedule. Entries that are out of date are put right on the way."""
    heap = requirements.heap
    while heap:
        queue = heap[0][-1]
        if not queue.size or queue.log.closed:
            heapq.heappop(heap)
            queue.queued = False
        elif heap[0][2] != queue.head():
            heapq.heapreplace(heap, (*heap[0][:2], queue.head(), *heap[0][3:]))
        else:
            return queue
    return None


def choose(requirements: Requirements, worker: Worker, limit: int) -> SpecQueue | None:
    """The queue to serve this worker from, still in the heap; None: the first in the order of the schedule."""
    locality = requirements.locality
    if locality is None or not requirements.heap:
        return None
    top = requirements.heap[0]
    for cost in sorted(locality.costs, reverse=True):
        for queue in (
            going_on(locality, cost, worker),
            head_of(locality.homes.get(worker.id, {}).get(cost), worker.id),
            head_of(locality.homes.get("", {}).get(cost), ""),
        ):
            if queue is not None and queue.head() <= limit and key_of(queue)[:2] == top[:2] and free(queue, worker):
                return queue
    return None


def within(queue: SpecQueue, limit: int) -> int:
    """How many items from its head on are not beyond `limit`; at least the head."""
    if not queue.chunks:
        return 1
    chunk = queue.chunks[0]
    return max(1, bisect_right(chunk.seqs, limit, chunk.pos) - chunk.pos)


def going_on(locality: Locality, cost: int, worker: Worker) -> SpecQueue | None:
    """What the worker was given last."""
    queue = locality.last.get(worker.id)
    if queue is None or queue.info.spec.cost != cost or not queue.size or queue.log.closed:
        return None
    return queue if home_of(queue) == worker.id else None


def limit_of_order(state: State, requirements: Requirements, first_aside: int) -> int:
    """The last seq that may be begun before what comes first, be that set aside for another worker."""
    locality, first = requirements.locality, eldest(requirements)
    if locality is not None and len(locality.homes) > HOMES_MAX + len(state.workers):
        locality.homes = {name: heaps for name, heaps in locality.homes.items() if not name or name in state.workers}
        locality.last = {name: queue for name, queue in locality.last.items() if name in state.workers}
    head = min(first_aside, first.head()) if first else first_aside
    return (head if head < ROOT_RANK else 0) + state.settings.reorder_items


def head_of(heap: list[Entry] | None, place: str) -> SpecQueue | None:
    while heap:
        queue = heap[0][-1]
        if queue.place != place:
            heapq.heappop(heap)
        elif not queue.size or queue.log.closed:
            heapq.heappop(heap)
            queue.place = None
        elif home_of(queue) != place:
            heapq.heappop(heap)
            queue.place = None
            index_queue(queue)
        elif heap[0][0] != queue.head():
            heapq.heapreplace(heap, (queue.head(), heap[0][1], queue))
        else:
            return queue
    return None


def home_of(queue: SpecQueue) -> str:
    affinity = queue.info.spec.affinity
    return queue.log.run.warm.get(affinity, "") if affinity else ""


def free(queue: SpecQueue, worker: Worker) -> bool:
    """Nothing speaks against its head going to the worker: it was not stolen for another nor failed here, no horizon is
    near."""
    if queue.avoid_worker == worker.id or (queue.log.run.tracked and queue.log.parent is None):
        return False
    if not queue.retry or queue.retry[0][0] != queue.head():
        return True
    return queue.retry[0][3].to in ("", worker.id)


def note_served(queue: SpecQueue, worker: Worker) -> None:
    """The worker got items of it: their prefix is warm there."""
    affinity, locality = queue.info.spec.affinity, queue.info.requirements.locality
    if not affinity:
        return
    queue.log.run.warm[affinity] = worker.id
    if locality is not None:
        locality.last[worker.id] = queue
        if queue.place != worker.id:
            queue.place = None
            index_queue(queue)
