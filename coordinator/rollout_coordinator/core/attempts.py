"""Attempts in flight: they begin and end here, and all their counters change here."""

from __future__ import annotations

from collections.abc import Iterable
from zlib import crc32

from rollout.model.item import AttemptEnd
from rollout.model.run import ENDED

from rollout_coordinator.core import chains, index, items, object_retention, queues, run_limits
from rollout_coordinator.core.events import Keys
from rollout_coordinator.core.state import AttemptBatch, History, Log, Run, SpecInfo, State, Worker, touch
from rollout_coordinator.core.step import NO_EVIDENCE, AttemptRow, Evidence, SendCancel

Held = list[tuple[AttemptBatch, list[int]]]
"""Attempts by batch."""

_CAUSE = {
    AttemptEnd.FAILED: "retry",
    AttemptEnd.TIMEOUT: "retry",
    AttemptEnd.WORKER_LOST: "worker_lost",
    AttemptEnd.RELEASED: "release",
    AttemptEnd.REVOKED: "revoke",
    AttemptEnd.PAUSED: "release",
    AttemptEnd.DROPPED: "drop",
}
_TRIED = frozenset({"result", "retry", "worker_lost"})
"""Causes that imply that the attempt began, even if its start was not reported."""

_FINAL = frozenset({"result", "close"})
"""Causes after which the item has a result."""

# ---- which are open


def open_seqs(batch: AttemptBatch) -> list[int]:
    flight = batch.log.flight
    return [seq for seq in batch.seqs if flight.get(seq) is batch]


def current(state: State, worker: Worker, keys: Keys) -> list[tuple[AttemptBatch, int]]:
    """Return those of the keys that are this worker's present attempts."""
    log = state.logs.get(keys.log)
    if log is None:
        return []
    out: list[tuple[AttemptBatch, int]] = []
    for seq, attempt in zip(keys.seq, keys.attempt, strict=True):
        batch = log.flight.get(seq)
        if batch is not None and batch.worker is worker and batch.attempt == attempt:
            out.append((batch, seq))
    return out


def current_by_batch(state: State, worker: Worker, keys: Keys) -> dict[AttemptBatch, list[int]]:
    """Return the present attempts by batch; items that were assigned together are mostly reported together."""
    out: dict[AttemptBatch, list[int]] = {}
    log = state.logs.get(keys.log)
    if log is None:
        return out
    last: AttemptBatch | None = None
    seqs: list[int] = []
    for seq, attempt, batch in zip(keys.seq, keys.attempt, map(log.flight.get, keys.seq), strict=True):
        if batch is None or batch.worker is not worker or batch.attempt != attempt:
            continue
        if batch is not last:
            last, seqs = batch, out.setdefault(batch, [])
        seqs.append(seq)
    return out


def of_run(state: State, run: Run) -> list[tuple[Worker, Held]]:
    """Return everything of a run that is in flight, by worker."""
    return [
        (worker, [(batch, open_seqs(batch)) for batch in worker.batches.values() if batch.log.run is run])
        for worker in state.workers.values()
        if run.id in worker.by_run
    ]


def keys_of(held: Held) -> list[Keys]:
    """Return columnar keys, one entry per log."""
    by_log: dict[int, Keys] = {}
    for batch, seqs in held:
        keys = by_log.setdefault(batch.log.id, Keys(batch.log.id, [], []))
        keys.seq.extend(seqs)
        keys.attempt.extend([batch.attempt] * len(seqs))
    return list(by_log.values())


def cancel(state: State, worker: Worker, held: Held, reason: str) -> None:
    """Tell the worker to cancel them."""
    if worker.session and held:
        state.step.sends.append(SendCancel(worker.session, keys_of(held), reason))


# ---- beginning


def open_batch(state: State, batch: AttemptBatch, size: int) -> None:
    """Record that the worker has `batch`, or has had it since the previous leader. `size` is the inline bytes of its
    payloads."""
    if batch.maybe_started:
        items.adopt(batch)
    else:
        items.assign(batch)
    worker, log, n = batch.worker, batch.log, len(batch.seqs)
    run = log.run
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


