"""Stealing: an idle worker, nothing pending for it, and a peer with a backlog it has not started.

revoke -> confirm -> new attempt. One steal per victim at a time; what is on its way to a thief counts as its load.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from rollout.model import events as names
from rollout.model.item import NO_LIMIT, AttemptEnd
from rollout.model.run import RunState
from rollout.model.worker import WorkerState

from rollout_coordinator.core.attempts import Held, current, end_attempt, keys_of, open_seqs
from rollout_coordinator.core.capacity import UNLIMITED, fits, limit_of, may_hold, parents_full, strict_room, takes
from rollout_coordinator.core.events import WorkerConfirm
from rollout_coordinator.core.state import AttemptBatch, Requirements, Revoke, Run, State, Worker
from rollout_coordinator.core.step import Emit, SendRevoke
from rollout_coordinator.core.transitions import RestState
from rollout_coordinator.core.workers import forget_revoke, worker_of_session


class Offer(NamedTuple):
    """Items that the same workers can run."""

    run: Run
    requirements: Requirements
    root: bool  # of the run's root log: what may begin parents
    avoid_worker: str  # one that they are not for: they failed there
    spread: int  # of items that last until their run ends: only for workers with fewer than this, as many as it has


def backlog(worker: Worker) -> int:
    """Return the number of items it holds and has not begun. Parents that wait have begun, and count as running."""
    return worker.in_flight - worker.running


def most(worker: Worker) -> int:
    return max([worker.credit.items, *worker.credit_runs.values()])


def could_start_more(worker: Worker) -> bool:
    """Return whether it could start more than it has: half its credit is about what it runs at once."""
    if not worker.session or worker.state is not WorkerState.READY or worker.fenced or worker.incoming:
        return False
    return backlog(worker) == 0 and worker.in_flight - worker.waiting < max(1, most(worker) // 2)


class VictimSearch:
    """Search for victims. There may be hundreds, and as many thieves that can run none of their items: each victim is
    visited once, and a thief looks for kinds of items, not for victims."""

    def __init__(self, victims: list[Worker]) -> None:
        self._victims = victims  # the first is to be asked first
        self._seen = 0
        self._offers: dict[Offer, deque[int]] = {}  # victims that have such items, of those seen
        self._useless: set[str] = set()  # kinds of workers that nothing fits

    def first_for(self, state: State, thief: Worker) -> Worker | None:
        """Return the first victim with items for this thief."""
        if thief.kind in self._useless:
            return None
        first = len(self._victims)
        for offer, places in self._offers.items():
            while places and self._victims[places[0]].revoke is not None:
                places.popleft()  # asked by now
            if places and places[0] < first and most_for(state, thief, offer) > 0:
                first = places[0]
        if first < self._seen:
            return self._victims[first]
        while self._seen < len(self._victims):
            place, victim = self._seen, self._victims[self._seen]
            self._seen += 1
            has = dict.fromkeys([offer_of(state, g) for g in victim.batches.values() if may_be_stolen(state, g)])
            for offer in has:
                self._offers.setdefault(offer, deque()).append(place)
            if any(most_for(state, thief, offer) > 0 for offer in has):
                return victim
        if not any(fits(thief, offer.requirements) for offer in self._offers):
            self._useless.add(thief.kind)
        return None


def seek(state: State) -> None:
    """Start steals after dispatch, when an idle worker has nothing pending for it, and at every scan. That a thief has
    begun what it stole, or that a victim keeps its backlog, is no event that leads to a dispatch."""
    thieves = [w for w in state.ready.values() if could_start_more(w)]
    if not thieves:
        return
    victims = [w for w in state.workers.values() if may_be_asked(state, w) and backlog(w) > 0 and overloaded(state, w)]
    victims.sort(key=backlog, reverse=True)
    search = VictimSearch(victims)
    for thief in thieves:
        victim = search.first_for(state, thief)
        if victim is None:
            continue
        batches = items_to_steal(state, thief, victim)
        keys = keys_of(batches)
        victim.revoke = Revoke(state.next_revoke, thief.id, keys)
        state.next_revoke += 1
        thief.incoming += sum(len(k.seq) for k in keys)
        state.step.sends.append(SendRevoke(victim.session, victim.revoke.id, keys))


def take_back_skipped(state: State) -> None:
    """Revoke what has not begun at its worker, of runs whose rest is skipped; it is skipped once it is back."""
    skipping = [run for run in state.runs.values() if run.in_flight and run.root.rest is RestState.SKIPPED]
    for run in skipping:
        for worker in state.workers.values():
            if run.id not in worker.by_run or not may_be_asked(state, worker):
                continue
            batches = [b for b in worker.batches.values() if b.log is run.root and may_be_stolen(state, b)]
            held: Held = [(b, [seq for seq in open_seqs(b) if seq not in b.started]) for b in batches]
            if any(seqs for _, seqs in held):
                worker.revoke = Revoke(state.next_revoke, "", keys_of(held))
                state.next_revoke += 1
                state.step.sends.append(SendRevoke(worker.session, worker.revoke.id, worker.revoke.keys))


def may_be_asked(state: State, victim: Worker) -> bool:
    """Return whether it has a stream and no revoke in progress."""
    return bool(victim.session) and victim.revoke is None


def overloaded(state: State, victim: Worker) -> bool:
    """Return whether it has more than it can start at once, or has kept work for longer than two heartbeats."""
    if victim.in_flight - victim.waiting > max(1, most(victim) // 2):
        return True
    # Not the oldest of all: two workers in which parents wait would take a child from each other before it can begin.
    oldest = next((batch for batch in victim.batches.values() if batch.open > len(batch.started)), None)
    return oldest is not None and state.now.mono - oldest.assigned_at > 2 * state.settings.heartbeat_interval


def may_be_stolen(state: State, batch: AttemptBatch) -> bool:
    """Return whether the batch has an item that has not begun and that another worker may run."""
    if batch.log.run.state is not RunState.RUNNING or batch.info.spec.chain:
        return False
    if batch.maybe_started:
        return False
    return batch.open > len(batch.started)


def offer_of(state: State, batch: AttemptBatch) -> Offer:
    waits = state.now.mono - batch.assigned_at < state.settings.another_worker_grace
    run, avoid_worker = batch.log.run, batch.failed_on if waits else ""
    spread = batch.worker.by_run[run.id] if batch.info.spec.max_worker_lost >= NO_LIMIT else UNLIMITED
    return Offer(run, batch.info.requirements, batch.log.parent is None, avoid_worker, spread)


def most_for(state: State, thief: Worker, offer: Offer) -> int:
    """Return how many of such items the thief may have."""
    run, requirements, root, avoid_worker, spread = offer
    if avoid_worker == thief.id or not takes(thief, requirements) or (root and parents_full(state, thief, run)):
        return 0
    if not may_hold(state, run, thief) or thief.by_run.get(run.id, 0) >= spread:
        return 0
    limit = limit_of(thief, run) - thief.holds.get(run.id, 0)
    return min(limit, strict_room(thief, requirements)) if requirements.strict else limit


def items_to_steal(state: State, thief: Worker, victim: Worker) -> Held:
    """Return ceil(backlog / 2) unstarted items, at most steal_max, that the thief can run; the newest first."""
    want = min(-(-backlog(victim) // 2), state.settings.steal_max)
    out: Held = []
    for batch in reversed(list(victim.batches.values())):
        limit = min(want, most_for(state, thief, offer_of(state, batch))) if may_be_stolen(state, batch) else 0
        if limit > 0:
            seqs = [seq for seq in open_seqs(batch) if seq not in batch.started][-limit:]
            out.append((batch, seqs))
            want -= len(seqs)
        if want <= 0:
            break
    return out


def confirm(state: State, event: WorkerConfirm) -> None:
    """Make returned items pending, even if the revoke is not remembered: they will never start there."""
    victim = worker_of_session(state, event.session)
    if victim is None:
        return
    revoke = victim.revoke
    thief: Worker | None = None
    asked: set[tuple[int, int, int]] = set()
    if revoke is not None and revoke.id == event.revoke_id:
        forget_revoke(state, victim)
        thief = state.workers.get(revoke.thief)
        if thief is not None and not (thief.session and thief.state is WorkerState.READY):
            thief = None
        asked = {(k.log, seq, attempt) for k in revoke.keys for seq, attempt in zip(k.seq, k.attempt, strict=True)}
    n = 0
    for keys in event.given_up:
        for batch, seq in current(state, victim, keys):
            to = ""
            if thief is not None and (keys.log, seq, batch.attempt) in asked:
                to = thief.id
                n += 1
            why = f"stolen for {to}" if to else "given up"
            end_attempt(state, batch, seq, AttemptEnd.REVOKED, "revoked", why, to=to)
    if n and thief is not None:
        thief.incoming += n
        state.totals["stolen"] += n
        state.step.sends.append(Emit(names.WORK_STOLEN, "info", {"thief": thief.id, "victim": victim.id, "count": n}))
