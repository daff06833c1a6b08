"""Index of a run's queues, with the candidates for a worker.

A queue with pending items is ready, or waits behind a gate (its lane, its chain, the commit horizon, a time) and cannot
continue, whichever worker asks, until the gate calls `release`. So a pass of dispatch costs what it assigns.

Ready queues are in schedule order, with two exceptions for items with equal requirements. An item of higher `cost`
begins before others, so that no long one is left to run alone at the end. Items of one `affinity` go to the worker that
had the last of them, which continues with them before it turns to others. Neither lets an item be overtaken by one more
than `reorder_items` behind it, and no worker is left without work for it: what remains in schedule order is for any
worker.
"""

from __future__ import annotations

import heapq
from bisect import bisect_right

from rollout_coordinator.core.capacity import UNLIMITED, strict_room, takes
from rollout_coordinator.core.state import (
    ROOT_RANK,
    Entry,
    Gate,
    Homes,
    Index,
    Requirements,
    Run,
    SpecQueue,
    State,
    Worker,
)

HOMES_MAX = 64  # homes of workers that are gone which are remembered


def add(queue: SpecQueue) -> None:
    """Make a queue with items ready, unless it waits."""
    index, requirements = queue.log.run.index, queue.info.requirements
    if not queue.queued and queue.size:
        queue.queued = True
        heapq.heappush(index.ready.setdefault(requirements, []), entry_of(queue))
    if index.homes and queue.home is None:
        _add_to_home(queue)


def entry_of(queue: SpecQueue) -> Entry:
    """Return the queue's order: by priority, children first, then by schedule."""
    return (-queue.info.spec.priority, queue.log.rank, queue.head(), queue.info.index, queue)


def wait(state: State, queue: SpecQueue, gate: Gate) -> None:
    """Let a queue, which is in no ready heap, wait until `release`."""
    queue.queued = True
    if isinstance(gate, int):
        heapq.heappush(state.timers, (gate, next(state.numbers), queue.log.id, queue))
        state.wake_by(state.now.mono + (gate - state.now.wall_ms) / 1000)
    else:
        queue.log.run.index.waiting.setdefault(gate, []).append(queue)


def release(index: Index, gate: Gate) -> None:
    """Release the queues behind a gate that has changed."""
    for queue in index.waiting.pop(gate, ()):
        queue.queued = False
        add(queue)


def settle(queue: SpecQueue) -> None:
    """Restore the exact first entry of its heap after items of the queue were taken."""
    ready, requirements = queue.log.run.index.ready, queue.info.requirements
    heap = ready.get(requirements)
    if heap is not None and _first(heap) is None:
        del ready[requirements]


def _first(heap: list[Entry] | None, home: str | None = None) -> SpecQueue | None:
    """Return the first queue of a heap, or of a home's. An entry behind it may be stale, because heads advance, queues
    run empty and prefixes become warm elsewhere; it is corrected in its turn."""
    while heap:
        entry = heap[0]
        queue = entry[-1]
        live, moved = queue.size and not queue.log.closed, home is not None and _warm_at(queue) != home
        if live and not moved and (home is None or queue.home == home):
            if entry[2] == queue.head():
                return queue
            heapq.heapreplace(heap, entry_of(queue))
            continue
        heapq.heappop(heap)
        if home is None:
            queue.queued = False
        elif queue.home == home:
            _add_to_home(queue)
    return None


# ---- homes


def tell_apart(run: Run, requirements: Requirements) -> None:
    """Distinguish items with these requirements from now on, including those already pending."""
    if requirements not in run.index.homes:
        run.index.homes[requirements] = Homes()
        for log in run.logs.values():
            for queue in log.all_queues():
                _add_to_home(queue)


def _add_to_home(queue: SpecQueue) -> None:
    """Add a queue to its home; one that may have to wait is served only in schedule order."""
    info, run = queue.info, queue.log.run
    homes, queue.home = run.index.homes.get(info.requirements), None
    if homes is None or not queue.size or queue.chain is not None or info.lane.cap or info.spec.not_before_ms:
        return
    if run.tracked and queue.log.parent is None:
        return
    queue.home = _warm_at(queue)
    homes.costs.add(info.spec.cost)
    heapq.heappush(homes.heaps.setdefault(queue.home, {}).setdefault(info.spec.cost, []), entry_of(queue))


def _warm_at(queue: SpecQueue) -> str:
    """Return the worker that has the prefix of its items, or an empty string."""
    affinity = queue.info.spec.affinity
    return queue.log.run.warm.get(affinity, "") if affinity else ""