def keep_time(state: State, batch: AttemptBatch) -> None:
    """Record that its limit changed while its worker has it: only the core knows the new one."""
    state.timed.pop(batch.id, None)
    if batch.info.spec.timeout_ms:
        state.timed[batch.id] = batch
        now = state.now
        for seq, at_ms in batch.started.items():
            batch.started_at.setdefault(seq, now.mono - max(0, now.wall_ms - at_ms) / 1000)


def join_group(log: Log, info: SpecInfo, seqs: Iterable[int]) -> None:
    """Index the items by group, so that they are found once the group is won."""
    if log.parent is None:
        log.members.setdefault(info.spec.group, set()).update(seqs)


def take_capacity(run: Run, batch: AttemptBatch, n: int) -> None:
    """Take `n` places under the caps of run and lane, and of the worker's resources and credit; a negative `n` returns
    them. Parents that wait for children hold none, because the children need them."""
    worker = batch.worker
    run.in_flight += n
    if n > 0:
        run.holder = worker
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


def start(state: State, batch: AttemptBatch, seqs: list[int]) -> None:
    """Record that their worker runs them, whichever message of the worker says so."""
    begun = items.start(batch, seqs, state.now.wall_ms)
    batch.worker.running += begun
    batch.log.run.running += begun
    if batch.info.spec.timeout_ms:
        for seq in seqs:
            batch.started_at.setdefault(seq, state.now.mono)


def wait(state: State, batch: AttemptBatch, seq: int) -> None:
    """Let a parent wait for its children, and give up its places for them."""
    if seq not in batch.waiting:
        batch.waiting.add(seq)
        batch.worker.waiting += 1
        batch.log.run.waiting += 1
        take_capacity(batch.log.run, batch, -1)
        index.release(batch.log.run.index, batch.info.lane)
        state.effects.capacity_freed(batch.worker)


def stop_waiting(batch: AttemptBatch, seq: int) -> None:
    if seq in batch.waiting:
        batch.waiting.discard(seq)
        batch.worker.waiting -= 1
        batch.log.run.waiting -= 1
        take_capacity(batch.log.run, batch, 1)


# ---- ending


def counted_in(log: Log) -> Log:
    """Return the log whose row counts this log's attempts; a child log's moved to the root when its run ended."""
    return log.run.root if log.run.state in ENDED else log


def began(state: State, batch: AttemptBatch, seq: int, *, tried: bool) -> int:
    """Return the start in Unix milliseconds, 0 if it never began. `tried` says that its end implies a start."""
    return batch.started.get(seq, state.now.wall_ms if tried else 0)


def end(state: State, batch: AttemptBatch, seqs: list[int], cause: str) -> None:
    """End attempts and free what they held; `cause` is a row of the item table."""
    worker, log, info, n = batch.worker, batch.log, batch.info, len(seqs)
    run = log.run
    begun = items.end(batch, seqs, cause)
    if begun:
        worker.running -= begun
        run.running -= begun
    waiting = 0
    if batch.waiting:
        waiting = len(batch.waiting.intersection(seqs))
        batch.waiting.difference_update(seqs)
        worker.waiting -= waiting
        run.waiting -= waiting
    take_capacity(run, batch, waiting - n)
    worker.in_flight -= n
    left = worker.by_run[run.id] - n
    if left:
        worker.by_run[run.id] = left
    else:
        del worker.by_run[run.id]
        run.left_at[worker.id] = state.now.mono
    batch.open -= n
    if not batch.open:
        del worker.batches[batch.id]
        state.timed.pop(batch.id, None)
    assignment = batch.assignment
    assignment.open -= n
    if not assignment.open:
        state.step.writes.retired.append(assignment.id)
    counted = counted_in(log)
    counted.attempts += n if cause in _TRIED or (cause == "close" and batch.maybe_started) else begun
    touch(state, counted)
    state.effects.capacity_freed(worker)
    if worker.given_back and not log.children.keys().isdisjoint(seqs):
        worker.given_back.clear()  # a parent: what it held there is free
    if run.limits is not None and cause in _FINAL:
        run_limits.count_over(log, batch.failed_by, n)
    if cause in _FINAL and object_retention.has_claims(log):
        for seq in seqs:
            object_retention.settle(state, log, seq)
    if run.index.waiting:
        index.release(run.index, info.lane)
    if info.spec.chain:
        chains.attempts_ended(state, batch, seqs)
    if not run.in_flight and not run.waiting:
        state.effects.idle[run.id] = run


