"""Runs as a whole: opening, ending and what becomes of their work then."""

from __future__ import annotations

from rollout.model import events as names
from rollout.model.item import AttemptEnd, ItemSpec, Key
from rollout.model.run import ENDED, RunSpec, RunState

from rollout_coordinator.core import policies
from rollout_coordinator.core.attempts import cancel, close, run_grants
from rollout_coordinator.core.prefer import watch
from rollout_coordinator.core.state import LaneState, Log, Run, Shape, SpecInfo, State, touch, touch_run
from rollout_coordinator.core.step import AttemptRow, Emit, RunMoved, RunRow, SendRunEnded, SpecRow
from rollout_coordinator.core.tables import RUN
from rollout_coordinator.core.window import drop_window

TALLIES = ("attempts", "retried", "worker_lost", "stale", "units_in", "units_out")
LIVE = frozenset({RunState.RUNNING, RunState.PAUSED, RunState.INTERRUPTED})


def live(run: Run) -> bool:
    return run.state in LIVE


def open_run(c: State, spec: RunSpec) -> Run:
    """A run and its empty root log."""
    run = make_run(c, spec, RunState.RUNNING, c.now.wall_ms)
    run.root = make_log(c, run, None)
    touch_run(c, run)
    c.step.sends.append(
        Emit(names.RUN_SUBMITTED, "info", {"run_id": run.id, "workload": spec.workload, "name": spec.name})
    )
    return run


def make_run(c: State, spec: RunSpec, state: RunState, created_ms: int) -> Run:
    run = Run(spec, state, created_ms)
    for lane in spec.lanes:
        run.lanes[lane.name] = LaneState(lane.name, lane.max_in_flight)
    run.policies = policies.compile_policies(spec)
    run.tracked = bool(run.policies)
    set_priority(run, spec.priority)
    c.runs[run.id] = run
    return run


def set_priority(run: Run, priority: int) -> None:
    run.priority = priority
    run.weight = 2.0 ** max(-32, min(32, priority))


def make_log(c: State, run: Run, parent: Key | None, number: int = 0) -> Log:
    if not number:
        number, c.next_log = c.next_log, c.next_log + 1
    log = Log(number, run, parent)
    run.logs[number] = log
    c.logs[number] = log
    if parent is not None:
        c.logs[parent.log].children[parent.seq] = log
    touch(c, log)
    return log


def intern_spec(c: State, run: Run, spec: ItemSpec, write: bool = True) -> SpecInfo:
    """The run's entry for this spec; a row the first time."""
    info = run.by_spec.get(spec)
    if info is not None:
        return info
    lane = run.lanes.get(spec.lane)
    if lane is None:
        lane = run.lanes[spec.lane] = LaneState(spec.lane, 0)
    key = (spec.executor, spec.require_roles, spec.require_labels, spec.require_plugin, spec.resources)
    shape = run.shapes.get(key)
    if shape is None:
        shape = run.shapes[key] = Shape(spec, run.spec.workload)
    info = SpecInfo(len(run.specs), spec, lane, shape)
    run.specs.append(info)
    run.by_spec[spec] = info
    if spec.group:
        run.tracked = True
        run.by_group.setdefault(spec.group, []).append(info)
    if spec.affinity or spec.cost:
        watch(run, shape)
    if write:
        c.step.writes.specs.append(SpecRow(run.id, info.index, spec))
    return info


def row(run: Run) -> RunRow:
    return RunRow(
        run.spec, run.state, run.reason, run.root.id, run.created_ms, run.updated_ms, run.ended_ms,
        run.stop_submitting, run.pausing_until_ms, run.survivors, run.priority,
    )  # fmt: skip


