"""Reasons why items of a run wait, for users who wonder why nothing happens.

They are computed on request, never in a step, from the queues in memory and the connected workers. Nothing is decided
or changed here; `dispatch.py` decides.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from math import ceil

from rollout.model.ids import short
from rollout.model.run import RunState
from rollout.model.worker import WorkerState

from rollout_coordinator.core.capacity import (
    cannot_start,
    fits,
    free_credit,
    may_hold,
    parents_full,
    room_to_horizon,
    strict_room,
)
from rollout_coordinator.core.chains import waits_for_earlier
from rollout_coordinator.core.state import ROOT_RANK, Requirements, Run, SpecQueue, State, Worker
from rollout_coordinator.core.views import WaitView
from rollout_coordinator.core.workers import ALIVE

WAITS_MAX = 20  # reasons that are told of one run

Reason = tuple[str, str, bool]
"""(reason, message, impossible)."""
Need = Callable[[Worker], bool]


def pending_reasons(state: State, run: Run) -> list[WaitView]:
    """Return the reasons, first those that no connected worker can resolve, then those that affect most items."""
    if run.state is not RunState.RUNNING:
        return []
    found: Counter[Reason] = Counter()
    workers = [w for w in state.workers.values() if w.session and w.state is WorkerState.READY and not w.fenced]
    never: dict[Requirements, Reason | None] = {}
    busy: dict[tuple[Requirements, bool], Reason | None] = {}
    for log in run.logs.values():
        for queue in log.all_queues():
            if not queue.size or log.closed:
                continue
            requirements = queue.info.requirements
            key = (requirements, log.rank == ROOT_RANK)
            if requirements not in never:
                never[requirements] = _no_worker(workers, requirements)
            reason = never[requirements] or _held_back(state, queue)
            if reason is None:
                if key not in busy:
                    busy[key] = _busy(state, run, requirements, workers, root=key[1])
                reason = busy[key]
            if reason is not None:
                found[reason] += queue.size
    for worker in state.workers.values():
        if run.id in worker.by_run and not worker.session and worker.state in ALIVE:
            found[_silent(state, worker)] += worker.by_run[run.id]
    again = _tried_again_later(state, run)
    if again:
        found["not_before", "an attempt failed; the next one begins after a delay", False] += again
    views = [WaitView(*reason[:2], items, reason[2]) for reason, items in found.items()]
    return sorted(views, key=lambda view: (not view.impossible, -view.items))[:WAITS_MAX]


def _silent(state: State, worker: Worker) -> Reason:
    """Return the reason for a silent worker, which keeps its items until it is back or given up."""
    left = worker.due_at + state.settings.coordinator_failure_timeout - state.now.mono
    who = f"worker {short(worker.id)}" + (f" on {worker.inventory.host}" if worker.inventory.host else "")
    return "silent_worker", f"{who} has them and is silent; in {max(1, ceil(left))} s they go to others", False


def _no_worker(workers: list[Worker], requirements: Requirements) -> Reason | None:
    """Return why none of the workers can ever take such items."""
    if not workers:
        return "no_workers", "no worker is connected that takes work", False  # nobody knows what the next one can
    if any(fits(worker, requirements) for worker in workers):
        return None
    hosts = [w for w in workers if not w.inventory.executors or requirements.hosted in w.inventory.executors]
    if not hosts:
        return "executor", f"no connected worker hosts executor {requirements.executor!r}", True
    needs = list(_needs(requirements))
    unmet = [said for said, met in needs if not any(met(worker) for worker in hosts)]
    who = f"no worker that hosts executor {requirements.executor!r} has"
    if unmet:
        return "requirements", f"{who} {' or '.join(unmet)}", True
    return "requirements", f"{who} all of: {', '.join(said for said, _ in needs)}", True


def _needs(requirements: Requirements) -> Iterator[tuple[str, Need]]:
    """Yield each requirement, as text and as a test."""
    for role in sorted(requirements.roles):
        yield f"role {role!r}", lambda worker, role=role: role in worker.inventory.roles
    for name, value in requirements.labels:
        yield (
            f"label {name}={value}",
            lambda worker, name=name, value=value: dict(worker.inventory.labels).get(name) == value,
        )
    if requirements.plugin:
        yield f"plugin {requirements.plugin!r}", lambda worker: requirements.plugin in worker.inventory.plugins
    for name, amount in (("slots", requirements.slots), *requirements.strict):
        if amount > 0:
            yield (
                f"{amount:g} {name}",
                lambda worker, name=name, amount=amount: worker.capacity.get(name, 0.0) >= amount,
            )


def _held_back(state: State, queue: SpecQueue) -> Reason | None:
    """Return why its first item may not begin on any worker now."""
    run, info, lane = queue.log.run, queue.info, queue.info.lane
    if info.spec.not_before_ms > state.now.wall_ms:
        at = datetime.fromtimestamp(info.spec.not_before_ms / 1000, UTC).isoformat(timespec="seconds")
        return "not_before", f"not before {at}", False
    if lane.cap and lane.in_flight >= lane.cap:
        return "caps", f"lane {lane.name!r} has {lane.in_flight} items in flight, its cap is {lane.cap}", False
    if run.spec.max_in_flight and run.in_flight >= run.spec.max_in_flight:
        return "caps", f"the run has {run.in_flight} items in flight, its cap is {run.spec.max_in_flight}", False
    if room_to_horizon(state, queue) <= 0:
        horizon = state.settings.commit_horizon
        return "caps", f"more than {horizon} items ahead of the commit cursor, where policies decide", False
    chain = queue.chain
    if chain is not None and (chain.flying or chain.looking_back or waits_for_earlier(queue)):
        return "chain", "an earlier item of the same chain is not done", False
    return None


def _busy(state: State, run: Run, requirements: Requirements, workers: list[Worker], *, root: bool) -> Reason | None:
    """Return why no fitting worker takes an item now, or None if one does in the next step. `root` selects the root
    log."""
    fitting = [worker for worker in workers if fits(worker, requirements)]
    if not any(may_hold(state, run, worker) for worker in fitting):
        holder = short(run.holder.id) if run.holder is not None else "another"
        return "one_worker", f"its items are on one worker at a time, and worker {holder} has {run.in_flight}", False
    fitting = [worker for worker in fitting if may_hold(state, run, worker)]
    spare = [worker for worker in fitting if not requirements.strict or strict_room(worker, requirements) > 0]
    if not spare:
        amounts = ", ".join(f"{amount:g} {name}" for name, amount in requirements.strict)
        return "resources", f"{amounts} are not free on any of the {len(fitting)} workers that have them", False
    if all(cannot_start(worker, requirements) for worker in spare):
        who = f"none of the {len(spare)} workers that host it" if len(spare) > 1 else "the worker that hosts it"
        what = "could start it and tries again" if len(spare) > 1 else "could not start it and tries again"
        return "cannot_start", f"executor {requirements.executor!r}: {who} {what}", False
    if all(requirements in worker.given_back for worker in spare):
        what = "what they need is held by items that wait for their children"
        return "resources", f"{what}, on each of the {len(fitting)} workers that have it", False
    if root and all(parents_full(state, worker, run) for worker in spare):
        return "caps", "the workers have as many items that wait for their children as they may", False
    if all(free_credit(worker, run) <= 0 for worker in spare):
        return "credit", f"all workers that can take them ({len(spare)}) have as much as they asked for", False
    return None


def _tried_again_later(state: State, run: Run) -> int:
    return sum(1 for _, _, log, _ in state.retries if log in run.logs)
