"""State machine of a worker: what it holds, what it tells the coordinator, what its child processes do.

`handle(event, now)` returns actions, to be carried out in that order. Nothing here waits, reads a clock or does I/O.
`now` is seconds of a clock that includes the machine's sleep, so that a laptop that wakes up knows it is fenced.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import partial
from typing import Any, ClassVar

from rollout.model.errors import ProtocolError
from rollout.model.ids import short
from rollout.model.item import INLINE_MAX, Failure, Outcome
from rollout.model.worker import Credit, Inventory
from rollout.wire.codec import credit_to_wire, failures_from_wire, inventory_to_wire, unpack_blobs
from rollout.wire.v1 import work_pb2

from rollout_worker import session_events as ev
from rollout_worker.attempts import (
    OUT_OF_MEMORY,
    UNSTARTED,
    AttemptKey,
    Finished,
    Held,
    Plan,
    State,
    failed,
    held_from_wire,
    keys_from_wire,
    keys_to_wire,
    result_frames,
)
from rollout_worker.causes import OF_STORE, Causes
from rollout_worker.credit import CreditKeeper
from rollout_worker.executors.port import Run
from rollout_worker.placement import (
    BACKOFF_FIRST_S,
    BACKOFF_MAX_S,
    START_BACKOFF_FIRST_S,
    START_BACKOFF_MAX_S,
    ChildState,
    Placement,
)
from rollout_worker.processes.plans import Plans
from rollout_worker.replicas import Replicas

DRAIN_SLACK_S = 2.0
"""Seconds beyond a drain's budget and the grace of cancellation, in which results are acknowledged."""
GUARD_LATER_S = 0.1
"""Seconds after the fence at which the guard kills, in case the daemon is stopped and does not do it itself."""
PARENT_WAITS = "parent_waits"
"""Reason for releasing unstarted attempts that need a process in which a parent waits for its children."""
STORE_BACKOFF_FIRST_S, STORE_BACKOFF_MAX_S = 1.0, 10.0
"""First and longest pause in seconds between attempts at a transfer, each of which is itself patient with the store."""
NO_ROOM = "no_room"
"""Code for attempts whose engine has no slot beside those that last until their run ends."""
CANCELLED = "cancelled"
"""Error code with which a child process answers a cancellation; it never leaves the worker."""


@dataclass(frozen=True, slots=True)
class SessionSettings:
    incarnation: str
    inventory: Inventory
    slots: int = 1
    max_engines: int = 1
    devices: tuple[str, ...] = ()  # accelerators, by the names that CUDA_VISIBLE_DEVICES takes
    self_fence_s: float = 4.0
    orphan_grace_s: float = 60.0
    cancel_grace_s: float = 5.0
    start_timeout_s: float = 3600.0
    credit_bytes: int = 4 << 20


class Phase(StrEnum):
    """Phase that a worker reports in a heartbeat."""

    INIT = "init"  # no coordinator has welcomed it yet
    READY = "ready"
    DRAINING = "draining"
    FENCED = "fenced"  # no acknowledgement for too long: starts and submits nothing


@dataclass(slots=True)
class Revoke:
    """Revoke that is answered once every process in `asked` has said which attempts it gives back."""

    given_up: list[AttemptKey]
    kept: list[AttemptKey]
    asked: dict[int, set[AttemptKey]]  # by child


