"""Memory of a new leader, restored from what the ledger says is not finished.

Attempts stay with their workers, which get a full fresh deadline to say Hello; pending rows come back through the
window.
"""

from __future__ import annotations

from rollout.model.errors import NotFoundError
from rollout.model.item import Key, Outcome
from rollout.model.run import RunState
from rollout.model.worker import WorkerState

from rollout_coordinator.core import attempts, runs
from rollout_coordinator.core.chains import resume_chains
from rollout_coordinator.core.events import Event, Now, RequestOfRun, ResultsLoaded, RunLoaded
from rollout_coordinator.core.items import is_accepted
from rollout_coordinator.core.logs import make_log
from rollout_coordinator.core.progress import Progress
from rollout_coordinator.core.state import Assignment, AttemptBatch, History, Log, Run, State, Worker, reply
from rollout_coordinator.core.step import LoadResults, LoadRun, LogRow, Snapshot
from rollout_coordinator.core.transitions import RunPhase
from rollout_coordinator.core.workers import ANY_HOST, UNKNOWN, extend_deadline

PAGE = 8192  # outcomes read at once


def restore(state: State, snapshot: Snapshot, now: Now) -> None:
    state.now = now
    state.next_log, state.next_batch = snapshot.next_log, snapshot.next_batch
    restore_runs(state, snapshot)
    for worker_row in snapshot.workers:
        worker = Worker(worker_row.incarnation, worker_row.host_id, worker_row.inventory, worker_row.state, now)
        worker.registered_ms, worker.ended_ms, worker.reason = (
            worker_row.registered_ms, worker_row.ended_ms, worker_row.reason,
        )  # fmt: skip
        extend_deadline(state, worker, now.mono)
        state.workers[worker.id] = worker
    restore_attempts(state, snapshot, now)
    for log in state.logs.values():
        revive(state, log)
    for run in state.runs.values():
        if run.phase is RunPhase.PAUSING and not run.in_flight:
            state.effects.idle[run.id] = run
        if runs.ended(run):  # some of its attempts may not be over
            runs.keep_for_now(state, run)


def revive(state: State, log: Log) -> None:
    if log.parent is not None and is_accepted(state.logs[log.parent.log], log.parent.seq):
        log.move("close")
        if not log.flight:
            state.effects.over.append(log)
    reopen(state, log)
    if runs.ended(log.run):
        log.move("close")


def run_loaded(state: State, event: RunLoaded) -> None:
    """Add an ended run of an earlier leader that a client asked for, and handle what waited for it."""
    if event.snapshot is not None and event.run_id not in state.runs:
        restore_runs(state, event.snapshot)
        for log in state.runs[event.run_id].logs.values():
            revive(state, log)
        runs.keep_for_now(state, state.runs[event.run_id])
    state.opened.add(event.run_id)
    state.effects.redeliver += state.opening.pop(event.run_id, [])


def load_ended_run(state: State, run_id: str, event: Event) -> bool:
    """Ask the ledger for a run that this core does not know, and return True; the event is delivered again then."""
    known = run_id in state.runs or run_id in state.opened
    if known or not state.settings.ended_on_disk:
        return False
    waiting = state.opening.setdefault(run_id, [])
    waiting.append(event)
    if len(waiting) == 1:
        load, state.next_load = state.next_load, state.next_load + 1
        state.step.loads.append(LoadRun(load, run_id))
    return True


def find_run(state: State, event: RequestOfRun, hint: str = "`rollout run list` shows all") -> Run | None:
    """Return the run of a client's request, or None if the ledger is asked for it or the reply says that there is
    none."""
    if load_ended_run(state, event.run_id, event):
        return None
    run = state.runs.get(event.run_id)
    if run is None:
        reply(state, event.request, error=NotFoundError(f"no run {event.run_id} here; {hint}"))
    return run


def restore_runs(state: State, snapshot: Snapshot) -> None:
    roots: dict[str, int] = {}
    for row in snapshot.runs:
        pausing = row.state is RunState.PAUSED and row.pausing_until_ms
        phase = RunPhase.PAUSING if pausing else RunPhase(row.state.value)
        run = runs.make_run(state, row.spec, phase, row.created_ms)
        run.reason, run.updated_ms, run.ended_ms = row.reason, row.updated_ms, row.ended_ms
        run.pausing_until_ms, run.survivors, run.ended_by = row.pausing_until_ms, tuple(row.survivors), row.ended_by
        runs.set_priority(run, row.priority)
        roots[run.id] = row.root_log
    for spec in sorted(snapshot.specs, key=lambda s: (s.run_id, s.index)):
        if spec.run_id in state.runs:
            runs.add_spec(state, state.runs[spec.run_id], spec.spec)
    for log_row in sorted(snapshot.logs, key=lambda row: row.log):
        run = state.runs.get(log_row.run_id)
        if run is not None:
            log = restore_log(state, run, log_row, snapshot.accepted.get(log_row.log, []))
            if log.id == roots[run.id]:
                run.root = log
    for log_id, index, seq in sorted(snapshot.won, key=lambda won: won[2]):
        log = state.logs[log_id]
        group = log.run.specs[index].spec.group
        if group:
            log.groups.setdefault(group, seq)
    for lane_row in snapshot.lanes:
        run = state.runs.get(lane_row.run_id)
        if run is not None and lane_row.lane in run.lanes:
            lane = run.lanes[lane_row.lane]
            lane.done, lane.failed, lane.consecutive = lane_row.done, lane_row.failed, lane_row.consecutive_failures
            lane.pruned_at = lane_row.pruned_at