def end(c: State, run: Run, cause: str, reason: str) -> None:
    """Complete, fail or kill: what is pending is left in the ledger, what is in flight is cancelled.

    No result rows are written for items that never ran; a late result of a cancelled attempt is stale. A run that can
    be continued keeps its exclusive attempts in flight, as survivors, until their worker says that they are over (or is
    lost): they would overlap with those of the run that goes on.
    """
    run.state = RUN.move(run.state, cause)
    run.reason = reason
    run.ended_ms = c.now.wall_ms
    run.pausing_until_ms = 0
    drop_flight(c, run, f"run {run.state.value}", all=run.state is RunState.COMPLETED)
    run.survivors = survivors(c, run)
    touch_run(c, run)
    for log in run.logs.values():
        shut(c, log)
        if log.parent is not None:
            fold(c, log)
    keep_for_now(c, run)
    event = names.RUN_COMPLETED if run.state is RunState.COMPLETED else f"run_{run.state.value}"
    _, done, failed, cancelled, skipped = run.root.counts
    fields = {
        "run_id": run.id, "reason": reason, "items": run.root.submitted, "done": done, "failed": failed,
        "cancelled": cancelled, "skipped": skipped,
    }  # fmt: skip
    c.step.sends.append(Emit(event, "info", fields))
    c.step.sends.append(RunMoved(run.id))
    for worker in c.workers.values():
        if worker.session:
            c.step.sends.append(SendRunEnded(worker.session, run.id, run.state.value))


def keep_for_now(c: State, run: Run) -> None:
    """An ended run is in memory for those who ask for it soon."""
    if c.settings.ended_on_disk:
        c.ended.pop(run.id, None)
        c.ended[run.id] = c.now.mono


def survivors(c: State, run: Run) -> tuple[tuple[int, int, int, str], ...]:
    """(log, seq, attempt, worker) of everything that is in flight."""
    return tuple(
        (grant.log.id, seq, grant.attempt, worker.id)
        for worker, grants in run_grants(c, run)
        for grant, seqs in grants
        for seq in seqs
    )


def drop_flight(c: State, run: Run, reason: str, *, all: bool) -> None:
    """Take every attempt of the run away from its worker; without `all`, the exclusive ones stay in flight."""
    for worker, grants in run_grants(c, run):
        cancel(worker, grants, reason, c.step.sends)
        for grant, seqs in grants:
            if grant.info.spec.exclusive and not all:
                continue
            for seq in seqs:
                c.step.writes.attempts.append(
                    AttemptRow(
                        grant.log.id,
                        seq,
                        grant.attempt,
                        worker.id,
                        AttemptEnd.RELEASED,
                        "run_ended",
                        reason,
                        c.now.wall_ms,
                    )
                )
            if seqs:
                close(c, grant, seqs)


def shut(c: State, log: Log) -> None:
    """Nothing of this log will run any more."""
    log.closed = True
    drop_window(c, log)
    log.chains.clear()
    log.queues.clear()
    log.parked.clear()
    log.outcomes.clear()
    log.members.clear()
    log.reader = None
    c.reading.pop(log.id, None)
    c.timers = [timer for timer in c.timers if timer[2] != log.id]
    c.retries = [retry for retry in c.retries if retry[2] != log.id]


def ended(run: Run) -> bool:
    return run.state in ENDED


def forget(c: State, run: Run) -> None:
    """Out of memory; the ledger has all of it."""
    for log in list(run.logs.values()):
        forget_log(c, log)
    del c.runs[run.id]
    c.ended.pop(run.id, None)


def forget_log(c: State, log: Log) -> None:
    shut(c, log)
    if log.parent is not None:
        parent = c.logs.get(log.parent.log)
        if parent is not None:
            parent.children.pop(log.parent.seq, None)
    c.logs.pop(log.id, None)
    log.run.logs.pop(log.id, None)


def fold(c: State, log: Log) -> None:
    """A child log's tallies move to its run's root, so that the run's do not depend on which logs are in memory."""
    root = log.run.root
    for name in TALLIES:
        setattr(root, name, getattr(root, name) + getattr(log, name))
        setattr(log, name, 0)
    touch(c, root)
    touch(c, log)


def forget_over(c: State) -> None:
    """At the end of a step, when their last rows are among its writes."""
    for log in c.over:
        forget_log(c, log)
    c.over = []


def forget_ended(c: State) -> None:
    """Runs that ended, or were asked for, `keep_ended` ago: whoever wants them later has them from the ledger."""
    for run_id, since in list(c.ended.items()):
        if c.now.mono - since < c.settings.keep_ended:
            return
        run = c.runs.get(run_id)
        if run is None or not ended(run):
            del c.ended[run_id]
        elif not any(log.checking or log.flight for log in run.logs.values()):
            forget(c, run)
