"""What an operator may do to a run.

| command  | from                          | effect |
|----------|-------------------------------|--------|
| pause    | running                       | dispatch stops; every attempt answers with its result or its release; what has not by the deadline makes the run interrupted, survivors listed |
| resume   | paused                        | running |
|          | interrupted, failed, killed   | running; only what has no result yet runs |
| kill     | running, paused, interrupted  | attempts are cancelled; the run ends; what never ran stays without a result; exclusive attempts are survivors until they have stopped |
| priority | any                           | share of the workers |
| delete   | completed, failed, killed, or any with force (killed first) | its rows go |

`continue` is another name of `resume`. Asking for the state a run is already in changes nothing and is no error.
"""  # noqa: E501

from __future__ import annotations

from rollout.model.errors import InputError, StateError
from rollout.model.run import RunState

from rollout_coordinator.core import commit, replay, runs
from rollout_coordinator.core.events import RunCommand, RunDelete
from rollout_coordinator.core.state import Run, State, reply, touch_run
from rollout_coordinator.core.status import run_view
from rollout_coordinator.core.step import Emit, RunMoved, SendPause
from rollout_coordinator.core.transitions import RUN

_ALREADY = {
    "pause": (RunState.PAUSED,),
    "resume": (RunState.RUNNING,),
    "kill": (RunState.KILLED,),
    "continue": (RunState.RUNNING,),
}
_INSTEAD = {
    ("pause", RunState.INTERRUPTED): "it does not dispatch; `resume` or `kill` it",
    ("pause", RunState.KILLED): "`resume` goes on with it",
    ("pause", RunState.FAILED): "`resume` goes on with it",
    ("kill", RunState.FAILED): "it has ended; `delete` removes it, `resume` goes on with it",
}


def command(state: State, event: RunCommand) -> None:
    run = replay.find_run(state, event)
    if run is None:
        return
    verb = event.verb
    if verb in ("resume", "continue"):
        verb = "resume" if run.state is RunState.PAUSED else "continue"
    if verb == "priority":
        runs.set_priority(run, event.priority)
        touch_run(state, run)
        state.effects.dispatch = True
    elif verb not in _ALREADY:
        error = InputError(f"unknown verb {verb!r}; known are pause, resume, kill, priority")
        reply(state, event.request, error=error)
        return
    elif run.state not in _ALREADY[verb]:
        if not RUN.allows(run.phase, verb):
            hint = _INSTEAD.get((verb, run.state), "it has ended" if runs.ended(run) else "wait")
            error = StateError(f"run {run.id} is {run.state.value}, so `{event.verb}` is not possible; {hint}")
            reply(state, event.request, error=error)
            return
        _VERBS[verb](state, run, event.reason, event.by)
        state.step.sends.append(RunMoved(run.id))
    reply(state, event.request, run_view(state, run))


def pause(state: State, run: Run, reason: str, by: str) -> None:
    run.move("pause")
    run.reason = reason
    touch_run(state, run)
    if run.in_flight or run.waiting:
        run.pausing_until_ms = state.now.wall_ms + run.spec.pause_timeout_ms
    else:
        run.move("stopped")
    for worker in state.workers.values():
        if worker.session and run.id in worker.by_run:
            state.step.sends.append(SendPause(worker.session, run.id, run.spec.pause_timeout_ms))
    fields = {
        "run_id": run.id, "name": run.spec.name, "in_flight": run.in_flight + run.waiting, "by": by, "reason": reason,
    }  # fmt: skip
    state.step.sends.append(Emit("run_paused", "info", fields))


def resume(state: State, run: Run, reason: str, by: str) -> None:
    run.move("resume")
    _go(state, run, reason, "run_resumed", by)


def _go(state: State, run: Run, reason: str, event: str, by: str) -> None:
    run.reason = reason
    run.busy_at = state.now.mono
    run.ended_by = ""
    run.ended_ms = 0
    run.survivors = ()
    touch_run(state, run)
    for log in run.logs.values():
        state.effects.window[log.id] = log
        state.effects.accepted[log.id] = log
    state.effects.dispatch = True
    fields = {"run_id": run.id, "name": run.spec.name, "by": by, "reason": reason}
    state.step.sends.append(Emit(event, "info", fields))


def kill(state: State, run: Run, reason: str, by: str) -> None:
    run.ended_by = by
    runs.end(state, run, "kill", reason or ("" if by else "killed by an operator"))


def go_on(state: State, run: Run, reason: str, by: str) -> None:
    ended = runs.ended(run)
    run.move("continue")
    if ended:
        state.ended.pop(run.id, None)
        run.root.progress.tally = [0, 0]  # a stop_early that fired counts anew
        for log in run.logs.values():
            replay.reopen(state, log)
    _go(state, run, reason, "run_continued", by)
    commit.finish_if_complete(state, run)


_VERBS = {"pause": pause, "resume": resume, "kill": kill, "continue": go_on}


def delete(state: State, event: RunDelete) -> None:
    if replay.load_ended_run(state, event.run_id, event):
        return
    run = state.runs.get(event.run_id)
    if run is None:
        # an ended run of an earlier leader is on disk only; deleting what is not there harms nothing
        state.step.writes.deleted_runs.append(event.run_id)
        reply(state, event.request)
        return
    if not runs.ended(run):
        if not event.force:
            error = StateError(f"run {run.id} is {run.state.value}; kill it first, or delete it with --force")
            reply(state, event.request, error=error)
            return
        kill(state, run, "deleted", "")
    runs.drop_flight(state, run, "run deleted", all=True)
    forget_writes(state, run)
    runs.forget(state, run)
    state.step.writes.deleted_runs.append(run.id)
    state.step.sends.append(RunMoved(run.id))
    reply(state, event.request)


def forget_writes(state: State, run: Run) -> None:
    """Drop rows of this very step that belong to the deleted run, which must not be written after it."""
    writes, logs = state.step.writes, run.logs
    writes.items = [r for r in writes.items if r.log not in logs]
    writes.results = [r for r in writes.results if r.log not in logs]
    writes.attempts = [r for r in writes.attempts if r.log not in logs]
    writes.specs = [r for r in writes.specs if r.run_id != run.id]
    writes.prune = [r for r in writes.prune if r[0] not in logs]
