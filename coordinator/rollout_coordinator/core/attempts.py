"""Books of what is in flight: opening, ending and re-pending attempts. Every counter of attempts moves here."""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from zlib import crc32

from rollout.model.item import AttemptEnd, ItemState
from rollout.model.run import ENDED

from rollout_coordinator.core.chains import attempt_ended, drop_dependents
from rollout_coordinator.core.events import Keys
from rollout_coordinator.core.state import Grant, History, Log, Run, SpecInfo, State, Worker, touch, touch_run
from rollout_coordinator.core.step import AttemptRow, Send, SendCancel
from rollout_coordinator.core.tables import ITEM
from rollout_coordinator.core.window import longest_backoff_ms, unpark

_CAUSE = {
    AttemptEnd.FAILED: "retry",
    AttemptEnd.TIMEOUT: "retry",
    AttemptEnd.WORKER_LOST: "worker_lost",
    AttemptEnd.RELEASED: "release",
    AttemptEnd.REVOKED: "revoke",
    AttemptEnd.PAUSED: "release",
    AttemptEnd.DROPPED: "drop",
}


def state_of(grant: Grant, seq: int) -> ItemState:
    return ItemState.RUNNING if seq in grant.started or grant.unsure else ItemState.ASSIGNED


def hold_caps(run: Run, grant: Grant, n: int) -> None:
    """Take `n` places under the caps of run and lane, and of the worker's resources and credit (give back with a
    negative `n`). Parents that wait for children hold none: the children need them."""
    worker = grant.worker
    run.in_flight += n
    grant.info.lane.in_flight += n
    worker.bytes += grant.each * n
    held = worker.holds.get(run.id, 0) + n
    if held:
        worker.holds[run.id] = held
    else:
        worker.holds.pop(run.id, None)
    used = worker.used
    for name, amount in grant.info.shape.strict:
        used[name] = used.get(name, 0.0) + amount * n


def open_grant(c: State, grant: Grant, size: int) -> None:
    """`grant` is with its worker from now on. `size`: inline bytes of all its payloads."""
    worker, log, n = grant.worker, grant.log, len(grant.seqs)
    run = log.run
    log.flight.update(dict.fromkeys(grant.seqs, grant))
    grant.batch.open += n
    grant.each = size // n
    worker.in_flight += n
    worker.by_run[run.id] = worker.by_run.get(run.id, 0) + n
    worker.grants[grant.n] = grant
    hold_caps(run, grant, n)
    if grant.info.spec.group:
        join_group(log, grant.info, grant.seqs)
    if grant.info.spec.timeout_ms:
        c.timed[grant.n] = grant


def join_group(log: Log, info: SpecInfo, seqs: Iterable[int]) -> None:
    """Once their group is won, these are found without looking at every other."""
    if log.parent is None:
        log.members.setdefault(info.spec.group, set()).update(seqs)


def begun(c: State, grant: Grant, seq: int) -> None:
    """Its worker runs it, by whatever word of the worker's that is known."""
    if seq not in grant.started:
        if not grant.unsure:  # which counts as running already
            ITEM.move(ItemState.ASSIGNED, "start")
        grant.started.add(seq)
        grant.worker.running += 1
        grant.log.run.running += 1
    if grant.info.spec.timeout_ms:
        grant.started_at.setdefault(seq, c.now.mono)


def close(c: State, grant: Grant, seqs: list[int]) -> None:
    """These attempts are over, however they ended: free what they held."""
    worker, log, info, n = grant.worker, grant.log, grant.info, len(seqs)
    run, flight = log.run, log.flight
    for seq in seqs:
        del flight[seq]
    waiting = 0
    if grant.waiting:
        waiting = len(grant.waiting.intersection(seqs))
        grant.waiting.difference_update(seqs)
        worker.waiting -= waiting
        run.waiting -= waiting
    if grant.started:
        before = len(grant.started)
        grant.started.difference_update(seqs)
        ran = before - len(grant.started)
        worker.running -= ran
        run.running -= ran
    hold_caps(run, grant, waiting - n)
    worker.in_flight -= n
    left = worker.by_run[run.id] - n
    if left:
        worker.by_run[run.id] = left
    else:
        del worker.by_run[run.id]
    grant.open -= n
    if not grant.open:
        del worker.grants[grant.n]
        c.timed.pop(grant.n, None)
    batch = grant.batch
    batch.open -= n
    if not batch.open:
        c.step.writes.retired.append(batch.id)
    over = run.state in ENDED
    counted = run.root if over else log  # those of children were moved there when it ended
    counted.attempts += n
    touch(c, counted)
    if worker.session:  # else it is gone, or will say Hello
        c.hungry[worker.id] = worker
    c.dirty = True
    if info.lane.parked:
        unpark(info.lane.parked)
    if info.spec.chain:
        attempt_ended(c, grant, seqs)
    if not run.in_flight and not run.waiting:
        if over and run.survivors:
            run.survivors = ()
            touch_run(c, run)
        elif run.pausing_until_ms:
            c.dirty_runs[run.id] = run