def restore_log(state: State, run: Run, row: LogRow, accepted: list[tuple[int, int]]) -> Log:
    parent = Key(row.parent_log, row.parent_seq) if row.parent_log else None
    log = make_log(state, run, parent, row.log)
    log.submitted, log.sealed, log.cursor = row.submitted, row.sealed, row.cursor
    log.counts = [0, row.done, row.failed, row.cancelled, row.skipped]
    log.invalid = row.invalid
    log.attempts, log.retried, log.worker_lost, log.stale = row.attempts, row.retried, row.worker_lost, row.stale
    log.units_in, log.units_out = row.units_in, row.units_out
    log.progress = Progress.from_json(row.extra)
    if parent is None:
        run.busy_count = sum(log.counts)
    for first, last in accepted:
        log.accepted.add(first, last)
    return log


def restore_attempts(state: State, snapshot: Snapshot, now: Now) -> None:
    assignments: dict[int, Assignment] = {}
    batches: dict[tuple[int, int, int, str, History, int], list[int]] = {}
    for one in snapshot.open_attempts:
        if one.log in state.logs:
            alone = one.seq if state.logs[one.log].run.specs[one.spec].spec.chain else -1
            before = History(
                one.attempt - 1, one.failures, one.losses, failed_on=one.failed_on, failed_by=one.failed_by
            )
            batches.setdefault((one.batch, one.log, one.spec, one.worker, before, alone), []).append(one.seq)
    for (number, log_id, spec, incarnation, before, _), seqs in batches.items():
        worker = state.workers.get(incarnation)
        if worker is None:
            worker = state.workers[incarnation] = Worker(incarnation, ANY_HOST, UNKNOWN, WorkerState.READY, now)
            extend_deadline(state, worker, now.mono)
        assignment = assignments.setdefault(number, Assignment(number))
        log = state.logs[log_id]
        info = log.run.specs[spec]
        batch = AttemptBatch(next(state.numbers), log, info, worker, assignment, before, seqs, now.mono)
        batch.maybe_started = True
        if info.spec.timeout_ms:
            batch.started_at = dict.fromkeys(seqs, now.mono)
        attempts.open_batch(state, batch, 0)


def reopen(state: State, log: Log) -> None:
    """Let a log run: its items that are neither accepted nor in flight are read from the ledger again."""
    parent = log.parent
    if parent is not None and is_accepted(state.logs[parent.log], parent.seq):
        return
    log.move("close" if parent is not None and state.logs[parent.log].closed else "open")
    log.window_end = 0 if log.by_arrival else log.cursor
    log.loaded_ahead.clear()
    if log.submitted:
        log.replayed = True
    if log.run.tracked and parent is None and not log.by_arrival and len(log.accepted):
        log.move("reread")
        log.readings += 1
        state.rereads.append(log)
    resume_chains(log)
    state.effects.window[log.id] = log
    state.effects.accepted[log.id] = log


def reread(state: State) -> None:
    """Read outcomes of accepted results before the cursor moves again, because policies need them."""
    for log in state.rereads:
        read_page(state, log, log.readings, log.cursor, max(log.accepted.hi) + 1)
    state.rereads = []


def read_page(state: State, log: Log, reading: int, first: int, end: int) -> None:
    def found(event: ResultsLoaded) -> None:
        if not log.rereading or log.readings != reading:
            return  # its run has ended meanwhile, and forgot what was read before
        for seq, outcome, spec in zip(event.seq, event.outcome, event.spec, strict=True):
            if seq >= log.cursor:
                log.outcomes.setdefault(seq, (int(Outcome(outcome)), spec))
                if log.run.specs[spec].spec.group:
                    attempts.join_group(log, log.run.specs[spec], [seq])
        if first + PAGE < end:
            read_page(state, log, reading, first + PAGE, end)
        else:
            log.move("read")
            state.effects.accepted[log.id] = log
            state.effects.window[log.id] = log

    state.ask(log, lambda load: LoadResults(load, log.id, first, min(PAGE, end - first), False), found)
