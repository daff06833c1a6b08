"""What a worker's session holds, and how attempts end: the base of the session. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

from rollout.model.item import Failure
from rollout.model.worker import Credit, Inventory
from rollout.wire.codec import credit_to_wire
from rollout.wire.v1 import work_pb2

from rollout_worker import session_events as ev
from rollout_worker.attempts import (
    UNSTARTED,
    AttemptKey,
    Finished,
    Held,
    State,
    failed,
    keys_to_wire,
    result_frames,
)
from rollout_worker.credit import CreditKeeper
from rollout_worker.placement import Placement

GUARD_LATER_S = 0.1
"""The guard kills this much behind the fence: a daemon that stands still until then does not do it itself."""


@dataclass(frozen=True, slots=True)
class SessionSettings:
    incarnation: str
    inventory: Inventory
    slots: int = 1
    max_engines: int = 1
    self_fence_s: float = 4.0
    orphan_grace_s: float = 60.0
    cancel_grace_s: float = 5.0
    start_timeout_s: float = 3600.0
    credit_bytes: int = 4 << 20


class Phase(StrEnum):
    """What a worker says of itself in a beat."""

    INIT = "init"  # no coordinator has welcomed it yet
    READY = "ready"
    DRAINING = "draining"
    FENCED = "fenced"  # no acknowledgement for too long: starts and submits nothing


@dataclass(slots=True)
class Revoke:
    """One that is answered once every process in `asked` has said which of its attempts it gives back."""

    given_up: list[AttemptKey]
    kept: list[AttemptKey]
    asked: dict[int, set[AttemptKey]]  # by child


class Holding:
    """Attempts, finished results, and what is to be told of them."""

    def __init__(self, settings: SessionSettings) -> None:
        self._settings = settings
        self.place = Placement(settings.slots, settings.max_engines)
        self.credit = CreditKeeper(settings.slots, settings.credit_bytes)
        self.held: dict[AttemptKey, Held] = {}
        self.unacknowledged: dict[AttemptKey, Finished] = {}
        self._outbox: dict[AttemptKey, Finished] = {}  # of the unacknowledged, those to send
        self._started: list[AttemptKey] = []
        self._released: list[tuple[AttemptKey, str]] = []
        self._storing: dict[AttemptKey, Finished] = {}
        self._kills: dict[AttemptKey, float] = {}  # when a child that does not let go is killed
        self._spawned: dict[AttemptKey, list[work_pb2.Spawn]] = {}
        self._recalled: dict[AttemptKey, str] = {}  # to be released, for that reason, if they have not begun
        self._revokes: dict[int, Revoke] = {}
        self._awaited: dict[AttemptKey, int] = {}  # parents that wait, and the ordinal they wait for
        self._session = ""
        self._welcomed = False
        self._fenced_at: float | None = None
        self._drain_until: float | None = None
        self._actions: list[ev.Action] = []
        self._dispatch_due = False

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
        if not self._welcomed or self._fenced_at is not None:
            return False
        return self.news > 0

    # ---- endings

    def _give_up(self, key: AttemptKey, reason: str, now: float) -> None:
        """Stop an attempt wherever it is; once it has stopped, tell the coordinator (unless it asked to drop it)."""
        held = self.held.get(key)
        if held is None:
            return
        if held.state in UNSTARTED:
            held.move("give_up")
            self._forget(held)
            self._release(key, reason)
        elif held.state is State.STORING:
            if reason == "drop":
                held.move("give_up")
                self._storing.pop(key, None)
                self._forget(held)
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
        """The fence ends them; children that run them."""
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
        """Attempts that a child process was given and has not begun go back as well, unless it begins them first."""
        for child in self.place.children.values():
            keys = [k for k in child.behind() if not run_id or self.held[k].plan.run.run_id == run_id]
            if keys:
                self._recalled.update(dict.fromkeys(keys, reason))
                self._actions.append(ev.RecallIn(child.id, keys))

    def _recall_revoked(self, revoke_id: int, revoke: Revoke) -> None:
        """Attempts that wait in a process for their turn are stolen as those that wait here are, if it lets them go."""
        self._revokes[revoke_id] = revoke
        self._actions += [ev.RecallIn(child, sorted(keys)) for child, keys in revoke.asked.items()]

    def _revoked(self, held: Held) -> bool:
        """Its process gave it back, and a revoke waits for it: it is the coordinator's again."""
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
        """What that process was asked for and has not given back, it keeps."""
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
        """Its child has let go of it."""
        reason = held.stop_reason
        held.move("finish")
        self._forget(held)
        if reason == "timeout":
            message = f"it ran longer than its timeout of {held.spec.timeout_ms} ms"
            self._finish(failed(held, Failure("timeout", message, True), held.spec.timeout_ms))
        else:
            self._release(held.key, reason or "stopped")

    def _release(self, key: AttemptKey, reason: str) -> None:
        """Told on the present stream, behind its Welcome; what ends between two streams is not in the next Hello."""
        if reason != "drop" and self._session:
            self._released.append((key, reason))

    def _forget(self, held: Held) -> None:
        key = held.key
        held.stop_reason = held.stop_reason or "gone"  # a queue drops it when it comes to the front
        self.held.pop(key, None)
        self._kills.pop(key, None)
        self._recalled.pop(key, None)
        if self._spawned or self._awaited:
            self._spawned.pop(key, None)
            self._awaited.pop(key, None)
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

    def _send(self, frame: work_pb2.WorkUp, now: float) -> None:
        """At once, after all that happened before. Lost without a stream: the next Hello makes up for it."""
        if self._welcomed and self._fenced_at is None:
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
