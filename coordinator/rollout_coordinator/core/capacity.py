"""Capacity of a worker: what fits it at all, and how much of it its credit and resources still allow."""

from __future__ import annotations

from collections.abc import Callable, Set
from typing import NamedTuple

from rollout.model.worker import WorkerState

from rollout_coordinator.core.state import Gate, Requirements, Run, SpecQueue, State, Worker

UNLIMITED = 1 << 30
OF_PROCESSES = frozenset({"gpus", "memory_mib"})
"""Resources that a worker assigns to a process until it ends. While a parent in it waits they count as free, because
its children may run beside it there. Others wait at the worker until the parent is done, or are returned."""


class Verdict(NamedTuple):
    """Number of items of a queue that a worker may be assigned now. A queue with 0 waits for `gate`, whichever worker
    asks; without a gate, another worker may have its items."""

    most: int
    gate: Gate | None = None


ASIDE = Verdict(0)


def limit_of(worker: Worker, run: Run) -> int:
    own = worker.credit_runs.get(run.id)
    return worker.credit.items if own is None else own


def held_in_common(worker: Worker) -> int:
    """Return the items held of runs that have no credit of their own there."""
    return worker.in_flight - worker.waiting - sum([worker.holds.get(run_id, 0) for run_id in worker.credit_runs])


def free_credit(worker: Worker, run: Run, held: Callable[[Worker], int] = held_in_common) -> int:
    """Return the items of `run` that the worker's credit still allows. `held` replaces `held_in_common`, which visits
    many runs."""
    if worker.bytes >= worker.credit.bytes:
        return 0
    own = worker.credit_runs.get(run.id)
    if own is not None:
        return own - worker.holds.get(run.id, 0)
    return worker.credit.items - held(worker)


def has_enough(worker: Worker) -> bool:
    """Return whether it takes nothing more of any run, present or future, until it says so or ends something."""
    if worker.bytes >= worker.credit.bytes:
        return True
    if held_in_common(worker) < worker.credit.items:
        return False
    return all(worker.holds.get(run_id, 0) >= most for run_id, most in worker.credit_runs.items())


def idle(worker: Worker) -> bool:
    return bool(worker.session) and worker.in_flight == worker.waiting


def fits(worker: Worker, requirements: Requirements) -> bool:
    """Return whether the worker can take such items at all, which does not change before its next Hello."""
    known = worker.fits.get(requirements.key)
    if known is None:
        have = worker.inventory
        labels = dict(have.labels)
        known = worker.fits[requirements.key] = (
            (not have.executors or requirements.hosted in have.executors)
            and requirements.roles.issubset(have.roles)
            and all(labels.get(name) == value for name, value in requirements.labels)
            and (not requirements.plugin or requirements.plugin in have.plugins)
            and requirements.slots <= worker.capacity.get("slots", 0.0)
            and all(amount <= worker.capacity.get(name, 0.0) for name, amount in requirements.strict)
        )
    return known


def takes(worker: Worker, requirements: Requirements) -> bool:
    """Return whether it may be assigned such items now: they fit, it has not just returned them, and it could start
    them."""
    return (
        fits(worker, requirements) and requirements not in worker.given_back and not cannot_start(worker, requirements)
    )


def may_hold(state: State, run: Run, worker: Worker) -> bool:
    """Return whether the worker may hold items of a run that is on one worker at a time. That is the worker that has
    some, or had the last one while it takes work: its process knows best what it has sent within a minute."""
    holder = run.holder
    if not run.spec.one_worker or holder is None or holder is worker:
        return True
    if run.in_flight or run.waiting:
        return False
    there = holder.session and holder.state is WorkerState.READY and not holder.fenced
    return not (there and any(takes(holder, some) for some in run.index.ready))


def cannot_start(worker: Worker, requirements: Requirements) -> bool:
    """Return whether it failed to start what these need and is not to be tried again yet."""
    return bool(worker.causes) and any(cause.until and cause.concerns(requirements) for cause in worker.causes)


def room_to_horizon(state: State, queue: SpecQueue) -> int:
    """Return the number of items from its head on that the commit horizon allows, if policies decide by the order of
    results."""
    log = queue.log
    if not log.run.tracked or log.parent is not None:
        return UNLIMITED
    return log.cursor + state.settings.commit_horizon - queue.head()


def strict_room(worker: Worker, requirements: Requirements, besides: Set[str] = frozenset()) -> int:
    """Return how many more items the resources other than slots and `besides` allow. The epsilon is for sums of
    fractions."""
    free = UNLIMITED
    for name, amount in requirements.strict:
        if name in besides:
            continue
        left = worker.capacity.get(name, 0.0) - worker.used.get(name, 0.0)
        free = min(free, int(left / amount + 1e-9))
    return free


def room_for_roots(run: Run) -> int:
    """Return the room under the run's cap for its own items.

    Those that wait for their children count, because they hold what they have (a sandbox, say) and could not continue
    if others took their place. Their children may use it.
    """
    return run.spec.max_in_flight - run.in_flight - run.waiting if run.spec.max_in_flight else UNLIMITED


def parents_full(state: State, worker: Worker, run: Run) -> bool:
    """Return whether so many of the run's parents wait there, without credit, that it begins no more of its root
    log."""
    return worker.by_run.get(run.id, 0) - worker.holds.get(run.id, 0) >= state.settings.waiting_max