def note_served(state: State, queue: SpecQueue, worker: Worker) -> None:
    """Record that the worker got items of the queue: their prefix is warm there."""
    affinity, homes = queue.info.spec.affinity, queue.log.run.index.homes.get(queue.info.requirements)
    if not affinity:
        return
    queue.log.run.warm[affinity] = worker.id
    if homes is not None:
        homes.last[worker.id] = queue
        if queue.home != worker.id:
            _add_to_home(queue)
        if len(homes.heaps) > HOMES_MAX + len(state.workers):
            homes.heaps = {name: heaps for name, heaps in homes.heaps.items() if not name or name in state.workers}
            homes.last = {name: queue for name, queue in homes.last.items() if name in state.workers}


# ---- candidates


class Turn:
    """One worker's turn at a run's queues: ask for a `candidate`, take items or `pass_over`, repeatedly, then `end`."""

    __slots__ = ("_aside", "_fitting", "_index", "_least_aside", "_reorder", "_soft", "_worker", "left_some")

    def __init__(self, state: State, run: Run, worker: Worker, soft: bool) -> None:
        self._index, self._worker, self._soft = run.index, worker, soft
        self._fitting = [(some, heap) for some, heap in run.index.ready.items() if takes(worker, some)]
        self._reorder = state.settings.reorder_items
        self._aside: list[SpecQueue] = []
        self._least_aside = ROOT_RANK  # of the heads of those that hold back what comes after them
        self.left_some = False  # for another worker, by preference

    def candidate(self, *, roots: bool) -> tuple[SpecQueue, int] | None:
        """Return the next queue, and how many items from its head on the schedule allows; None if nothing is left.
        `roots` includes queues of the root log."""
        while (top := self._first_fitting()) is not None:
            queue = top[-1]
            if not roots and queue.log.parent is None:
                self._remove(queue)
                self._aside.append(queue)
                continue
            homes = self._index.homes.get(queue.info.requirements)
            if homes is None:
                return queue, UNLIMITED
            limit = min(self._least_aside, top[2]) + self._reorder
            if self._soft and (near := self._near(homes, top, limit)) is not None:
                queue = near
            elif top[2] > limit:
                return None  # what was set aside must go first
            return queue, _within(queue, limit)
        return None

    def _first_fitting(self) -> Entry | None:
        first: Entry | None = None
        for some, heap in self._fitting:
            if not heap or (some.strict and strict_room(self._worker, some) <= 0):
                continue
            if first is None or heap[0] < first:
                first = heap[0]
        return first

    def _near(self, homes: Homes, top: Entry, limit: int) -> SpecQueue | None:
        """Return a queue that suits this worker better than the first in the schedule, whose entry is `top`."""
        worker = self._worker.id
        for cost in sorted(homes.costs, reverse=True):
            last = homes.last.get(worker)
            if last is not None and (last.info.spec.cost != cost or not last.size or last.log.closed):
                last = None
            for queue in (
                last if last is not None and _warm_at(last) == worker else None,
                _first(homes.heaps.get(worker, {}).get(cost), worker),
                _first(homes.heaps.get("", {}).get(cost), ""),
            ):
                if queue is not None and queue.head() <= limit and self._may_pass(queue, top):
                    return queue
        return None

    def _may_pass(self, queue: SpecQueue, top: Entry) -> bool:
        """Return whether it is as urgent, was neither stolen for another worker nor failed here, and no horizon is
        near."""
        if queue.avoid_worker == self._worker.id or (queue.log.run.tracked and queue.log.parent is None):
            return False
        if entry_of(queue)[:2] != top[:2]:
            return False
        if not queue.retry or queue.retry[0][0] != queue.head():
            return True
        return queue.retry[0][3].to in ("", self._worker.id)

    def pass_over(self, state: State, queue: SpecQueue, gate: Gate | None) -> None:
        """Take no items of the candidate: it waits behind `gate`, or is for another worker."""
        self._remove(queue)
        if gate is not None:
            wait(state, queue, gate)
            return
        self._aside.append(queue)
        self.left_some = True
        if queue.avoid_worker != self._worker.id:  # a retry holds nothing back where it is not to be
            self._least_aside = min(self._least_aside, queue.head())

    def end(self) -> None:
        """Restore what was set aside for the next worker."""
        for queue in self._aside:
            queue.queued = False
            add(queue)

    def _remove(self, queue: SpecQueue) -> None:
        """Remove the first of its heap."""
        heapq.heappop(self._index.ready[queue.info.requirements])
        settle(queue)


def _within(queue: SpecQueue, limit: int) -> int:
    """Return how many items from its head on are not beyond `limit`, at least 1."""
    if not queue.chunks:
        return 1
    chunk = queue.chunks[0]
    return max(1, bisect_right(chunk.seqs, limit, chunk.pos) - chunk.pos)
