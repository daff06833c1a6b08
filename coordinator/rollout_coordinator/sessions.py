"""Destinations of the driver's sends: Work streams, Control streams, watchers and the log."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import structlog
from rollout.model.errors import ConflictError, RolloutError, UnavailableError
from rollout.model.run import RunSpec

from rollout_coordinator.core.step import (
    CloseSession,
    Emit,
    RunConfigured,
    RunMoved,
    Send,
    SendAssign,
    SendControl,
    SendRunEnded,
)
from rollout_coordinator.core.views import RunView
from rollout_coordinator.watchers import Watchers

log = structlog.get_logger()

OUTBOX_MAX = 10_000
"""Unread sends after which a worker's stream is closed; credit keeps honest workers far below."""


class Note(Protocol):
    """Records an event for users."""

    def __call__(self, event: str, level: str = "info", **fields: Any) -> None: ...


def unnoted(event: str, level: str = "info", **fields: Any) -> None:
    """Record nothing."""


class Outbox:
    """The sends of one stream, in order. The driver puts without waiting; the stream's writer takes.

    Relayed data is queued behind them, in an order of its own: no result waits for it.
    """

    def __init__(self) -> None:
        self._sends: deque[Any] = deque()
        self._data: deque[tuple[Any, int]] = deque()
        self._ready = asyncio.Event()
        self._taken = asyncio.Event()
        self.data_bytes = 0
        self.closed: RolloutError | None = None
        self.failed = asyncio.Event()

    def put(self, send: Any) -> None:
        if self.closed is None:
            self._sends.append(send)
            if len(self._sends) > OUTBOX_MAX:
                self.close(UnavailableError("This worker does not read its stream; open a new one."))
            self._ready.set()

    def put_data(self, frame: Any, size: int) -> None:
        """Queue data of `size` bytes, which count in `data_bytes` until taken; the caller enforces the limit."""
        if self.closed is None:
            self._data.append((frame, size))
            self.data_bytes += size
            self._ready.set()

    async def room(self, limit: int) -> None:
        """Wait until at most `limit` bytes of data are queued, or nobody will take them."""
        while self.data_bytes > limit and self.closed is None:
            self._taken.clear()
            await self._taken.wait()

    def close(self, error: RolloutError) -> None:
        """Send what is queued except data, then end the stream with `error`."""
        if self.closed is None:
            self.closed = error
            self._data.clear()
            self.data_bytes = 0
            self._ready.set()
            self._taken.set()

    def fail(self, error: RolloutError) -> None:
        """End the stream with `error` at once, sending nothing more."""
        self.close(error)
        self._sends.clear()
        self.failed.set()

    async def take(self) -> Any | None:
        """Return the next send, or None once closed and empty."""
        while (send := self.take_nowait()) is None:
            if self.closed is not None:
                return None
            self._ready.clear()
            await self._ready.wait()
        return send

    def take_nowait(self) -> Any | None:
        if self._sends:
            return self._sends.popleft()
        if not self._data:
            return None
        frame, size = self._data.popleft()
        self.data_bytes -= size
        self._taken.set()
        return frame


@dataclass(slots=True)
class AssignWithRuns:
    """An assignment, and the runs whose configuration this session has not received yet."""

    send: SendAssign
    runs: dict[str, RunSpec]


class Session:
    """One open Work stream."""

    def __init__(self, session: str, incarnation: str) -> None:
        self.id = session
        self.incarnation = incarnation
        self.outbox = Outbox()
        self.known_runs: set[str] = set()  # runs whose configuration was put on this session's outbox


class Router:
    """`deliver` runs inside the driver's task, after the commit, and never waits."""

    def __init__(self, watchers: Watchers, note: Note = unnoted) -> None:
        self._note = note
        self._sessions: dict[str, Session] = {}
        self._incarnations: dict[str, Session] = {}  # the newest of each worker
        self._controls: dict[str, Outbox] = {}
        self._watchers = watchers
        self.find_run: Callable[[str], RunView | None] = lambda run_id: None

    @property
    def open_sessions(self) -> int:
        return len(self._sessions)

    @property
    def has_streams(self) -> bool:
        """Whether any worker is still connected: its Control stream ends last, once its output is shipped."""
        return bool(self._sessions or self._controls)

    def has_worker(self, incarnation: str) -> bool:
        """Return whether a Work stream of this incarnation is open."""
        return incarnation in self._incarnations

    def register(self, session: Session) -> None:
        if session.id in self._sessions:
            raise ConflictError(f"Session {session.id} is open already; make a fresh ULID for each stream.")
        self._sessions[session.id] = session
        self._incarnations[session.incarnation] = session

    def unregister(self, session: Session) -> None:
        if self._sessions.get(session.id) is session:
            del self._sessions[session.id]
        if self._incarnations.get(session.incarnation) is session:
            del self._incarnations[session.incarnation]

    def subscribe(self, incarnation: str, outbox: Outbox) -> None:
        """Subscribe a Control stream; the newest of a worker replaces the previous one."""
        before = self._controls.get(incarnation)
        if before is not None:
            before.close(ConflictError("A newer Control stream of this worker replaced this one."))
        self._controls[incarnation] = outbox

    def unsubscribe(self, incarnation: str, outbox: Outbox) -> None:
        if self._controls.get(incarnation) is outbox:
            del self._controls[incarnation]

    def close_all(self, error: RolloutError) -> None:
        """End every stream, because the core is gone; workers and watchers reconnect."""
        for session in list(self._sessions.values()):
            session.outbox.close(error)
        for outbox in list(self._controls.values()):
            outbox.close(error)
        self._watchers.wake_all()

    def deliver(self, send: Send) -> None:
        if isinstance(send, RunMoved):
            self._watchers.moved(send.run_id)
        elif isinstance(send, RunConfigured):
            for session in self._sessions.values():
                session.known_runs.discard(send.run_id)
        elif isinstance(send, Emit):
            if send.logged:
                emit(send)
            self._note(send.event, send.level, **send.fields)
        elif isinstance(send, SendControl):
            outbox = self._controls.get(send.incarnation)
            if outbox is not None:
                outbox.put(send)
        else:
            session = self._sessions.get(getattr(send, "session", ""))
            if session is None:
                return  # the stream broke meanwhile; Hello reconciles
            if isinstance(send, CloseSession):
                session.outbox.close(send.error)
                return
            if isinstance(send, SendAssign):
                session.outbox.put(self._with_runs(session, send))
                return
            if isinstance(send, SendRunEnded):
                session.known_runs.discard(send.run_id)
            session.outbox.put(send)

    def _with_runs(self, session: Session, send: SendAssign) -> AssignWithRuns:
        runs: dict[str, RunSpec] = {}
        for group in send.groups:
            if group.run_id not in session.known_runs:
                view = self.find_run(group.run_id)
                if view is not None:
                    runs[group.run_id] = view.spec
                    session.known_runs.add(group.run_id)
        return AssignWithRuns(send, runs)


def emit(send: Emit) -> None:
    getattr(log, send.level, log.info)(send.event, **send.fields)
