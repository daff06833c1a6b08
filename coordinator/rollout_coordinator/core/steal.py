"""Stealing: an idle worker, nothing pending for it, and a peer with a backlog it has not started.

revoke -> confirm -> new attempt. One steal per victim at a time; what is on its way to a thief counts as its load.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from rollout.model import events as names
from rollout.model.item import AttemptEnd
from rollout.model.run import RunState
from rollout.model.worker import WorkerState

from rollout_coordinator.core import results
from rollout_coordinator.core.attempts import end_attempt, keys_of, open_seqs
from rollout_coordinator.core.events import WorkerConfirm
from rollout_coordinator.core.room import fits, limit_of, only_children, strict_room
from rollout_coordinator.core.state import Grant, Revoke, Run, Shape, State, Worker
from rollout_coordinator.core.step import Emit, SendRevoke


class Offer(NamedTuple):
    """Items that the same workers can run."""

    run: Run
    shape: Shape
    root: bool  # of the run's root log: what may begin parents


def backlog(worker: Worker) -> int:
    """What it holds and has not begun. Parents that wait have begun, and are among the running."""
    return worker.in_flight - worker.running


def most(worker: Worker) -> int:
    return max([worker.credit.items, *worker.credit_runs.values()])


def idle(worker: Worker) -> bool:
    """It could start more than it has: half its credit is about what it runs at once."""
    if not worker.session or worker.state is not WorkerState.READY or worker.fenced or worker.incoming:
        return False
    return backlog(worker) == 0 and worker.in_flight - worker.waiting < max(1, most(worker) // 2)


class Market:
    """What victims have to give. There may be hundreds of them, and as many thieves that can run none of it: a victim
    is looked at once, and a thief asks for kinds of items, not for victims."""

    def __init__(self, victims: list[Worker]) -> None:
        self._victims = victims  # the first is to be asked first
        self._seen = 0
        self._offers: dict[Offer, deque[int]] = {}  # victims that have such items, of those seen
        self._useless: set[str] = set()  # kinds of workers that nothing fits

    def first_for(self, c: State, thief: Worker) -> Worker | None:
        """The first victim that has something for this thief."""
        if thief.kind in self._useless:
            return None
        first = len(self._victims)
        for offer, places in self._offers.items():
            while places and self._victims[places[0]].revoke is not None:
                places.popleft()  # asked by now
            if places and places[0] < first and most_for(c, thief, offer) > 0:
                first = places[0]
        if first < self._seen:
            return self._victims[first]
        while self._seen < len(self._victims):
            place, victim = self._seen, self._victims[self._seen]
            self._seen += 1
            has = dict.fromkeys([offer_of(g) for g in victim.grants.values() if may_be_stolen(g)])
            for offer in has:
                self._offers.setdefault(offer, deque()).append(place)
            if any(most_for(c, thief, offer) > 0 for offer in has):
                return victim
        if not any(fits(thief, offer.shape) for offer in self._offers):
            self._useless.add(thief.kind)
        return None


def seek(c: State) -> None:
    """Called after dispatch, since whoever is still idle then had nothing pending for it, and at every scan: that a
    thief has begun what it stole, or that a victim sits on its backlog, is no event that leads to a dispatch."""
    thieves = [w for w in c.hungry.values() if idle(w)]
    if not thieves:
        return
    victims = [w for w in c.workers.values() if w.session and w.revoke is None and backlog(w) > 0 and overloaded(c, w)]
    victims.sort(key=backlog, reverse=True)
    market = Market(victims)
    for thief in thieves:
        victim = market.first_for(c, thief)
        if victim is None:
            continue
        grants = loot(c, thief, victim)
        keys = keys_of(grants)
        victim.revoke = Revoke(c.next_revoke, thief.id, keys)
        c.next_revoke += 1
        thief.incoming += sum(len(k.seq) for k in keys)
        c.step.sends.append(SendRevoke(victim.session, victim.revoke.id, keys))


def overloaded(c: State, victim: Worker) -> bool:
    """More than it can start at once; or work that it has sat on for longer than a beat."""
    if victim.in_flight - victim.waiting > max(1, most(victim) // 2):
        return True
    oldest = next(iter(victim.grants.values()), None)
    return oldest is not None and c.now.mono - oldest.at > 2 * c.settings.heartbeat_interval


def may_be_stolen(grant: Grant) -> bool:
    """There is something in it that has not begun, and that another may run."""
    running = grant.log.run.state is RunState.RUNNING
    return running and not grant.info.spec.chain and not grant.unsure and grant.open > len(grant.started)


def offer_of(grant: Grant) -> Offer:
    return Offer(grant.log.run, grant.info.shape, grant.log.parent is None)


def most_for(c: State, thief: Worker, offer: Offer) -> int:
    """How many of such items the thief may have."""
    run, shape, root = offer
    if not fits(thief, shape) or (root and only_children(c, thief, run)):
        return 0
    limit = limit_of(thief, run) - thief.holds.get(run.id, 0)
    return min(limit, strict_room(thief, shape)) if shape.strict else limit


def loot(c: State, thief: Worker, victim: Worker) -> list[tuple[Grant, list[int]]]:
    """ceil(backlog / 2) unstarted items, at most steal_max, that the thief can run; the newest first."""
    want = min(-(-backlog(victim) // 2), c.settings.steal_max)
    out: list[tuple[Grant, list[int]]] = []
    for grant in reversed(list(victim.grants.values())):
        limit = min(want, most_for(c, thief, offer_of(grant))) if may_be_stolen(grant) else 0
        if limit > 0:
            seqs = [seq for seq in open_seqs(grant) if seq not in grant.started][-limit:]
            out.append((grant, seqs))
            want -= len(seqs)
        if want <= 0:
            break
    return out


def confirmed(c: State, victim: Worker, event: WorkerConfirm) -> None:
    """What was given up is pending again, also when the revoke is not remembered: it will never start there."""
    revoke = victim.revoke
    thief: Worker | None = None
    asked: set[tuple[int, int, int]] = set()
    if revoke is not None and revoke.id == event.revoke_id:
        forget(c, victim)
        thief = c.workers.get(revoke.thief)
        if thief is not None and not (thief.session and thief.state is WorkerState.READY):
            thief = None
        asked = {(k.log, seq, attempt) for k in revoke.keys for seq, attempt in zip(k.seq, k.attempt, strict=True)}
    n = 0
    for keys in event.given_up:
        for grant, seq in results.current(c, victim, keys):
            to = ""
            if thief is not None and (keys.log, seq, grant.attempt) in asked:
                to = thief.id
                n += 1
            end_attempt(c, grant, seq, AttemptEnd.REVOKED, "revoked", f"stolen for {to}" if to else "given up", to=to)
    if n and thief is not None:
        thief.incoming += n
        c.totals["stolen"] += n
        c.step.sends.append(Emit(names.WORK_STOLEN, "info", {"thief": thief.id, "victim": victim.id, "count": n}))


def forget(c: State, worker: Worker) -> None:
    """The revoke under way will not be answered any more (or was)."""
    revoke, worker.revoke = worker.revoke, None
    if revoke is not None:
        thief = c.workers.get(revoke.thief)
        if thief is not None:
            thief.incoming = max(0, thief.incoming - sum(len(k.seq) for k in revoke.keys))
