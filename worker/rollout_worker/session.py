"""A worker's state machine: what it holds, what it tells the coordinator, what its children do.

`handle(event, now) -> actions`, to be carried out in that order. Nothing here waits, reads a clock or does I/O; `now`
is seconds of a clock that goes on while the machine sleeps, so that a laptop that wakes up knows it is fenced.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

from rollout.model.errors import ProtocolError
from rollout.model.item import Failure
from rollout.wire.codec import credit_to_wire, inventory_to_wire
from rollout.wire.v1 import work_pb2

from rollout_worker import session_events as ev
from rollout_worker.attempts import (
    UNSTARTED,
    AttemptKey,
    Finished,
    Held,
    Plan,
    State,
    held_from_wire,
    keys_from_wire,
    keys_to_wire,
)
from rollout_worker.child_events import ChildEvents
from rollout_worker.executors.port import Run
from rollout_worker.holding import GUARD_LATER_S, Phase, Revoke, SessionSettings
from rollout_worker.placement import ChildState
from rollout_worker.plans import Plans

__all__ = ["Phase", "Session", "SessionSettings"]

DRAIN_SLACK_S = 2.0
"""Beyond a drain's budget and the grace of cancellation: for results to be acknowledged."""


class Session(ChildEvents):
    """`plan_run` says where a run's attempts execute; AttemptError where this worker cannot run them."""

    def __init__(self, settings: SessionSettings, plan_run: Callable[[Run], Plan]) -> None:
        super().__init__(settings)
        self._plans = Plans(plan_run)
        self._hello_at = 0.0
        self._acked_at: float | None = None
        self._stopped_all = False
        self._drain_reason = ""
        self._assigned = 0
        self._over = False
        self.objects_addr = ""

    @property
    def phase(self) -> Phase:
        if self._fenced_at is not None:
            return Phase.FENCED
        if self._drain_until is not None:
            return Phase.DRAINING
        return Phase.READY if self._acked_at is not None else Phase.INIT

    def handle(self, event: ev.Event, now: float) -> list[ev.Action]:
        """ProtocolError when the coordinator, or a child, said what the protocol does not allow."""
        if self._over:
            return self._once_more(event, now)
        self.EVENTS[type(event)](self, event, now)
        if self._dispatch_due and self._fenced_at is None and not self._stopped_all:
            self._dispatch_due = False
            actions, begun = self.place.dispatch(now)
            self._actions += self._kill_times() if actions else ()
            self._actions += actions
            self._started += begun
        if self._drain_until is not None:
            self._drain_step(now)
        actions, self._actions = self._actions, []
        return actions

    # ---- the stream

    def _stream_up(self, event: ev.StreamUp, now: float) -> None:
        self._session = event.session
        self._welcomed = False
        self._hello_at = now
        self._outbox.clear()  # Welcome says which are wanted
        self._revokes.clear()  # the coordinator forgot them with the stream
        self._started.clear()
        self._released.clear()
        self._forget_ended_runs()
        # With what the fence killed: it is given back once its process is known to have ended.
        held = [h for h in self.held.values() if h.stop_reason != "drop"]
        hello = work_pb2.Hello(
            incarnation=self._settings.incarnation,
            inventory=inventory_to_wire(self._settings.inventory),
            held=keys_to_wire(h.key for h in held),
            held_started=keys_to_wire(h.key for h in held if h.begun),
            unacknowledged=keys_to_wire(self.unacknowledged),
            credit=credit_to_wire(self._credit_now()),
            draining=self._drain_until is not None,
        )
        self._actions.append(ev.Send(work_pb2.WorkUp(hello=hello)))

    def _forget_ended_runs(self) -> None:
        """Nobody says on a new stream which runs ended before it."""
        used = {h.plan.run.run_id for h in self.held.values()} | {r.run_id for r in self.unacknowledged.values()}
        for run_id in self._plans.forget_unused(used):
            self.credit.forget(run_id)

    def _stream_down(self, event: ev.StreamDown, now: float) -> None:
        self._welcomed = False
        self._session = ""

    def _frame(self, event: ev.Frame, now: float) -> None:
        frame = event.frame
        if frame.session != self._session or not self._session:
            return  # of an older stream
        kind = frame.WhichOneof("body")
        if kind == "welcome":
            self._welcome(frame.welcome, now)
            return
        if kind is None:
            raise ProtocolError("a Work frame without a body")
        if not self._welcomed:
            raise ProtocolError(f"{kind} before Welcome")
        self.FRAMES[kind](self, getattr(frame, kind), now)

    def _welcome(self, welcome: work_pb2.Welcome, now: float) -> None:
        if self._welcomed:
            raise ProtocolError("a second Welcome on one stream")
        self._welcomed = True
        self.objects_addr = welcome.objects_addr or self.objects_addr
        for key in keys_from_wire(welcome.accepted):
            self.unacknowledged.pop(key, None)
        for key in keys_from_wire(welcome.drop):
            self.unacknowledged.pop(key, None)
            self._outbox.pop(key, None)
            self._give_up(key, "drop", now)
        for key in keys_from_wire(welcome.resend):
            result = self.unacknowledged.get(key)
            if result is not None:
                self._outbox[key] = result
        self._unfence()
        self._acked(self._hello_at)
        self._tell_parents(now)
        self._dispatch_due = True

    def _assign(self, assign: work_pb2.Assign, now: float) -> None:
        for group in assign.groups:
            known = group.run.run_id in self._plans
            plan = self._plans.of(group.run)
            if isinstance(plan, Failure):
                self._refuse(group, plan)
                continue
            if not known:
                self._use_engine(group.run.run_id, plan, now)
            for held in held_from_wire(group, plan):
                key = held.key
                if key in self.held or key in self.unacknowledged:
                    continue  # told twice
                self._assigned += 1
                held.assigned = self._assigned
                self.held[key] = held
                if self._drain_until is not None:
                    self._give_up(key, "drain", now)
                elif held.remote:
                    held.state = State.FETCHING
                    self._actions.append(ev.Fetch(held))
                else:
                    self.place.enqueue(held)
        self._dispatch_due = True

    def _use_engine(self, run_id: str, plan: Plan, now: float) -> None:
        """An engine that is up already, for another run, says no second time how much it takes at once."""
        up = [c.width for c in self.place.children.values() if c.plan.key == plan.key and c.state is ChildState.UP]
        if plan.kind == "engine" and up and self.credit.engine_up(run_id, max(up)):
            self._tell_credit(now)

    def _refuse(self, group: work_pb2.AssignGroup, failure: Failure) -> None:
        for seq, attempt in zip(group.seq, group.attempt, strict=False):
            self._finish(Finished(group.log, seq, attempt, group.run.run_id, b"", 2, failure))

    def _accepted(self, accepted: work_pb2.Accepted, now: float) -> None:
        sent: float | None = None
        for column in (accepted.accepted, accepted.stale):
            for key in keys_from_wire(column):
                result = self.unacknowledged.pop(key, None)
                self._outbox.pop(key, None)
                if result is not None and result.sent is not None:
                    sent = result.sent if sent is None else max(sent, result.sent)
        if sent is not None:
            self._acked(sent)
            self.credit.answered(now - sent)

    def _revoke(self, revoke: work_pb2.Revoke, now: float) -> None:
        given_up: list[AttemptKey] = []
        kept: list[AttemptKey] = []
        asked: dict[int, set[AttemptKey]] = {}
        behind = {key: child.id for child in self.place.children.values() for key in child.behind()}
        for key in keys_from_wire(revoke.keys):
            held = self.held.get(key)
            if held is not None and held.state in UNSTARTED:
                held.move("give_up")
                self._forget(held)
                given_up.append(key)
            elif key in behind:
                asked.setdefault(behind[key], set()).add(key)
            elif held is not None or key in self.unacknowledged:
                kept.append(key)
            else:
                given_up.append(key)
        self._recall_revoked(revoke.revoke_id, Revoke(given_up, kept, asked))
        if not asked:
            self._confirm_revokes(0, now)

    def _cancel(self, cancel: work_pb2.Cancel, now: float) -> None:
        for key in keys_from_wire(cancel.keys):
            self._give_up(key, "cancel", now)

    def _pause(self, pause: work_pb2.Pause, now: float) -> None:
        """Unstarted attempts go back, and parents that wait: their children would not run. The others finish."""
        for held in [h for h in self.held.values() if h.plan.run.run_id == pause.run_id]:
            if held.state in UNSTARTED or held.state is State.WAITING:
                self._give_up(held.key, "pause", now)
        self._release_behind(pause.run_id, "pause")

    def _children(self, results: work_pb2.ChildResults, now: float) -> None:
        for held in self._parents(results.parent_log, results.parent_seq):
            self._actions.append(ev.PassChildren(held.child, results))

    def _resume(self, resume: work_pb2.Resume, now: float) -> None:
        held = self.held.get(AttemptKey(resume.log, resume.seq, resume.attempt))
        if held is None or held.state is not State.WAITING:
            return
        child = self.place.children.get(held.child)
        if child is not None:
            child.waiting -= 1
            held.move("resume")
            self._awaited.pop(held.key, None)
            self._actions.append(ev.ResumeIn(child.id, held.key))

    def _ended(self, ended: work_pb2.RunEnded, now: float) -> None:
        run_id = ended.run_id
        for held in [h for h in self.held.values() if h.plan.run.run_id == run_id]:
            # The run may be continued: its exclusive items wait for our word that these are over.
            self._give_up(held.key, "cancel" if held.spec.exclusive else "drop", now)
        for key in [k for k, r in self.unacknowledged.items() if r.run_id == run_id]:
            del self.unacknowledged[key]
            self._outbox.pop(key, None)
            self._release(key, "cancel")
        self._plans.forget(run_id)
        self.credit.forget(run_id)

    def _parents(self, log: int, seq: int) -> list[Held]:
        return [
            h
            for c in self.place.children.values()
            if (h := c.in_hand.get((log, seq))) is not None and not h.stop_reason
        ]  # fmt: skip

    # ---- acknowledgements and the fence

    def _acknowledged(self, event: ev.Acknowledged, now: float) -> None:
        self._acked(event.sent_at)
        if self._fenced_at is not None and self._welcomed and now - event.sent_at < self._settings.self_fence_s:
            self._actions.append(ev.DropStream("self_fence"))  # the next Hello says what is left

    def _acked(self, sent_at: float) -> None:
        if self._acked_at is None:
            self._actions.append(ev.Emit("worker_ready", "info", {"incarnation": self._settings.incarnation}))
            self._acked_at = sent_at
        self._acked_at = max(self._acked_at, sent_at)

    def _fence(self, now: float) -> None:
        self._fenced_at = now
        self._actions.append(
            ev.Emit("worker_fenced", "warning", {"silent_s": round(now - (self._acked_at or now), 3)})
        )  # fmt: skip
        for child in sorted(self._stop_exclusive(self.held.values())):
            self._actions.append(self.place.stop(self.place.children[child], kill=True))
        if self._session:
            self._actions.append(ev.DropStream("no_answer"))  # another coordinator may lead by now

    def _kill_times(self) -> list[ev.Action]:
        return self.place.kill_times((self._acked_at or 0.0) + self._settings.self_fence_s + GUARD_LATER_S)

    def _unfence(self) -> None:
        if self._fenced_at is not None:
            self._fenced_at = None
            self._actions.append(ev.Emit("worker_unfenced"))

    # ---- time

    def _tick(self, event: ev.Tick, now: float) -> None:
        if self._fenced_at is not None:
            if now - self._fenced_at >= self._settings.orphan_grace_s:
                fields = {"dropped": len(self.held), "results_dropped": len(self.unacknowledged)}
                self._actions.append(ev.Emit("worker_orphaned", "error", fields))
                self._exit("orphaned")
                return
        elif self._acked_at is not None and now - self._acked_at >= self._settings.self_fence_s:
            self._fence(now)
        self._actions += self._kill_times()
        self._check_timeouts(now)
        self._check_starts(now)
        for key in [k for k, at in self._kills.items() if now >= at]:
            del self._kills[key]
            held = self.held.get(key)
            child = self.place.children.get(held.child) if held is not None else None
            if child is not None:
                self._actions.append(self.place.stop(child, kill=True))
        self._actions += self.place.retire_idle()
        self._actions += self.place.recall(now)
        if self._welcomed and self._fenced_at is None and self.credit.adapt(now, self._by_run):
            self._tell_credit(now)
        self._dispatch_due = True

    # ---- drain

    def _drain(self, event: ev.Drain, now: float) -> None:
        until = now + event.budget_s
        if self._drain_until is None:
            self._drain_until = until
            fields = {"reason": event.reason, "budget_s": event.budget_s, "held": len(self.held)}
            self._actions.append(ev.Emit("worker_draining", "info", fields))
            self._drain_reason = event.reason
            self._tell_credit(now)
            for held in [h for h in self.held.values() if h.state in UNSTARTED]:
                self._give_up(held.key, "drain", now)
            self._release_behind("", "drain")
        self._drain_until = min(self._drain_until, until)

    def _drain_step(self, now: float) -> None:
        assert self._drain_until is not None
        overdue = now - self._drain_until
        if overdue >= 0 and not self._stopped_all:
            self._stopped_all = True
            for key in list(self.held):
                self._give_up(key, "drain", now)
        nobody = self._acked_at is None or self._fenced_at is not None
        if not self.held and (nobody or not self._welcomed):
            # Between two streams somebody is there to tell, or will be declared silent.
            done = (nobody and not self.unacknowledged) or overdue >= 0
        else:
            self._flush(now)
            done = not self.held and not self.unacknowledged
        if done or overdue >= self._settings.cancel_grace_s + DRAIN_SLACK_S:
            self._send(self._goodbye(), now)
            self._exit("drained")

    def _goodbye(self) -> work_pb2.WorkUp:
        return work_pb2.WorkUp(goodbye=work_pb2.Goodbye(reason=self._drain_reason))

    def _once_more(self, event: ev.Event, now: float) -> list[ev.Action]:
        """A new stream after the end: the one that Goodbye was put on may have broken before it was read."""
        if not isinstance(event, ev.StreamUp) or not self._drain_reason:
            return []
        self._stream_up(event, now)
        actions, self._actions = [*self._actions, ev.Send(self._goodbye())], []
        return actions

    def _exit(self, how: str) -> None:
        self._over = True
        self._actions.append(ev.Exit(how))

    def _flush_event(self, event: ev.Flush, now: float) -> None:
        self._flush(now)

    # What is not listed here is no event and no frame.
    FRAMES: ClassVar[dict[str, Any]] = {
        "assign": _assign,
        "accepted": _accepted,
        "revoke": _revoke,
        "cancel": _cancel,
        "pause": _pause,
        "children": _children,
        "resume": _resume,
        "ended": _ended,
    }

    EVENTS: ClassVar[dict[type, Any]] = {
        ev.StreamUp: _stream_up,
        ev.StreamDown: _stream_down,
        ev.Frame: _frame,
        ev.Acknowledged: _acknowledged,
        ev.ChildReady: ChildEvents._child_ready,
        ev.ChildFailed: ChildEvents._child_failed,
        ev.ChildEnded: ChildEvents._child_ended,
        ev.ChildResults: ChildEvents._child_results,
        ev.ChildSpawned: ChildEvents._child_spawned,
        ev.ChildWaits: ChildEvents._child_waits,
        ev.ChildProgress: ChildEvents._child_progress,
        ev.ChildReturned: ChildEvents._child_returned,
        ev.Fetched: ChildEvents._fetched,
        ev.FetchFailed: ChildEvents._fetch_failed,
        ev.Stored: ChildEvents._stored,
        ev.StoreFailed: ChildEvents._store_failed,
        ev.Drain: _drain,
        ev.Flush: _flush_event,
        ev.Tick: _tick,
    }
