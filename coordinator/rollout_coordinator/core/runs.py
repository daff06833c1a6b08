"""Runs as a whole: opened, paused, ended, and the fate of their work then."""

from __future__ import annotations

from dataclasses import replace

from rollout.model import events as names
from rollout.model.item import AttemptEnd, ItemLimits, ItemSpec, limits_of
from rollout.model.run import ENDED, RunSpec, RunState

from rollout_coordinator.core import attempts, policies, rates, row_failures
from rollout_coordinator.core.index import tell_apart
from rollout_coordinator.core.logs import close_log, fold_counters, forget_log, open_log
from rollout_coordinator.core.state import LaneState, Requirements, Run, SpecInfo, State, touch, touch_run
from rollout_coordinator.core.step import AttemptRow, Emit, RunMoved, SendRunEnded, SpecRow
from rollout_coordinator.core.transitions import RunPhase

LIVE = frozenset({RunState.RUNNING, RunState.PAUSED, RunState.INTERRUPTED})


def live(run: Run) -> bool:
    return run.state in LIVE


def open_run(state: State, spec: RunSpec, by: str = "", address: str = "") -> Run:
    """Open a run with an empty root log. `by`, from `address`, is the submitter, for people."""
    run = make_run(state, spec, RunPhase.RUNNING, state.now.wall_ms)
    run.root = open_log(state, run, None)
    touch_run(state, run)
    fields = {"run_id": run.id, "workload": spec.workload, "name": spec.name, "by": by, "address": address}
    state.step.sends.append(Emit(names.RUN_SUBMITTED, "info", fields))
    return run


def make_run(state: State, spec: RunSpec, phase: RunPhase, created_ms: int) -> Run:
    run = Run(spec, phase, created_ms)
    for lane in spec.lanes:
        run.lanes[lane.name] = LaneState(lane.name, lane.max_in_flight)
    run.policies = policies.compile_policies(spec)
    run.tracked = any(policy.decide for policy in run.policies)
    run.limits = next((policy.limits for policy in run.policies if policy.limits), None)
    run.looked_at = run.busy_at = state.now.mono
    set_priority(run, spec.priority)
    state.runs[run.id] = run
    return run


def set_priority(run: Run, priority: int) -> None:
    run.priority = priority
    run.weight = 2.0 ** max(-32, min(32, priority))


def intern_spec(state: State, run: Run, spec: ItemSpec) -> SpecInfo:
    """Return the run's entry for this spec, with a new row the first time."""
    info = run.by_spec.get(spec)
    if info is None:
        info = add_spec(state, run, spec)
        state.step.writes.specs.append(SpecRow(run.id, info.index, spec))
    return info


def add_spec(state: State, run: Run, spec: ItemSpec) -> SpecInfo:
    """Add an entry, even if another has become equal to it because limits changed."""
    lane = run.lanes.get(spec.lane)
    if lane is None:
        lane = run.lanes[spec.lane] = LaneState(spec.lane, 0)
    key = (spec.executor, spec.require_roles, spec.require_labels, spec.require_plugin, spec.resources)
    requirements = run.requirements.get(key)
    if requirements is None:
        requirements = run.requirements[key] = Requirements(spec, run.spec.workload, run.id)
    info = SpecInfo(len(run.specs), spec, lane, requirements)
    run.specs.append(info)
    run.by_spec.setdefault(spec, info)
    if spec.group:
        run.tracked = True
        run.by_group.setdefault(spec.group, []).append(info)
    if spec.affinity or spec.cost:
        tell_apart(run, requirements)
    return info


def set_limits(state: State, run: Run, limits: ItemLimits) -> None:
    """Set limits of the run's own items without a result, including those that run (`workers.overdue`)."""
    changed: dict[int, SpecRow] = {}
    for info in run.specs:
        if not info.spec.executor and limits_of(info.spec) != limits:
            info.spec = replace(info.spec, **limits._asdict())
            changed[info.index] = SpecRow(run.id, info.index, info.spec)
    run.by_spec = {info.spec: info for info in reversed(run.specs)}
    writes = state.step.writes
    writes.specs = [row for row in writes.specs if row.run_id != run.id or row.index not in changed]
    writes.specs += changed.values()
    for _, held in attempts.of_run(state, run):
        for batch, _ in held:
            if batch.info.index in changed:
                attempts.keep_time(state, batch)


