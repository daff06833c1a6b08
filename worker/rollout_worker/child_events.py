"""What child processes report, and what the session makes of it. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from rollout.model.errors import ProtocolError
from rollout.model.item import INLINE_MAX, Failure, Outcome
from rollout.wire.codec import failures_from_wire, unpack_blobs
from rollout.wire.v1 import work_pb2

from rollout_worker import session_events as ev
from rollout_worker.attempts import AttemptKey, Finished, Held, State, failed
from rollout_worker.holding import Holding
from rollout_worker.placement import (
    BACKOFF_FIRST_S,
    BACKOFF_MAX_S,
    START_BACKOFF_FIRST_S,
    START_BACKOFF_MAX_S,
    Child,
    ChildState,
)

CANCELLED = "cancelled"
"""Error code with which a child process answers a cancellation; it never leaves the worker."""


class ChildEvents(Holding):
    def _runs_of(self, key: str) -> list[str]:
        """Runs whose attempts wait for that process here."""
        return sorted({h.plan.run.run_id for h in self.held.values() if h.plan.key == key})

    def _child_ready(self, event: ev.ChildReady, now: float) -> None:
        child = self.place.children.get(event.child)
        if child is None or child.state is not ChildState.STARTING:
            return
        self.place.ready(child, event.width, event.ahead)
        self._dispatch_due = True
        width = child.width if child.plan.kind == "engine" else self._settings.slots
        changed = [self.credit.engine_up(run_id, width) for run_id in self._runs_of(child.plan.key)]
        if any(changed):
            self._tell_credit(now)

    def _child_failed(self, event: ev.ChildFailed, now: float) -> None:
        child = self.place.children.get(event.child)
        if child is None or child.state is not ChildState.STARTING:
            return
        child.state = ChildState.STOPPING  # its process is on its way out
        self._not_startable(child, event.failure, now)

    def _check_starts(self, now: float) -> None:
        """A download or a driver that hangs must not hold its runs for ever."""
        limit = self._settings.start_timeout_s
        for child in self.place.starting_since(now - limit):
            self._actions.append(self.place.stop(child, kill=True))
            message = f"it was not ready within {limit:g} s ([worker] start_timeout_s)"
            self._not_startable(child, Failure("start_timeout", message, True), now)

    def _not_startable(self, child: Child, failure: Failure, now: float) -> None:
        """One attempt pays for each try, the others go back: a million rows must not fail for one missing model."""
        key = child.plan.key
        delay = self.place.backoff(key).failed(now, START_BACKOFF_FIRST_S, START_BACKOFF_MAX_S)
        fields = {"error": failure.message, "code": failure.code, "retry_in_s": delay, "runs": self._runs_of(key)}
        self._actions.append(ev.Emit("engine_start_failed", "error", fields))
        changed = [self.credit.throttle(run_id) for run_id in self._runs_of(key)]
        if any(changed):
            self._tell_credit(now)
        head = self.place.head(key)
        if head is not None:
            head.move("finish")
            self._forget(head)
            message = f"its executor cannot start on this worker: {failure.message}"
            self._finish(failed(head, Failure("engine_start", message, True)))
        while (head := self.place.head(key)) is not None:
            self._give_up(head.key, "engine_start", now)

    def _child_ended(self, event: ev.ChildEnded, now: float) -> None:
        child = self.place.children.get(event.child)
        if child is None:
            return
        if child.kill_at and now >= child.kill_at:  # the guard did it, while this daemon stood still
            self._stop_exclusive(h for h in child.in_hand.values() if not h.stop_reason)
            child.state = ChildState.STOPPING
        del self.place.children[event.child]
        self._dispatch_due = True
        if child.state is ChildState.STARTING:
            failure = Failure("engine_start", f"the process ended while it started: {event.reason}")
            self._not_startable(child, failure, now)
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
                message = f"the process that ran it ended: {event.reason}"
                self._finish(failed(held, Failure("executor_crashed", message, True, worker_lost=True)))
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
        """They waited in that process behind a long one."""
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
                units_out[i],
            )  # fmt: skip
            self._complete(held, result)
        if not failures:
            self.place.backoff(child.plan.key).failures = 0
        self._started += child.settle(now)
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

    def _store_failed(self, event: ev.StoreFailed, now: float) -> None:
        self._storing.pop(event.key, None)
        self._input_or_output_failed(event.key, event.failure)

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

    def _fetch_failed(self, event: ev.FetchFailed, now: float) -> None:
        held = self.held.get(event.key)
        if held is not None and held.state is State.FETCHING:
            self._input_or_output_failed(event.key, event.failure)

    def _input_or_output_failed(self, key: AttemptKey, failure: Failure) -> None:
        held = self.held.get(key)
        if held is not None:
            held.move("finish")
            self._forget(held)
            self._finish(failed(held, failure))

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
        child = self.place.children[event.child]
        if held.state is not State.WAITING:
            child.waiting += 1
        held.move("wait")
        self._started += child.mark_started(now)  # what was behind it runs now
        self._awaited[held.key] = waiting.from_child
        self._send(work_pb2.WorkUp(waiting=waiting), now)
        self._dispatch_due = True

    def _tell_parents(self, now: float) -> None:
        """Spawns and waits again, on a new stream: they are found, not made twice.

        A parent waits from where it stopped, whatever it was sent since: the Resume behind that may be lost.
        """
        for key, spawns in self._spawned.items():
            for spawn in spawns if not self.held[key].stop_reason else ():
                self._send(work_pb2.WorkUp(spawn=spawn), now)
        for key, from_child in self._awaited.items():
            if self.held[key].stop_reason:
                continue
            waiting = work_pb2.Waiting(log=key.log, seq=key.seq, attempt=key.attempt, from_child=from_child)
            self._send(work_pb2.WorkUp(waiting=waiting), now)

    def _child_progress(self, event: ev.ChildProgress, now: float) -> None:
        held = self.held.get(event.key)
        if held is not None:
            keys = work_pb2.Progress(run_id=held.plan.run.run_id, running=self.running, note=event.note)
            keys.keys.add(log=event.key.log, seq=[event.key.seq], attempt=[event.key.attempt])
            self._send(work_pb2.WorkUp(progress=keys), now)


def _column(values: Sequence[int], count: int, absent: int = 0) -> list[int]:
    return list(values) if values else [absent] * count
