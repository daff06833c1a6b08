"""Fair share: the runs that a dispatch takes from, those first that have least of their share.

A worker asks again with every frame, and there may be a thousand runs, so nothing here visits all of them each time.
"""

from __future__ import annotations

from heapq import heapify, heappop, heappush, heapreplace

from rollout_coordinator.core.capacity import fits, held_in_common
from rollout_coordinator.core.state import Requirements, Run, Worker

Entry = tuple[float, int, Run]
"""(running items over weight, position among the runs, run)."""


class Shares:
    """Number of items of each run that a worker may hold while several want it: its largest credit, divided by weight.

    A worker runs what it was assigned in turn, so what a run holds there is its share. With credits of their own, runs
    that end fast would take ever more, because credit follows the pace.
    """

    __slots__ = ("_most", "_total", "_weights")

    def __init__(self, weights: dict[str, float], most: int) -> None:
        self._weights = weights
        self._total = sum(weights.values())
        self._most = most

    def of(self, run: Run) -> int | None:
        """Return the share, or None if the run does not want the worker."""
        if run.id not in self._weights:
            return None
        return max(1, int(self._most * run.weight / self._total))


class Rivals:
    """Runs that workers of a kind want, by weight; `looked` is the number of changes included."""

    __slots__ = ("looked", "weights")

    def __init__(self, weights: dict[str, float], looked: int) -> None:
        self.weights = weights
        self.looked = looked


class FairShare:
    """State of one dispatch. `heap` has the runs, those first that have least of their share, without those that `skip`
    put aside until `again`."""

    def __init__(self, runs: list[Run]) -> None:
        self._runs = runs
        self.heap: list[Entry] = [(run.in_flight / run.weight, n, run) for n, run in enumerate(runs)]
        heapify(self.heap)
        self._skipped: list[Entry] = []
        self._requirements: set[Requirements] | None = None
        self._held: tuple[Worker, int] | None = None
        self._rivals: dict[str, Rivals] = {}  # by kind of worker
        self._requirements_left: dict[str, int] = {}  # by run, how many had something at the last look
        self._changes: list[Run] = []  # runs that ran out of items with some requirements

    @property
    def requirements(self) -> set[Requirements]:
        """Requirements of all pending items, without those whose last items are taken."""
        if self._requirements is None:
            self._requirements = {requirements for run in self._runs for requirements in run.index.ready}
        return self._requirements

    def is_full(self, worker: Worker) -> bool:
        """Return whether its credit has no room for any run with items for it."""
        if worker.bytes >= worker.credit.bytes:
            return True
        if not worker.credit_runs:
            return self.held(worker) >= worker.credit.items
        weights = self.wanted_by(worker)
        others = len(weights)
        for run_id, most in worker.credit_runs.items():
            if run_id in weights:
                others -= 1
                if most > worker.holds.get(run_id, 0):
                    return False
        return not others or self.held(worker) >= worker.credit.items

    def held(self, worker: Worker) -> int:
        """Return `held_in_common`, cached because it is needed many times before something is taken."""
        if self._held is None or self._held[0] is not worker:
            self._held = worker, held_in_common(worker)
        return self._held[1]

    def wanted_by(self, worker: Worker) -> dict[str, float]:
        """Return weights of the runs with pending items that fit the worker."""
        known = self._rivals.get(worker.kind)
        if known is None:
            weights = {r.id: r.weight for r in self._runs if wants(r, worker)}
            known = self._rivals[worker.kind] = Rivals(weights, len(self._changes))
        elif known.looked < len(self._changes):
            for run in self._changes[known.looked :]:
                if run.id in known.weights and not wants(run, worker):
                    del known.weights[run.id]
            known.looked = len(self._changes)
        return known.weights

    def shares(self, worker: Worker) -> Shares | None:
        """Return the shares, or None if there is nothing to share."""
        weights = self.wanted_by(worker)
        if len(weights) < 2:
            return None
        own = [most for run_id, most in worker.credit_runs.items() if run_id in weights]
        most = max(own) if len(own) == len(weights) else max([worker.credit.items, *own])
        return Shares(weights, most)

    def took(self) -> None:
        """Record that items of the first run were taken."""
        self._held = None
        _, n, run = self.heap[0]
        heapreplace(self.heap, (run.in_flight / run.weight, n, run))
        self._look(run)

    def skip(self) -> None:
        """Put aside the first run, which had nothing for this worker."""
        entry = heappop(self.heap)
        self._skipped.append(entry)
        self._look(entry[-1])

    def again(self) -> None:
        """Restore what was put aside for the next worker."""
        for entry in self._skipped:
            heappush(self.heap, entry)
        self._skipped.clear()

    def _look(self, run: Run) -> None:
        left = len(run.index.ready)
        if self._requirements_left.get(run.id) != left:
            self._requirements_left[run.id] = left
            self._changes.append(run)
            if self._requirements is not None:
                self._requirements.difference_update(run.requirements.values() - run.index.ready.keys())


def wants(run: Run, worker: Worker) -> bool:
    """Return whether the run has pending items that fit the worker."""
    return any(fits(worker, requirements) for requirements in run.index.ready)