def end(state: State, run: Run, cause: str, reason: str) -> None:
    """Complete, fail or kill a run: what is pending stays in the ledger, what is in flight is cancelled.

    No result rows are written for items that never ran; a late result of a cancelled attempt is stale. A run that can
    be resumed keeps its exclusive attempts in flight, as survivors, until their worker says that they are over or is
    lost: they would overlap with those of the resumed run.
    """
    run.move(cause)
    rates.note_busy(state, run, held=False)
    touch(state, run.root)
    run.reason = reason
    run.ended_ms = state.now.wall_ms
    drop_flight(state, run, f"run {run.state.value}", all=run.state is RunState.COMPLETED)
    run.survivors = survivors(state, run)
    touch_run(state, run)
    for log in run.logs.values():
        close_log(state, log)
        if log.parent is not None:
            fold_counters(state, log)
    keep_for_now(state, run)
    event = names.RUN_COMPLETED if run.state is RunState.COMPLETED else f"run_{run.state.value}"
    _, done, failed, cancelled, skipped = run.root.counts
    fields = {
        "run_id": run.id, "name": run.spec.name, "reason": reason.partition("\n")[0], "items": run.root.submitted,
        "done": done, "failed": failed, "cancelled": cancelled, "skipped": skipped, **run.failures.told(failed),
    }  # fmt: skip
    if run.state is RunState.KILLED and run.ended_by:
        fields["by"] = run.ended_by
    row_failures.tell_rest(state, run)
    level = "warning" if run.state is RunState.FAILED else "info"
    state.step.sends.append(Emit(event, level, fields))
    state.step.sends.append(RunMoved(run.id))
    for worker in state.workers.values():
        if worker.session:
            state.step.sends.append(SendRunEnded(worker.session, run.id, run.state.value))


def keep_for_now(state: State, run: Run) -> None:
    """Keep an ended run in memory for callers that ask for it soon."""
    if state.settings.ended_on_disk:
        state.ended.pop(run.id, None)
        state.ended[run.id] = state.now.mono


def survivors(state: State, run: Run) -> tuple[tuple[int, int, int, str], ...]:
    """Return (log, seq, attempt, worker) of everything in flight."""
    return tuple(
        (batch.log.id, seq, batch.attempt, worker.id)
        for worker, held in attempts.of_run(state, run)
        for batch, seqs in held
        for seq in seqs
    )


def drop_flight(state: State, run: Run, reason: str, *, all: bool) -> None:
    """Take every attempt of the run from its worker; without `all`, exclusive ones stay in flight."""
    for worker, held in attempts.of_run(state, run):
        attempts.cancel(state, worker, held, reason)
        for batch, seqs in held:
            if not seqs or (batch.info.spec.exclusive and not all):
                continue
            for seq in seqs:
                began_ms = attempts.began(state, batch, seq, tried=False)
                attempts.counted_in(batch.log).retried += began_ms > 0  # it is tried again if the run goes on
                row = AttemptRow(
                    batch.log.id, seq, batch.attempt, worker.id, AttemptEnd.RELEASED, "run_ended", reason,
                    state.now.wall_ms, 0, began_ms,
                )  # fmt: skip
                state.step.writes.attempts.append(row)
            attempts.end(state, batch, seqs, "release")


def attempts_over(state: State) -> None:
    """Handle runs whose last attempt in flight ended in this step: nothing survives, and a pause is complete."""
    for run in state.effects.idle.values():
        if run.in_flight or run.waiting:
            continue
        if run.survivors and ended(run):
            run.survivors = ()
            touch_run(state, run)
        elif run.phase is RunPhase.PAUSING:
            run.move("stopped")
            state.effects.runs[run.id] = run


def pause_deadlines(state: State) -> None:
    """Interrupt runs whose pause takes too long, and report the attempts that survive."""
    for run in list(state.runs.values()):
        if run.phase is not RunPhase.PAUSING or not (run.in_flight or run.waiting):
            continue
        if state.now.wall_ms < run.pausing_until_ms:
            state.wake_by(state.now.mono + (run.pausing_until_ms - state.now.wall_ms) / 1000)
            continue
        run.move("pause_timeout")
        run.survivors = survivors(state, run)
        run.reason = f"{len(run.survivors)} attempts did not stop in time"
        touch_run(state, run)
        fields = {"run_id": run.id, "name": run.spec.name, "survivors": len(run.survivors)}
        state.step.sends.append(Emit("run_interrupted", "warning", fields))
        state.step.sends.append(RunMoved(run.id))


def ended(run: Run) -> bool:
    return run.state in ENDED


def forget(state: State, run: Run) -> None:
    """Drop a run from memory; the ledger has all of it."""
    for log in list(run.logs.values()):
        forget_log(state, log)
    del state.runs[run.id]
    state.ended.pop(run.id, None)


def forget_ended(state: State) -> None:
    """Forget runs that ended, or were asked for, `keep_ended` ago; later callers get them from the ledger."""
    for run_id, since in list(state.ended.items()):
        if state.now.mono - since < state.settings.keep_ended:
            return
        run = state.runs.get(run_id)
        if run is None or not ended(run):
            del state.ended[run_id]
        elif not any(log.checking or log.flight for log in run.logs.values()):
            forget(state, run)
