"""Books of what is in flight: opening, ending and re-pending attempts. Every counter of attempts moves here."""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from zlib import crc32

from rollout.model.item import AttemptEnd, ItemState
from rollout.model.run import ENDED

from rollout_coordinator.core.chains import attempt_ended, drop_dependents
from rollout_coordinator.core.events import Keys
from rollout_coordinator.core.state import AttemptBatch, History, Log, Run, SpecInfo, State, Worker, touch, touch_run
from rollout_coordinator.core.step import AttemptRow, Send, SendCancel
from rollout_coordinator.core.transitions import ITEM
from rollout_coordinator.core.window import longest_backoff_ms, unblock

_CAUSE = {
    AttemptEnd.FAILED: "retry",
    AttemptEnd.TIMEOUT: "retry",
    AttemptEnd.WORKER_LOST: "worker_lost",
    AttemptEnd.RELEASED: "release",
    AttemptEnd.REVOKED: "revoke",
    AttemptEnd.PAUSED: "release",
    AttemptEnd.DROPPED: "drop",
}


def state_of(batch: AttemptBatch, seq: int) -> ItemState:
    return ItemState.RUNNING if seq in batch.started or batch.maybe_started else ItemState.ASSIGNED


def take_capacity(run: Run, batch: AttemptBatch, n: int) -> None:
    """Take `n` places under the caps of run and lane, and of the worker's resources and credit (give back with a
    negative `n`). Parents that wait for children hold none: the children need them."""
    worker = batch.worker
    run.in_flight += n
    batch.info.lane.in_flight += n
    worker.bytes += batch.item_bytes * n
    held = worker.holds.get(run.id, 0) + n
    if held:
        worker.holds[run.id] = held
    else:
        worker.holds.pop(run.id, None)
    used = worker.used
    for name, amount in batch.info.requirements.strict:
        used[name] = used.get(name, 0.0) + amount * n


def open_batch(state: State, batch: AttemptBatch, size: int) -> None:
    """`batch` is with its worker from now on. `size`: inline bytes of all its payloads."""
    worker, log, n = batch.worker, batch.log, len(batch.seqs)
    run = log.run
    log.flight.update(dict.fromkeys(batch.seqs, batch))
    batch.assignment.open += n
    batch.item_bytes = size // n
    worker.in_flight += n
    worker.by_run[run.id] = worker.by_run.get(run.id, 0) + n
    worker.batches[batch.id] = batch
    take_capacity(run, batch, n)
    if batch.info.spec.group:
        join_group(log, batch.info, batch.seqs)
    if batch.info.spec.timeout_ms:
        state.timed[batch.id] = batch


def join_group(log: Log, info: SpecInfo, seqs: Iterable[int]) -> None:
    """Once their group is won, these are found without looking at every other."""
    if log.parent is None:
        log.members.setdefault(info.spec.group, set()).update(seqs)


def begun(state: State, batch: AttemptBatch, seq: int) -> None:
    """Its worker runs it, by whatever word of the worker's that is known."""
    if seq not in batch.started:
        if not batch.maybe_started:  # which counts as running already
            ITEM.move(ItemState.ASSIGNED, "start")
        batch.started.add(seq)
        batch.worker.running += 1
        batch.log.run.running += 1
    if batch.info.spec.timeout_ms:
        batch.started_at.setdefault(seq, state.now.mono)


def close(state: State, batch: AttemptBatch, seqs: list[int]) -> None:
    """These attempts are over, however they ended: free what they held."""
    worker, log, info, n = batch.worker, batch.log, batch.info, len(seqs)
    run, flight = log.run, log.flight
    for seq in seqs:
        del flight[seq]
    waiting = 0
    if batch.waiting:
        waiting = len(batch.waiting.intersection(seqs))
        batch.waiting.difference_update(seqs)
        worker.waiting -= waiting
        run.waiting -= waiting
    if batch.started:
        before = len(batch.started)
        batch.started.difference_update(seqs)
        ran = before - len(batch.started)
        worker.running -= ran
        run.running -= ran
    take_capacity(run, batch, waiting - n)
    worker.in_flight -= n
    left = worker.by_run[run.id] - n
    if left:
        worker.by_run[run.id] = left
    else:
        del worker.by_run[run.id]
    batch.open -= n
    if not batch.open:
        del worker.batches[batch.id]
        state.timed.pop(batch.id, None)
    assignment = batch.assignment
    assignment.open -= n
    if not assignment.open:
        state.step.writes.retired.append(assignment.id)
    over = run.state in ENDED
    counted = run.root if over else log  # those of children were moved there when it ended
    counted.attempts += n
    touch(state, counted)
    if worker.session:  # else it is gone, or will say Hello
        state.asking[worker.id] = worker
    state.dirty = True
    if info.lane.blocked:
        unblock(info.lane.blocked)
    if info.spec.chain:
        attempt_ended(state, batch, seqs)
    if not run.in_flight and not run.waiting:
        if over and run.survivors:
            run.survivors = ()
            touch_run(state, run)
        elif run.pausing_until_ms:
            state.dirty_runs[run.id] = run