def end_attempt(
    state: State, batch: AttemptBatch, seq: int, how: AttemptEnd, code: str, message: str, to: str = "",
    left: Evidence = NO_EVIDENCE, retry_after_ms: int | None = None,
) -> None:  # fmt: skip
    """End an attempt whose item has no result: write evidence and make the item pending. `retry_after_ms` replaces the
    backoff of a failed attempt."""
    if batch.log.flight.get(seq) is not batch:
        return  # it went with its predecessor, earlier in the same message
    if batch.log.run.state in ENDED:  # a survivor: however it ended, nothing comes of it
        how, code, to = AttemptEnd.RELEASED, "run_ended", ""
    failures, losses, delay_ms = batch.failures, batch.losses, 0
    failed_on, failed_by = batch.failed_on, batch.failed_by
    log = batch.log
    if how in (AttemptEnd.FAILED, AttemptEnd.TIMEOUT):
        delay_ms = backoff_ms(state, batch, seq) if retry_after_ms is None else retry_after_ms
        failures += 1
        failed_on, failed_by = batch.worker.id, code
    elif how is AttemptEnd.WORKER_LOST:
        losses += 1
        log.worker_lost += 1
        state.totals["worker_lost"] += 1
    wall = state.now.wall_ms
    not_before_ms = wall + delay_ms if delay_ms else 0
    began_ms = began(state, batch, seq, tried=_CAUSE[how] in _TRIED)
    if began_ms:
        counted_in(log).retried += 1
        state.totals["retried"] += 1
    state.step.writes.attempts.append(
        AttemptRow(log.id, seq, batch.attempt, batch.worker.id, how, code, message, wall, not_before_ms, began_ms, left)
    )
    if left.units_in or left.units_out:
        counted = counted_in(log)
        counted.units_in += left.units_in
        counted.units_out += left.units_out
    if log.run.limits is not None:
        run_limits.count_units(log, left.units_in, left.units_out)
        run_limits.count_failed(log, batch.failed_by, failed_by)
        state.effects.limited[log.run.id] = log.run
    if left.keeps:
        object_retention.note_failure(log, seq)
    end(state, batch, [seq], _CAUSE[how])
    at = state.now.mono + delay_ms / 1000
    history = History(batch.attempt, failures, losses, at, to, "" if to == failed_on else failed_on, failed_by)
    queues.put_back(state, log, seq, history)
    if batch.info.spec.chain:
        drop_dependents(state, batch, seq)


def drop_dependents(state: State, batch: AttemptBatch, seq: int) -> None:
    """End the pipelined successors of an attempt that has ended."""
    for later, other in chains.dependents(batch, seq):
        cancel(state, other.worker, [(other, [later])], "predecessor changed")
        end_attempt(state, other, later, AttemptEnd.DROPPED, "predecessor_changed", f"row {seq + 1} changed")


def backoff_ms(state: State, batch: AttemptBatch, seq: int) -> int:
    """Return an exponential backoff; its jitter is a hash of the attempt, so that a replay agrees."""
    spread = crc32(f"{batch.log.run.id}/{batch.log.id}/{seq}/{batch.attempt}".encode()) / 0xFFFFFFFF
    longest = min(
        batch.info.spec.retry_backoff_ms * 2 ** min(batch.failures, 30), state.settings.retry_backoff_cap * 1000
    )
    return int(int(longest) * (0.5 + 0.5 * spread))