def backoff_ms(c: State, grant: Grant, seq: int) -> int:
    """Exponential in the number of failures; the jitter is a hash of the attempt, so that a replay agrees."""
    spread = crc32(f"{grant.log.run.id}/{grant.log.id}/{seq}/{grant.attempt}".encode()) / 0xFFFFFFFF
    return int(longest_backoff_ms(c, grant.info.spec, grant.failures) * (0.5 + 0.5 * spread))


def end_attempt(c: State, grant: Grant, seq: int, end: AttemptEnd, code: str, message: str, to: str = "") -> None:
    """The attempt ended and its item did not: evidence is written and the item is pending again."""
    if grant.log.flight.get(seq) is not grant:
        return  # it went with its predecessor, earlier in the same message
    if grant.log.run.state in ENDED:  # a survivor: however it ended, nothing comes of it
        end, code, to = AttemptEnd.RELEASED, "run_ended", ""
    ITEM.move(state_of(grant, seq), _CAUSE[end])
    failures, losses, delay_ms = grant.failures, grant.losses, 0
    log = grant.log
    if end in (AttemptEnd.FAILED, AttemptEnd.TIMEOUT):
        delay_ms = backoff_ms(c, grant, seq)
        failures += 1
        log.retried += 1
        c.totals["retried"] += 1
    elif end is AttemptEnd.WORKER_LOST:
        losses += 1
        log.worker_lost += 1
        c.totals["worker_lost"] += 1
    wall = c.now.wall_ms
    not_before_ms = wall + delay_ms if delay_ms else 0
    c.step.writes.attempts.append(
        AttemptRow(log.id, seq, grant.attempt, grant.worker.id, end, code, message, wall, not_before_ms)
    )
    close(c, grant, [seq])
    repend(c, log, seq, History(grant.attempt, failures, losses, c.now.mono + delay_ms / 1000, to))
    if grant.info.spec.chain:
        drop_dependents(c, grant, seq)


def repend(c: State, log: Log, seq: int, history: History) -> None:
    """Pending again; the payload is read back when the window has room for it and its time has come."""
    if log.closed:
        return
    if seq >= log.tail:
        log.ahead.add(seq)
    if history.not_before > c.now.mono:
        c.next_grant += 1
        log.loading_back.pop(seq, None)
        heapq.heappush(c.retries, (history.not_before, c.next_grant, log.id, (seq, history)))
    else:
        log.back[seq] = history
        c.window_dirty[log.id] = log
    c.dirty = True


def open_seqs(grant: Grant) -> list[int]:
    flight = grant.log.flight
    return [seq for seq in grant.seqs if flight.get(seq) is grant]


def keys_of(grants: list[tuple[Grant, list[int]]]) -> list[Keys]:
    """Columnar keys, one entry per log."""
    by_log: dict[int, Keys] = {}
    for grant, seqs in grants:
        keys = by_log.setdefault(grant.log.id, Keys(grant.log.id, [], []))
        keys.seq.extend(seqs)
        keys.attempt.extend([grant.attempt] * len(seqs))
    return list(by_log.values())


def run_grants(c: State, run: Run) -> list[tuple[Worker, list[tuple[Grant, list[int]]]]]:
    """Everything of a run that is in flight, by worker."""
    out: list[tuple[Worker, list[tuple[Grant, list[int]]]]] = []
    for worker in c.workers.values():
        if run.id in worker.by_run:
            out.append((worker, [(g, open_seqs(g)) for g in worker.grants.values() if g.log.run is run]))
    return out


def cancel(worker: Worker, grants: list[tuple[Grant, list[int]]], reason: str, sends: list[Send]) -> None:
    if worker.session and grants:
        sends.append(SendCancel(worker.session, keys_of(grants), reason))