def backoff_ms(state: State, batch: AttemptBatch, seq: int) -> int:
    """Exponential in the number of failures; the jitter is a hash of the attempt, so that a replay agrees."""
    spread = crc32(f"{batch.log.run.id}/{batch.log.id}/{seq}/{batch.attempt}".encode()) / 0xFFFFFFFF
    return int(longest_backoff_ms(state, batch.info.spec, batch.failures) * (0.5 + 0.5 * spread))


def end_attempt(
    state: State, batch: AttemptBatch, seq: int, end: AttemptEnd, code: str, message: str, to: str = ""
) -> None:
    """The attempt ended and its item did not: evidence is written and the item is pending again."""
    if batch.log.flight.get(seq) is not batch:
        return  # it went with its predecessor, earlier in the same message
    if batch.log.run.state in ENDED:  # a survivor: however it ended, nothing comes of it
        end, code, to = AttemptEnd.RELEASED, "run_ended", ""
    ITEM.move(state_of(batch, seq), _CAUSE[end])
    failures, losses, delay_ms = batch.failures, batch.losses, 0
    log = batch.log
    if end in (AttemptEnd.FAILED, AttemptEnd.TIMEOUT):
        delay_ms = backoff_ms(state, batch, seq)
        failures += 1
        log.retried += 1
        state.totals["retried"] += 1
    elif end is AttemptEnd.WORKER_LOST:
        losses += 1
        log.worker_lost += 1
        state.totals["worker_lost"] += 1
    wall = state.now.wall_ms
    not_before_ms = wall + delay_ms if delay_ms else 0
    state.step.writes.attempts.append(
        AttemptRow(log.id, seq, batch.attempt, batch.worker.id, end, code, message, wall, not_before_ms)
    )
    close(state, batch, [seq])
    repend(state, log, seq, History(batch.attempt, failures, losses, state.now.mono + delay_ms / 1000, to))
    if batch.info.spec.chain:
        drop_dependents(state, batch, seq)


def repend(state: State, log: Log, seq: int, history: History) -> None:
    """Pending again; the payload is read back when the window has room for it and its time has come."""
    if log.closed:
        return
    if seq >= log.window_end:
        log.loaded_ahead.add(seq)
    if history.not_before > state.now.mono:
        state.next_number += 1
        log.loading_returned.pop(seq, None)
        heapq.heappush(state.retries, (history.not_before, state.next_number, log.id, (seq, history)))
    else:
        log.returned[seq] = history
        state.window_dirty[log.id] = log
    state.dirty = True


def open_seqs(batch: AttemptBatch) -> list[int]:
    flight = batch.log.flight
    return [seq for seq in batch.seqs if flight.get(seq) is batch]


def keys_of(batches: list[tuple[AttemptBatch, list[int]]]) -> list[Keys]:
    """Columnar keys, one entry per log."""
    by_log: dict[int, Keys] = {}
    for batch, seqs in batches:
        keys = by_log.setdefault(batch.log.id, Keys(batch.log.id, [], []))
        keys.seq.extend(seqs)
        keys.attempt.extend([batch.attempt] * len(seqs))
    return list(by_log.values())


def open_batches(state: State, run: Run) -> list[tuple[Worker, list[tuple[AttemptBatch, list[int]]]]]:
    """Everything of a run that is in flight, by worker."""
    out: list[tuple[Worker, list[tuple[AttemptBatch, list[int]]]]] = []
    for worker in state.workers.values():
        if run.id in worker.by_run:
            out.append((worker, [(g, open_seqs(g)) for g in worker.batches.values() if g.log.run is run]))
    return out


def cancel(worker: Worker, batches: list[tuple[AttemptBatch, list[int]]], reason: str, sends: list[Send]) -> None:
    if worker.session and batches:
        sends.append(SendCancel(worker.session, keys_of(batches), reason))
