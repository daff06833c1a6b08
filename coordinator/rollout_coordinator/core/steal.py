"""Stealing: an idle worker, nothing pending for it, and a peer with a backlog it has not started.

revoke -> confirm -> new attempt. One steal per victim at a time; what is on its way to a thief counts as its load.
"""

from __future__ import annotations

from rollout.model import events as names
from rollout.model.item import AttemptEnd
from rollout.model.run import RunState
from rollout.model.worker import WorkerState

from rollout_coordinator.core import results
from rollout_coordinator.core.attempts import end_attempt, keys_of, open_seqs
from rollout_coordinator.core.events import WorkerConfirm
from rollout_coordinator.core.room import fits, limit_of, only_children, strict_room
from rollout_coordinator.core.state import Grant, Revoke, State, Worker
from rollout_coordinator.core.step import Emit, SendRevoke


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


def seek(c: State) -> None:
    """Called after dispatch, since whoever is still idle then had nothing pending for it, and at every scan: that a
    thief has begun what it stole, or that a victim sits on its backlog, is no event that leads to a dispatch."""
    thieves = [w for w in c.hungry.values() if idle(w)]
    if not thieves:
        return
    victims = [w for w in c.workers.values() if w.session and w.revoke is None and backlog(w) > 0 and overloaded(c, w)]
    victims.sort(key=backlog, reverse=True)
    for thief in thieves:
        for victim in victims:
            if victim is thief:
                continue
            grants = loot(c, thief, victim)
            if not grants:
                continue
            keys = keys_of(grants)
            victim.revoke = Revoke(c.next_revoke, thief.id, keys)
            c.next_revoke += 1
            thief.incoming += sum(len(k.seq) for k in keys)
            c.step.sends.append(SendRevoke(victim.session, victim.revoke.id, keys))
            victims.remove(victim)
            break


def overloaded(c: State, victim: Worker) -> bool:
    """More than it can start at once; or work that it has sat on for longer than a beat."""
    if victim.in_flight - victim.waiting > max(1, most(victim) // 2):
        return True
    oldest = next(iter(victim.grants.values()), None)
    return oldest is not None and c.now.mono - oldest.at > 2 * c.settings.heartbeat_interval


def loot(c: State, thief: Worker, victim: Worker) -> list[tuple[Grant, list[int]]]:
    """ceil(backlog / 2) unstarted items, at most steal_max, that the thief can run; the newest first."""
    want = min(-(-backlog(victim) // 2), c.settings.steal_max)
    out: list[tuple[Grant, list[int]]] = []
    for grant in reversed(list(victim.grants.values())):
        run, spec = grant.log.run, grant.info.spec
        if grant.log.parent is None and only_children(c, thief, run):
            continue
        limit = min(want, limit_of(thief, run) - thief.holds.get(run.id, 0))
        if grant.info.shape.strict:
            limit = min(limit, strict_room(thief, grant.info.shape))
        if run.state is not RunState.RUNNING or spec.chain or grant.unsure or not fits(thief, grant.info.shape):
            continue
        seqs = [seq for seq in open_seqs(grant) if seq not in grant.started]
        if limit > 0 and seqs:
            seqs = seqs[-limit:]
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