class Session:
    """Session of a worker. `plan_run` says where a run's attempts execute; it raises AttemptError if they cannot run
    here."""

    def __init__(self, settings: SessionSettings, plan_run: Callable[[Run], Plan]) -> None:
        self._settings = settings
        self._plans = Plans(plan_run, lease_devices=bool(settings.devices))
        self.place = Placement(settings.slots, settings.max_engines, settings.devices)
        self.credit = CreditKeeper(settings.slots, settings.credit_bytes)
        self.causes = Causes()
        self.replicas = Replicas(settings.incarnation)
        self.objects_addr = ""
        # Attempts, and the results of those that have ended.
        self.held: dict[AttemptKey, Held] = {}
        self._assigned = 0
        self.unacknowledged: dict[AttemptKey, Finished] = {}
        self._storing: dict[AttemptKey, Finished] = {}
        self._store_again: dict[AttemptKey, float] = {}  # of these, what waits for the store, and until when
        self._kills: dict[AttemptKey, float] = {}  # when a child that does not let go is killed
        self._recalled: dict[AttemptKey, str] = {}  # to be released, for that reason, if they have not begun
        self._revokes: dict[int, Revoke] = {}
        self._spawned: dict[AttemptKey, list[work_pb2.Spawn]] = {}
        self._awaited: dict[AttemptKey, work_pb2.Waiting] = {}  # parents that wait, and what they said of it
        # What is to be told on the present stream.
        self._outbox: dict[AttemptKey, Finished] = {}  # of the unacknowledged, those to send
        self._started: list[AttemptKey] = []
        self._released: list[tuple[AttemptKey, str]] = []
        # The stream, and how the coordinator sees this worker.
        self._session = ""
        self._welcomed = False
        self._hello_at = 0.0
        self._acked_at: float | None = None
        self._fenced_at: float | None = None
        self._drain_until: float | None = None
        self._drain_reason = ""
        self._preempted = False
        self._hello_said = (False, False)  # draining, preempted
        self._stopped_all = False
        self._over = False
        # Of the event in hand.
        self._actions: list[ev.Action] = []
        self._dispatch_due = False

    @property
    def phase(self) -> Phase:
        if self._fenced_at is not None:
            return Phase.FENCED
        if self._drain_until is not None:
            return Phase.DRAINING
        return Phase.READY if self._acked_at is not None else Phase.INIT

    @property
    def running(self) -> int:
        return sum(c.running for c in self.place.children.values())

    @property
    def backlog(self) -> int:
        return len(self.held)

    @property
    def news(self) -> int:
        return len(self._outbox) + len(self._started) + len(self._released)

    @property
    def wants_flush(self) -> bool:
        return self._welcomed and not self._silent and self.news > 0

    @property
    def _silent(self) -> bool:
        return self._fenced_at is not None

    def handle(self, event: ev.Event, now: float) -> list[ev.Action]:
        """Handle an event. Raises ProtocolError if the coordinator or a child violated the protocol."""
        if self._over:
            return self._once_more(event, now)
        self.EVENTS[type(event)](self, event, now)
        may_start = self._fenced_at is None
        if self._dispatch_due and may_start and not self._stopped_all:
            self._dispatch_due = False
            actions, begun = self.place.dispatch(now)
            self._fail_impossible(now)
            self._tell_of_endless(now)
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
        self._hello_said = self._leaves_now()
        hello = work_pb2.Hello(
            incarnation=self._settings.incarnation,
            inventory=inventory_to_wire(self._settings.inventory),
            held=keys_to_wire(h.key for h in held),
            held_started=keys_to_wire(h.key for h in held if h.begun),
            unacknowledged=keys_to_wire(self.unacknowledged),
            credit=credit_to_wire(self._credit_now()),
            draining=self._hello_said[0],
            preempted=self._hello_said[1],
        )
        self._actions.append(ev.Send(work_pb2.WorkUp(hello=hello)))

    def _leaves_now(self) -> tuple[bool, bool]:
        return self._drain_until is not None, self._preempted

    def _forget_ended_runs(self) -> None:
        """Forget ended runs: a new stream does not say which runs ended before it."""
        used = {h.plan.run.run_id for h in self.held.values()} | {r.run_id for r in self.unacknowledged.values()}
        used |= self.causes.runs()  # the coordinator says of these that they have ended
        for run_id in self._plans.forget_unused(used):
            self.credit.forget(run_id)

    def _stream_down(self, event: ev.StreamDown, now: float) -> None:
        self._welcomed = False
        self._session = ""
        self._actions += self.replicas.hang_up()

    def _frame(self, event: ev.Frame, now: float) -> None:
        frame = event.frame
        if frame.session != self._session or not self._session:
            return
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
        noticed = self._hello_said != self._leaves_now()
        if noticed:  # since Hello; before the results below, which may come of it
            leaving = work_pb2.Leaving(reason=self._drain_reason, preempted=self._preempted)
            self._actions.append(ev.Send(work_pb2.WorkUp(leaving=leaving)))
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
        if noticed:
            self._tell_credit(now)
        if self.causes.runs():
            self._tell_causes(now)
        self._tell_parents(now)
        for announcement in self.replicas.announcements():
            self._relay(announcement)
        self._dispatch_due = True

    def _assign(self, assign: work_pb2.Assign, now: float) -> None:
        for group in assign.groups:
            arrived = held_from_wire(group, partial(self._plans.of, group.run))
            for plan in {held.plan.key: held.plan for held in arrived}.values():
                self._use_process(plan, now)
            for held in arrived:
                key = held.key
                if key in self.held or key in self.unacknowledged:
                    continue
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
            self._refuse(arrived, now)
        self._dispatch_due = True

    def _refuse(self, arrived: list[Held], now: float) -> None:
        """Return at once what cannot start: others may have a slot for it, and its run must know."""
        for key, plan in {held.plan.key: held.plan for held in arrived}.items():
            if self.causes.knows(key) and now < self.place.backoff(key).until:
                self.causes.concern(key, [held for held in arrived if held.plan.key == key])
                self._give_back_unstartable(key, now)
            elif plan.refusal is not None:
                self._not_startable(plan, plan.refusal, now)

    def _use_process(self, plan: Plan, now: float) -> None:
        """Use a running process for another run; it does not report its width again."""
        run_id = plan.run.run_id
        if self.credit.knows(run_id, plan.key):
            return
        takes = self._takes(plan)
        if takes and self.credit.started(run_id, plan.key, takes):
            self._tell_credit(now)

    def _takes(self, plan: Plan) -> int:
        """Return the concurrent attempts of the plan's running processes; for slots, of as many as there are."""
        widths = [c.width for c in self.place.children.values() if c.plan.key == plan.key and c.state is ChildState.UP]
        return max(widths, default=0) * self._settings.slots if plan.kind == "slot" else sum(widths)

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
        """Return unstarted attempts, and parents that wait, whose children would not run. The others finish."""
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
        self.place.retire(run_id)
        for key in self.causes.forget(run_id):  # when the run goes on, it is tried at once
            self.place.backoffs.pop(key, None)

    def _parents(self, log: int, seq: int) -> list[Held]:
        return [
            h
            for c in self.place.children.values()
            if (h := c.in_hand.get((log, seq))) is not None and not h.stop_reason
        ]  # fmt: skip

    # ---- child processes

    def _runs_of(self, key: str) -> list[str]:
        """Return the runs whose attempts wait for that process."""
        return sorted({h.plan.run.run_id for h in self.held.values() if h.plan.key == key})

    def _child_ready(self, event: ev.ChildReady, now: float) -> None:
        child = self.place.children.get(event.child)
        if child is None or child.state is not ChildState.STARTING:
            return
        self.place.ready(child, event.width, event.ahead)
        self._dispatch_due = True
        key = child.plan.key
        if self.causes.clear(key):
            self._tell_causes(now)
        changed = [self.credit.started(run_id, key, self._takes(child.plan)) for run_id in self._runs_of(key)]
        if any(changed):
            self._tell_credit(now)

    def _child_failed(self, event: ev.ChildFailed, now: float) -> None:
        child = self.place.children.get(event.child)
        if child is None or child.state is not ChildState.STARTING:
            return
        child.state = ChildState.STOPPING  # its process is on its way out
        self._not_startable(child.plan, event.failure, now)

    def _check_starts(self, now: float) -> None:
        """Fail starts that take too long: a download or driver that hangs must not block its runs forever."""
        limit = self._settings.start_timeout_s
        for child in self.place.starting_since(now - limit):
            self._actions.append(self.place.stop(child, kill=True))
            message = f"it was not ready within {limit:g} s ([worker] start_timeout_s)"
            self._not_startable(child.plan, Failure("start_timeout", message, True), now)

    def _fail_impossible(self, now: float) -> None:
        """Fail attempts for which no process can start here; they are retried after each backoff, like other failed
        starts."""
        have = len(self.place.pool.devices)
        for _, plan in self.place.impossible(now):
            message = f"it needs {plan.devices} devices and this worker has {have}"
            self._not_startable(plan, Failure("devices_missing", message, True), now)

    def _tell_of_endless(self, now: float) -> None:
        """Report what waits behind endless attempts, so that users see why nothing begins."""
        behind = self.place.behind_endless()
        over = set(self.causes.keys_of(NO_ROOM)) - {plan.key for plan, _ in behind}
        for key in over:
            self.causes.clear(key)
        if over:
            self._tell_causes(now)
        for plan, runs in behind:
            if not self.causes.knows(plan.key):
                until = f"{' and '.join(map(short, runs))}, until {'it ends' if len(runs) == 1 else 'they end'}"
                message = f"there is room for no other engine beside that of run {until}"
                self.causes.failed(plan, Failure(NO_ROOM, message, True), waits=True)
                waiting = [h for h in self.held.values() if h.plan.key == plan.key and h.state in UNSTARTED]
                self.causes.concern(plan.key, waiting)
                self._tell_causes(now)

    def _not_startable(self, plan: Plan, failure: Failure, now: float) -> None:
        """Handle a failed start, which costs no attempt a try.

        What waits is returned, and the coordinator is told the cause, so that it assigns nothing of the kind before the
        next attempt. Only an attempt that asked for too little memory is itself to blame.
        """
        key = plan.key
        waiting = [held for held in self.held.values() if held.plan.key == key and held.state in UNSTARTED]
        delay = self.place.backoff(key).failed(now, START_BACKOFF_FIRST_S, START_BACKOFF_MAX_S)
        runs = self._runs_of(key)
        fields = {"error": failure.message, "code": failure.code, "retry_in_s": delay, "runs": runs}
        self._actions.append(ev.Emit("engine_start_failed", "error", fields))
        serve = (ChildState.UP,) if plan.replicas == 1 else (ChildState.UP, ChildState.STARTING)
        if any(c.plan.key == key and c.state in serve for c in self.place.children.values()):
            return  # what waits is taken by those that did start
        changed = [self.credit.throttle(run_id, key) for run_id in runs]
        if any(changed):
            self._tell_credit(now)
        head = self.place.head(key)
        if failure.code == OUT_OF_MEMORY and plan.memory_mib:
            if head is not None:
                head.move("finish")
                self._forget(head)
                message = f"its executor cannot start on this worker: {failure.message}"
                self._finish(failed(head, Failure(OUT_OF_MEMORY, message, True)))
        else:
            self.causes.failed(plan, failure)
            self.causes.concern(key, waiting)
        self._give_back_unstartable(key, now)

    def _give_back_unstartable(self, key: str, now: float) -> None:
        self._tell_causes(now)
        for held in [h for h in self.held.values() if h.plan.key == key and h.state in UNSTARTED]:
            self._give_up(held.key, "engine_start", now)

    def _tell_causes(self, now: float) -> None:
        """Report all causes whenever one changes: a frame that is lost with its stream is replaced by the next."""
        said = self.causes.to_wire(lambda key: max(0.0, self.place.backoff(key).until - now))
        self._send(work_pb2.WorkUp(causes=said), now)

    def _child_ended(self, event: ev.ChildEnded, now: float) -> None:
        child = self.place.children.get(event.child)
        if child is None:
            return
        if child.kill_at and now >= child.kill_at:  # the guard did it, while this daemon stood still
            self._stop_exclusive(h for h in child.in_hand.values() if not h.stop_reason)
            child.state = ChildState.STOPPING
        self.place.ended(child)
        self._dispatch_due = True
        if child.state is ChildState.STARTING:
            failure = Failure(event.code or "engine_start", f"the process ended while it started: {event.reason}")
            self._not_startable(child.plan, failure, now)
            return
        if child.state is ChildState.UP:
            delay = self.place.backoff(child.plan.key).failed(now, BACKOFF_FIRST_S, BACKOFF_MAX_S)
            fields = {"child": child.id, "reason": event.reason, "attempts": child.active, "restart_in_s": delay}
            self._actions.append(ev.Emit("child_crashed", "warning", fields))
        hit = set(map(id, child.heads()))
        behind: list[Held] = []
        for held in list(child.in_hand.values()):
            if held.state is State.STOPPING:
                self._stopped(held)
            elif id(held) in hit or held.started is not None or held.state is State.WAITING:
                held.move("finish")
                self._forget(held)
                self._finish(failed(held, _crash(held, event, ran=id(held) in hit)))
            else:
                behind.append(held)
        self._requeue([held for held in behind if not self._revoked(held)])
        self._confirm_revokes(event.child, now)

    def _requeue(self, behind: list[Held]) -> None:
        for held in reversed(behind):
            held.move("requeue")
            held.started = None
            held.child = 0
            self.place.enqueue(held, front=True)

    def _child_returned(self, event: ev.ChildReturned, now: float) -> None:
        """Handle attempts that a process returned because they waited behind a long one."""
        child = self.place.children.get(event.child)
        behind: list[Held] = []
        for key in event.keys:
            held = child.in_hand.get((key.log, key.seq)) if child is not None else None
            if child is None or held is None or held.attempt != key.attempt:
                continue
            if held.state is State.WAITING:  # it has begun, whatever the child says now
                continue
            child.take_out(held)
            reason = self._recalled.pop(held.key, "")
            if reason and held.state is not State.STOPPING:
                held.stop_reason = reason
                held.move("stop")
            if held.state is State.STOPPING:
                self._stopped(held)
            else:
                behind.append(held)
        self._requeue([held for held in behind if not self._revoked(held)])
        self._confirm_revokes(event.child, now)
        self._dispatch_due = True

    def _child_results(self, event: ev.ChildResults, now: float) -> None:
        child = self.place.children.get(event.child)
        if child is None:
            return
        group = event.group
        count = len(group.seq)
        # Columns as lists, at once: reaching into a message for each value costs more than all the rest of a row.
        seqs, attempts = list(group.seq), list(group.attempt)
        blobs = unpack_blobs(group.length, group.data, ())
        if not (len(blobs) == len(attempts) == count):
            raise ProtocolError("results of a child: columns disagree")
        failures = failures_from_wire(group.errors) if group.errors else {}
        outcomes = _column(group.outcome, count, int(Outcome.DONE))
        durations = _column(group.duration_ms, count)
        units_in, units_out = _column(group.units_in, count), _column(group.units_out, count)
        keeps = {kept.index: tuple(kept.object_ids) for kept in group.kept}
        in_hand, log = child.in_hand, group.log
        for i, seq in enumerate(seqs):
            held = in_hand.get((log, seq))
            if held is None or held.attempt != attempts[i]:
                continue
            child.take_out(held)
            failure = failures.get(i)
            if failure is not None and failure.code == CANCELLED:
                self._stopped(held)
                continue
            data = blobs[i]
            assert isinstance(data, bytes)
            result = Finished(
                log, seq, held.attempt, held.plan.run.run_id, data, outcomes[i], failure, durations[i], units_in[i],
                units_out[i], keeps.get(i, ()),
            )  # fmt: skip
            self._complete(held, result)
            if failure is not None and failure.code == OUT_OF_MEMORY:
                child.retiring = True  # what is left in it may be why: the next begins in a fresh one
        if not failures:
            self.place.backoff(child.plan.key).failures = 0
            if self.causes.clear(child.plan.key):
                self._tell_causes(now)
        self._started += child.settle(now, count)
        self._dispatch_due = True

    def _complete(self, held: Held, result: Finished) -> None:
        data = result.data
        if held.stop_reason == "drop":
            held.move("finish")
            self._forget(held)
        elif len(data) > INLINE_MAX and isinstance(data, bytes):
            held.move("store")
            self._kills.pop(held.key, None)
            self._storing[held.key] = result
            self._actions.append(ev.Store(held.key, data))
        else:
            held.move("finish")
            self._forget(held)
            self._finish(result)

    def _stored(self, event: ev.Stored, now: float) -> None:
        result = self._storing.pop(event.key, None)
        held = self.held.get(event.key)
        if result is not None and held is not None:
            result.data = event.blob
            held.move("finish")
            self._forget(held)
            self._finish(result)
            self._store_is_back(held, now)

    def _store_failed(self, event: ev.StoreFailed, now: float) -> None:
        held = self.held.get(event.key)
        if held is None or event.key not in self._storing:
            return
        if event.failure.code in OF_STORE and not held.stop_reason:
            self._store_again[event.key] = self._store_is_away(held, event.failure, now)
        else:
            self._input_or_output_failed(event.key, event.failure)

    def _store_is_away(self, held: Held, failure: Failure, now: float) -> float:
        """Report that the store is away, a cause that is never final and costs no item a try; return when to try
        again."""
        key, backoff = held.plan.key, self.place.backoff(held.plan.key)
        if now >= backoff.until:  # all that fails meanwhile is one
            backoff.failed(now, STORE_BACKOFF_FIRST_S, STORE_BACKOFF_MAX_S)
        self.causes.failed(held.plan, failure, waits=True)
        self.causes.concern(key, [held])
        self._tell_causes(now)
        return backoff.until

    def _store_is_back(self, held: Held, now: float) -> None:
        key = held.plan.key
        if self.causes.is_of_store(key):
            self.causes.clear(key)
            self.place.backoffs.pop(key, None)
            self._tell_causes(now)
            self._store_again = dict.fromkeys(self._store_again, now)

    def _try_storing(self, now: float) -> None:
        for key in [key for key, at in self._store_again.items() if now >= at]:
            del self._store_again[key]
            data = self._storing[key].data
            assert isinstance(data, bytes)
            self._actions.append(ev.Store(key, data))

    def _fetched(self, event: ev.Fetched, now: float) -> None:
        for found in event.inputs:
            held = self.held.get(found.key)
            if held is not None and held.state is State.FETCHING:
                held.payload = found.payload
                if found.predecessor is not None:
                    held.predecessor = found.predecessor
                held.move("fetched")
                self.place.enqueue(held)
                self._dispatch_due = True
                self._store_is_back(held, now)

    def _fetch_failed(self, event: ev.FetchFailed, now: float) -> None:
        held = self.held.get(event.key)
        if held is None or held.state is not State.FETCHING:
            return
        if event.failure.code in OF_STORE:
            self._store_is_away(held, event.failure, now)
            self._give_up(held.key, "engine_start", now)  # another worker may reach it
        else:
            self._input_or_output_failed(event.key, event.failure)

    def _input_or_output_failed(self, key: AttemptKey, failure: Failure) -> None:
        held, result = self.held.get(key), self._storing.get(key)
        if held is None:
            return
        held.move("finish")
        self._forget(held)
        if result is None or result.failure is None:
            self._finish(failed(held, failure))
            return
        # It failed before, and how counts more than that its evidence is lost.
        lost = f"{result.failure.message}; what it left behind could not be stored: {failure.message}"
        result.data, result.failure = b"", replace(result.failure, message=lost)
        self._finish(result)

    # ---- parents

    def _running_in(self, child_id: int, log: int, seq: int, attempt: int) -> Held | None:
        child = self.place.children.get(child_id)
        held = child.in_hand.get((log, seq)) if child is not None else None
        return held if held is not None and held.attempt == attempt and not held.stop_reason else None

    def _child_spawned(self, event: ev.ChildSpawned, now: float) -> None:
        spawn = event.spawn
        held = self._running_in(event.child, spawn.log, spawn.seq, spawn.attempt)
        if held is not None:
            self._spawned.setdefault(held.key, []).append(spawn)
            self._send(work_pb2.WorkUp(spawn=spawn), now)

    def _child_waits(self, event: ev.ChildWaits, now: float) -> None:
        waiting = event.waiting
        held = self._running_in(event.child, waiting.log, waiting.seq, waiting.attempt)
        if held is None:
            return
        self._awaited[held.key] = waiting
        if not waiting.holds:
            child = self.place.children[event.child]
            if held.state is not State.WAITING:
                child.waiting += 1
            held.move("wait")
            self._started += child.mark_started(now)  # what was behind it runs now
            self._dispatch_due = True
        self._send(work_pb2.WorkUp(waiting=waiting), now)

    def _tell_parents(self, now: float) -> None:
        """Send spawns and waits again on a new stream; they are found there, not made twice.

        A parent waits from where it stopped, whatever it was sent since: the Resume after that may be lost.
        """
        for key, spawns in self._spawned.items():
            for spawn in spawns if not self.held[key].stop_reason else ():
                self._send(work_pb2.WorkUp(spawn=spawn), now)
        for key, waiting in self._awaited.items():
            if not self.held[key].stop_reason:
                self._send(work_pb2.WorkUp(waiting=waiting), now)

    def _child_progress(self, event: ev.ChildProgress, now: float) -> None:
        held = self.held.get(event.key)
        if held is not None:
            keys = work_pb2.Progress(run_id=held.plan.run.run_id, running=self.running, note=event.note)
            keys.figures = event.figures
            keys.keys.add(log=event.key.log, seq=[event.key.seq], attempt=[event.key.attempt])
            self._send(work_pb2.WorkUp(progress=keys), now)

    def _child_hindered(self, event: ev.ChildHindered, now: float) -> None:
        """Report the cause like that of a failed start: the attempt waits where it is, or is returned."""
        child, held, failure = self.place.children.get(event.child), self.held.get(event.key), event.failure
        if child is None or held is None or child.in_hand.get((held.log, held.seq)) is not held:
            return
        key = held.plan.key
        if not failure.message:
            if self.causes.clear(key):
                self._tell_causes(now)
            return
        self.causes.failed(held.plan, failure, waits=not event.returned)
        self.causes.concern(key, [held])
        if not event.returned:
            self._tell_causes(now)
            return
        child.take_out(held)
        self.place.backoff(key).failed(now, START_BACKOFF_FIRST_S, START_BACKOFF_MAX_S)
        self._give_back_unstartable(key, now)
        held.stop_reason = held.stop_reason or "engine_start"
        self._stopped(held)
        self._started += child.settle(now, 1)
        self._dispatch_due = True

    # ---- replicas

    def _child_relays(self, event: ev.ChildRelays, now: float) -> None:
        child = self.place.children.get(event.child)
        held = child.in_hand.get((event.key.log, event.key.seq)) if child is not None else None
        if held is not None and held.attempt == event.key.attempt:
            self._relay(self.replicas.from_child(event.child, held, event.frame))

    def _relay(self, frame: work_pb2.WorkUp | None) -> None:
        """Relay a frame. Without a stream no gateway would hear it; announcements follow the next Welcome."""
        if frame is not None and self._welcomed and not self._silent:
            self._actions.append(ev.Relay(frame))

    def _heard(self, heard: work_pb2.RelayData, now: float) -> None:
        relayed = self.replicas.to_child(heard.replica, work_pb2.WorkDown(heard=heard))
        self._actions += [relayed] if relayed is not None else []

    def _hung_up(self, hung_up: work_pb2.HungUp, now: float) -> None:
        relayed = self.replicas.to_child(hung_up.replica, work_pb2.WorkDown(hung_up=hung_up))
        self._actions += [relayed] if relayed is not None else []

    # ---- endings

    def _give_up(self, key: AttemptKey, reason: str, now: float) -> None:
        """Stop an attempt; once it has stopped, tell the coordinator, unless that asked to drop it."""
        held = self.held.get(key)
        if held is None:
            return
        if held.state in UNSTARTED:
            held.move("give_up")
            self._forget(held)
            self._release(key, reason)
        elif held.state is State.STORING:
            if reason == "drop" or key in self._store_again:
                held.move("give_up")
                self._forget(held)
                self._release(key, reason)
            else:
                held.stop_reason = held.stop_reason or reason  # it does not wait for a store that is away
        else:
            self._stop(held, reason, now)

    def _stop(self, held: Held, reason: str, now: float) -> None:
        child = self.place.children.get(held.child)
        killed = held.stop_reason == "self_fence"
        if held.state is State.WAITING and child is not None:
            child.waiting -= 1
        if not held.stop_reason or reason == "drop":
            held.stop_reason = reason
        held.move("stop")
        if not killed and held.key not in self._kills and child is not None:
            self._kills[held.key] = now + self._settings.cancel_grace_s
            self._actions.append(ev.CancelIn(child.id, [held.key]))

    def _check_timeouts(self, now: float) -> None:
        for child in self.place.children.values():
            if not child.timed:
                continue
            for held in list(child.in_hand.values()):
                limit = held.spec.timeout_ms / 1000
                if limit and held.started is not None and now - held.started >= limit and not held.stop_reason:
                    self._stop(held, "timeout", now)

    def _stop_exclusive(self, of: Iterable[Held]) -> set[int]:
        """Return the children whose exclusive attempts the fence ends."""
        children: set[int] = set()
        for held in [h for h in of if h.spec.exclusive and h.state not in UNSTARTED and h.state is not State.STORING]:
            child = self.place.children.get(held.child)
            if child is not None:
                child.waiting -= held.state is State.WAITING
                children.add(child.id)
            held.stop_reason = held.stop_reason or "self_fence"  # one that timed out before has timed out
            held.move("stop")
        return children

    def _release_behind(self, run_id: str, reason: str) -> None:
        """Recall attempts that a child process was given, which it returns unless it begins them first."""
        for child in self.place.children.values():
            keys = [k for k in child.behind() if not run_id or self.held[k].plan.run.run_id == run_id]
            if keys:
                self._recalled.update(dict.fromkeys(keys, reason))
                self._actions.append(ev.RecallIn(child.id, keys))

    def _recall_revoked(self, revoke_id: int, revoke: Revoke) -> None:
        """Steal attempts that wait in a process like those that wait here, if the process returns them."""
        self._revokes[revoke_id] = revoke
        self._actions += [ev.RecallIn(child, sorted(keys)) for child, keys in revoke.asked.items()]

    def _revoked(self, held: Held) -> bool:
        """Return an attempt to the coordinator if its process gave it back and a revoke waits for it."""
        for revoke in self._revokes.values():
            if held.key in revoke.asked.get(held.child, ()):
                revoke.asked[held.child].discard(held.key)
                revoke.given_up.append(held.key)
                held.move("requeue")
                held.move("give_up")
                self._forget(held)
                return True
        return False

    def _confirm_revokes(self, child: int, now: float) -> None:
        """Confirm revokes: the process keeps what it was asked for and has not given back."""
        for revoke_id, revoke in list(self._revokes.items()):
            revoke.kept += sorted(revoke.asked.pop(child, ()))
            if not revoke.asked:
                del self._revokes[revoke_id]
                self._send(
                    work_pb2.WorkUp(
                        confirm=work_pb2.Confirm(
                            revoke_id=revoke_id, given_up=keys_to_wire(revoke.given_up), kept=keys_to_wire(revoke.kept)
                        )
                    ),
                    now,
                )

    def _stopped(self, held: Held) -> None:
        """Handle an attempt that its child has let go."""
        reason = held.stop_reason
        held.move("finish")
        self._forget(held)
        if reason == "timeout":
            message = f"it ran longer than its timeout of {held.spec.timeout_ms} ms"
            self._finish(failed(held, Failure("timeout", message, True), held.spec.timeout_ms))
        else:
            self._release(held.key, reason or "stopped")

    def _release(self, key: AttemptKey, reason: str) -> None:
        """Report a release on the present stream, after its Welcome; what ends between two streams is not in the next
        Hello."""
        if reason != "drop" and self._session:
            self._released.append((key, reason))

    def _forget(self, held: Held) -> None:
        key = held.key
        held.stop_reason = held.stop_reason or "gone"  # a queue drops it when it comes to the front
        self.held.pop(key, None)
        self._kills.pop(key, None)
        self._recalled.pop(key, None)
        self._storing.pop(key, None)
        self._store_again.pop(key, None)
        if self._spawned or self._awaited:
            self._spawned.pop(key, None)
            self._awaited.pop(key, None)
        if self.replicas:
            self._relay(self.replicas.ended(key))
        self.credit.ended(held.plan.run.run_id)
        self._dispatch_due = True

    def _finish(self, result: Finished) -> None:
        key = AttemptKey(result.log, result.seq, result.attempt)
        self.unacknowledged[key] = result
        if self._session:  # without a stream the next Hello tells of it
            self._outbox[key] = result

    # ---- telling

    def _flush(self, now: float) -> None:
        if not self.wants_flush:
            return
        if self._started:
            keys = [k for k in self._started if k in self.held]
            self._started.clear()
            if keys:
                self._actions.append(ev.Send(work_pb2.WorkUp(started=work_pb2.Started(keys=keys_to_wire(keys)))))
        if self._outbox:
            results = list(self._outbox.values())
            self._outbox.clear()
            for result in results:
                result.sent = now
            self._actions += [ev.Send(frame) for frame in result_frames(results)]
        if self._released:
            by_reason: dict[str, list[AttemptKey]] = {}
            for key, reason in self._released:
                by_reason.setdefault(reason, []).append(key)
            self._released.clear()
            for reason, keys in by_reason.items():
                released = work_pb2.Released(keys=keys_to_wire(keys), reason=reason)
                self._actions.append(ev.Send(work_pb2.WorkUp(released=released)))

    def _flush_event(self, event: ev.Flush, now: float) -> None:
        self._flush(now)

    def _send(self, frame: work_pb2.WorkUp, now: float) -> None:
        """Send a frame at once, after everything before it. Without a stream it is lost, and the next Hello replaces
        it."""
        if self._welcomed and not self._silent:
            self._flush(now)
            self._actions.append(ev.Send(frame))

    def _by_run(self) -> Counter[str]:
        return Counter(held.plan.run.run_id for held in self.held.values())

    def _credit_now(self) -> Credit:
        if self._drain_until is not None:
            return Credit(0, 0, ())
        return self.credit.current()

    def _tell_credit(self, now: float) -> None:
        self._send(work_pb2.WorkUp(credit=credit_to_wire(self._credit_now())), now)

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

    def _unheard(self, now: float) -> bool:
        return self._acked_at is not None and now - self._acked_at >= self._settings.self_fence_s

    def _fence(self, now: float) -> None:
        self._fenced_at = now
        self._actions.append(
            ev.Emit("worker_fenced", "warning", {"silent_s": round(now - (self._acked_at or now), 3)})
        )  # fmt: skip
        self._hold(True)
        for child in sorted(self._stop_exclusive(self.held.values())):
            self._actions.append(self.place.stop(self.place.children[child], kill=True))
        if self._session:
            self._actions.append(ev.DropStream("no_answer"))  # another coordinator may lead by now

    def _kill_times(self) -> list[ev.Action]:
        return self.place.kill_times((self._acked_at or 0.0) + self._settings.self_fence_s + GUARD_LATER_S)

    def _unfence(self) -> None:
        if self._fenced_at is not None:
            self._fenced_at = None
            self._hold(False)
            self._actions.append(ev.Emit("worker_unfenced"))

    def _hold(self, on: bool) -> None:
        """Hold or release engines: what waits in their queues must begin no more than what waits here."""
        engines = [c for c in self.place.children.values() if c.state is ChildState.UP and c.plan.kind == "engine"]
        self._actions += [ev.HoldIn(child.id, on) for child in engines]

    # ---- time

    def _tick(self, event: ev.Tick, now: float) -> None:
        if self._fenced_at is not None:
            if now - self._fenced_at >= self._settings.orphan_grace_s:
                fields = {"dropped": len(self.held), "results_dropped": len(self.unacknowledged)}
                self._actions.append(ev.Emit("worker_orphaned", "error", fields))
                self._exit("orphaned")
                return
        elif self._unheard(now):
            self._fence(now)
        self._actions += self._kill_times()
        self._check_timeouts(now)
        self._check_starts(now)
        self._try_storing(now)
        for key in [k for k, at in self._kills.items() if now >= at]:
            del self._kills[key]
            held = self.held.get(key)
            child = self.place.children.get(held.child) if held is not None else None
            if child is not None:
                self._actions.append(self.place.stop(child, kill=True))
        self._actions += self.place.retire_idle()
        self._actions += self.place.recall(now)
        if self._welcomed and self._fenced_at is None:
            self._give_back_behind_parents(now)
            if self.credit.adapt(now, self._by_run):
                self._tell_credit(now)
        self._dispatch_due = True

    def _give_back_behind_parents(self, now: float) -> None:
        """Return attempts that wait for a parent's process, because the parent may wait for the slots that they
        take."""
        if keys := self.place.behind_parents(now):
            for held in [h for h in self.held.values() if h.state in UNSTARTED and h.plan.key in keys]:
                self._give_up(held.key, PARENT_WAITS, now)

    # ---- drain

    def _drain(self, event: ev.Drain, now: float) -> None:
        until = now + event.budget_s
        begins, news = self._drain_until is None, event.preempted and not self._preempted
        self._preempted = self._preempted or event.preempted
        if begins or news:
            leaving = work_pb2.Leaving(reason=event.reason, preempted=self._preempted)
            self._send(work_pb2.WorkUp(leaving=leaving), now)
        if self._drain_until is None:
            self._drain_until = until
            fields = {"reason": event.reason, "budget_s": event.budget_s, "held": len(self.held)}
            self._actions.append(ev.Emit("worker_draining", "info", fields))
            self._drain_reason = event.reason
            self._tell_credit(now)
            for held in [h for h in self.held.values() if h.state in UNSTARTED]:
                self._give_up(held.key, "drain", now)
            self._release_behind("", "drain")
        if until <= self._drain_until:
            self._drain_until = until
            in_use = [child for child in self.place.children.values() if child.in_hand]
            self._actions += [ev.LeaveIn(child.id, event.budget_s) for child in in_use if event.budget_s > 0]

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
        """Open a last stream: the one that carried Goodbye may have broken before it was read."""
        if not isinstance(event, ev.StreamUp) or not self._drain_reason:
            return []
        self._stream_up(event, now)
        actions, self._actions = [*self._actions, ev.Send(self._goodbye())], []
        return actions

    def _exit(self, how: str) -> None:
        self._over = True
        self._actions.append(ev.Exit(how))

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
        "heard": _heard,
        "hung_up": _hung_up,
    }

    EVENTS: ClassVar[dict[type, Any]] = {
        ev.StreamUp: _stream_up,
        ev.StreamDown: _stream_down,
        ev.Frame: _frame,
        ev.Acknowledged: _acknowledged,
        ev.ChildReady: _child_ready,
        ev.ChildFailed: _child_failed,
        ev.ChildEnded: _child_ended,
        ev.ChildResults: _child_results,
        ev.ChildSpawned: _child_spawned,
        ev.ChildWaits: _child_waits,
        ev.ChildProgress: _child_progress,
        ev.ChildHindered: _child_hindered,
        ev.ChildReturned: _child_returned,
        ev.ChildRelays: _child_relays,
        ev.Fetched: _fetched,
        ev.FetchFailed: _fetch_failed,
        ev.Stored: _stored,
        ev.StoreFailed: _store_failed,
        ev.Drain: _drain,
        ev.Flush: _flush_event,
        ev.Tick: _tick,
    }


def _crash(held: Held, ended: ev.ChildEnded, *, ran: bool) -> Failure:
    """Return the failure of an attempt in a process that ended by itself. `ran` says that it ran then, and did not
    wait."""
    if ran and ended.code == OUT_OF_MEMORY:
        limit = held.plan.memory_mib
        return Failure(OUT_OF_MEMORY, f"it used more than the {limit} MiB that it asks for ({ended.reason})", True)
    message = f"the process that ran it ended: {ended.reason}"
    return Failure("executor_crashed", message, True, worker_lost=True)


def _column(values: Sequence[int], count: int, absent: int = 0) -> list[int]:
    return list(values) if values else [absent] * count
