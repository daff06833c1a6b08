"""A core, a fake ledger, a clock that stands still until told, and workers that do what they are told."""

from __future__ import annotations

from typing import Any

from core_ledger import FakeLedger
from rollout.model.errors import RolloutError
from rollout.model.item import DEFAULT_SPEC, Failure, ItemSpec, Key, Outcome
from rollout.model.run import RunSpec
from rollout.model.worker import Credit, Inventory
from rollout_coordinator.core import step as st
from rollout_coordinator.core.core import Core
from rollout_coordinator.core.events import (
    Event,
    Keys,
    Now,
    ResultGroup,
    RunCommand,
    SubmitItems,
    SubmitOpen,
    SubmitSeal,
    Tick,
    WorkerBeat,
    WorkerConfirm,
    WorkerHello,
    WorkerReleased,
    WorkerResults,
    WorkerStarted,
)
from rollout_coordinator.core.settings import CoreSettings

ItemKey = tuple[int, int]
LEVELS = ("debug", "info", "warning", "error")
MANY_LOADS = 10_000
"""Reads that follow from one step; a core without end in it fails here, not at the time limit of its test."""


class FakeWorker:
    """Holds what it is given; the test says what becomes of it."""

    def __init__(self, world: World, name: str, inventory: Inventory, credit: Credit) -> None:
        self.world, self.name, self.inventory, self.credit = world, name, inventory, credit
        self.sessions = 0
        self.session = ""
        self.welcomed = ""
        self.held: dict[ItemKey, int] = {}
        self.started: set[ItemKey] = set()
        self.info: dict[ItemKey, tuple[bytes, Any, ItemSpec, Any]] = {}
        self.unacked: dict[ItemKey, int] = {}
        self.revokes: list[st.SendRevoke] = []
        self.pauses: list[str] = []
        self.children: dict[ItemKey, list[st.SendChildren]] = {}
        self.resumed: list[Key] = []
        self.alive = True
        self.predecessors: dict[ItemKey, tuple[int, int, Any]] = {}
        self.isolated: set[ItemKey] = set()
        self.failures: dict[ItemKey, int] = {}
        self.handoff: dict[ItemKey, bytes] = {}
        self.draining = self.preempted = False
        self.silent = False
        self.deaf = False  # what it is told to stop, it has not stopped

    def keys(self, what: dict[ItemKey, int]) -> list[Keys]:
        by: dict[int, Keys] = {}
        for (log, seq), attempt in what.items():
            keys = by.setdefault(log, Keys(log, [], []))
            keys.seq.append(seq)
            keys.attempt.append(attempt)
        return list(by.values())

    def hello(self) -> st.Step:
        self.revokes.clear()
        self.sessions += 1
        self.session = f"{self.name}-s{self.sessions}"
        self.world.by_session[self.session] = self
        return self.world.step(
            WorkerHello(
                self.session,
                self.name,
                f"host-{self.name}",
                self.inventory,
                self.credit,
                self.keys(self.held),
                self.keys({k: a for k, a in self.held.items() if k in self.started}),
                self.keys(self.unacked),
                self.draining,
                self.preempted,
            )
        )

    def beat(self) -> None:
        self.world.step(WorkerBeat(self.name, f"host-{self.name}", self.world.mono))

    def start(self, *which: ItemKey) -> None:
        keys = {k: self.held[k] for k in which or tuple(self.held)}
        self.started |= set(keys)
        self.world.step(WorkerStarted(self.session, self.keys(keys)))

    def finish(
        self, *which: ItemKey, failure: Failure | None = None, data: bytes | None = None,
        attempt: int | None = None, outcome: Outcome | None = None, keeps: tuple[bytes, ...] = (),
        units: tuple[int, int] = (0, 0),
    ) -> st.Step:  # fmt: skip
        keys = {k: self.held.pop(k, attempt or 1) if attempt is None else attempt for k in which or tuple(self.held)}
        return self.send(keys, failure, data, outcome, keeps, units)

    def send(
        self, keys: dict[ItemKey, int], failure: Failure | None = None, data: bytes | None = None,
        outcome: Outcome | None = None, keeps: tuple[bytes, ...] = (), units: tuple[int, int] = (0, 0),
    ) -> st.Step:  # fmt: skip
        groups: list[ResultGroup] = []
        for one in self.keys(keys):
            n = len(one.seq)
            end = None if failure is None and outcome is None else [outcome or Outcome.FAILED] * n
            groups.append(
                ResultGroup(
                    one.log,
                    one.seq,
                    one.attempt,
                    end,
                    [data if data is not None else b"r%d" % s for s in one.seq],
                    dict.fromkeys(range(n), failure) if failure else {},
                    [5] * n,
                    [units[0]] * n if units[0] else None,
                    [units[1]] * n if units[1] else None,
                    keeps=dict.fromkeys(range(n), keeps) if keeps else {},
                )
            )
        for key, attempt in keys.items():
            self.unacked[key] = attempt
            self.started.discard(key)
            self.held.pop(key, None)
        return self.world.step(WorkerResults(self.session, groups))

    def release(self, *which: ItemKey, reason: str = "drain") -> None:
        keys = {k: self.held.pop(k) for k in which}
        self.started -= set(keys)
        self.world.step(WorkerReleased(self.session, self.keys(keys), reason))

    def confirm(self) -> None:
        """Answer the oldest revoke truthfully."""
        revoke = self.revokes.pop(0)
        up: dict[ItemKey, int] = {}
        kept: dict[ItemKey, int] = {}
        for keys in revoke.keys:
            for seq, attempt in zip(keys.seq, keys.attempt, strict=True):
                key = (keys.log, seq)
                if self.held.get(key) == attempt and key not in self.started:
                    up[key] = self.held.pop(key)
                else:
                    kept[key] = attempt
        self.world.step(WorkerConfirm(self.session, revoke.revoke_id, self.keys(up), self.keys(kept)))

    def forget(self, keys: list[Keys]) -> None:
        for one in keys:
            for seq, attempt in zip(one.seq, one.attempt, strict=True):
                key = (one.log, seq)
                if self.held.get(key) == attempt:
                    del self.held[key]
                    self.started.discard(key)
                if self.unacked.get(key) == attempt:
                    del self.unacked[key]

    def receive(self, send: Any) -> None:
        if isinstance(send, st.SendWelcome):
            self.welcomed = send.session
        assert self.welcomed == send.session or isinstance(send, st.CloseSession), "Welcome comes first"
        if isinstance(send, st.SendAssign):
            for g in send.groups:
                for i, seq in enumerate(g.seq):
                    key = (g.log, seq)
                    assert key not in self.held, "assigned twice to one worker"
                    self.held[key] = g.attempt[i]
                    self.info[key] = (g.ids[i], g.payloads[i], g.specs[i], g.parent)
                for i, seq, attempt, data in g.predecessors:
                    self.predecessors[g.log, g.seq[i]] = (seq, attempt, data)
                self.handoff |= {(g.log, g.seq[i]): data for i, data in g.handoff.items()}
                self.isolated |= {(g.log, g.seq[i]) for i in g.isolate}
                self.failures |= {(g.log, g.seq[i]): n for i, n in g.failures.items()}
        elif isinstance(send, st.SendWelcome):
            self.forget(send.drop)
            self.forget(send.accepted)
        elif isinstance(send, st.SendAccepted):
            self.forget(send.accepted)
            self.forget(send.stale)
        elif isinstance(send, st.SendCancel):
            if not self.deaf:
                self.forget(send.keys)
        elif isinstance(send, st.SendRevoke):
            self.revokes.append(send)
        elif isinstance(send, st.SendPause):
            self.pauses.append(send.run_id)
        elif isinstance(send, st.SendChildren):
            self.children.setdefault((send.parent.log, send.parent.seq), []).append(send)
        elif isinstance(send, st.SendResume):
            self.resumed.append(send.parent)
        elif isinstance(send, st.CloseSession):
            self.session = ""


class World:
    def __init__(self, **settings: Any) -> None:
        self.settings = CoreSettings(**settings)
        self.core = Core(self.settings)
        self.ledger = FakeLedger()
        self.mono, self.wall = 100.0, 1_000_000
        self.by_session: dict[str, FakeWorker] = {}
        self.workers: dict[str, FakeWorker] = {}
        self.replies: dict[int, st.Reply] = {}
        self.emits: list[st.Emit] = []
        self.requests = 0
        self.loads: list[Any] = []
        self.hold_loads = False
        self.wake_at: float | None = None
        self.closed: list[st.CloseSession] = []

    @property
    def now(self) -> Now:
        return Now(self.mono, self.wall)

    def step(self, *events: Event) -> st.Step:
        """One step; then answers from the ledger, each a step of its own, until there are none."""
        first = self._step(events)
        answered = 0
        while self.loads and not self.hold_loads:
            self._step((self.ledger.answer(self.loads.pop(0)),))
            answered += 1
            assert answered < MANY_LOADS, "asks the ledger without end"
        return first

    def _step(self, events: tuple[Event, ...]) -> st.Step:
        step = self.core.handle(events, self.now)
        self.ledger.commit(step.writes)
        for send in step.sends:
            if isinstance(send, st.Reply):
                assert send.request not in self.replies, "exactly one reply"
                self.replies[send.request] = send
            elif isinstance(send, st.Emit):
                assert send.level in LEVELS and isinstance(send.fields, dict), send
                self.emits.append(send)
            elif isinstance(send, st.CloseSession):
                assert isinstance(send.error, RolloutError), send
                self.closed.append(send)
            worker = self.by_session.get(getattr(send, "session", ""))
            if worker is not None and worker.session == getattr(send, "session", None) and worker.alive:
                worker.receive(send)
        self.loads.extend(step.loads)
        self.wake_at = step.wake_at
        return step

    def restart(self) -> None:
        self.loads.clear()
        self.core = Core.replay(self.settings, self.ledger.snapshot(), self.now)
        for worker in self.workers.values():
            worker.session = ""
            worker.revokes.clear()
        self.step(Tick())

    def pass_time(self, seconds: float, beat: bool = True) -> None:
        end = self.mono + seconds
        while self.mono < end - 1e-9:
            delta = min(0.25, end - self.mono)
            self.mono += delta
            self.wall += round(delta * 1000)
            beats = [
                WorkerBeat(w.name, f"host-{w.name}", self.mono)
                for w in self.workers.values()
                if beat and w.alive and not w.silent
            ]
            self.step(*beats, Tick())

    def worker(self, name: str, credit: int = 4, hello: bool = True, **inventory: Any) -> FakeWorker:
        inventory.setdefault("capacity", (("slots", 2.0),))
        inventory.setdefault("host", f"host-{name}")
        worker = FakeWorker(self, name, Inventory(**inventory), Credit(credit))
        self.workers[name] = worker
        if hello:
            worker.hello()
        return worker

    def ask(self, make: Any, *args: Any, **kwargs: Any) -> st.Reply:
        self.requests += 1
        number = self.requests
        self.step(make(number, *args, **kwargs))
        return self.replies[number]

    def open(self, run_id: str = "R", **spec: Any) -> st.SubmitReply:
        spec.setdefault("config", b"{}")
        reply = self.ask(SubmitOpen, RunSpec(run_id, spec.pop("workload", "script"), **spec))
        if reply.error:
            raise reply.error
        return reply.value

    def submit(
        self, n: int, run_id: str = "R", first: int | None = None, specs: list[ItemSpec] | ItemSpec = DEFAULT_SPEC,
        payload: bytes = b"p", salt: bytes = b"",
    ) -> st.SubmitReply:  # fmt: skip
        view = self.core.run_view(run_id)
        assert view is not None
        first = view.submitted if first is None else first
        table = [specs] if isinstance(specs, ItemSpec) else specs
        unique = tuple(dict.fromkeys(table))
        index = None if len(unique) == 1 else [unique.index(table[i % len(table)]) for i in range(n)]
        ids = [b"%s%032d" % (salt, first + i) for i in range(n)]
        reply = self.ask(SubmitItems, run_id, first, ids, [payload] * n, unique, index)
        if reply.error:
            raise reply.error
        return reply.value

    def seal(self, count: int, run_id: str = "R") -> st.SubmitReply:
        reply = self.ask(SubmitSeal, run_id, count)
        if reply.error:
            raise reply.error
        return reply.value

    def verb(self, verb: str, run_id: str = "R", **more: Any) -> Any:
        reply = self.ask(RunCommand, run_id, verb, **more)
        if reply.error:
            raise reply.error
        return reply.value

    def view(self, run_id: str = "R") -> Any:
        return self.core.run_view(run_id)

    def parent(self) -> Key:
        """Opens a run with one item, whose place it is."""
        self.open()
        self.submit(1)
        return Key(self.root(), 0)

    def root(self, run_id: str = "R") -> int:
        return self.view(run_id).root_log

    def drain_all(self, rounds: int = 200) -> None:
        """Every worker finishes everything until nothing moves."""
        for _ in range(rounds):
            busy = False
            for worker in self.workers.values():
                while worker.revokes and worker.session:
                    worker.confirm()
                if worker.alive and worker.session and worker.held:
                    worker.finish()
                    busy = True
            if not busy:
                self.pass_time(0.5)
                if not any(w.held for w in self.workers.values() if w.alive and w.session):
                    return

    def events(self, name: str) -> list[dict[str, Any]]:
        return [e.fields for e in self.emits if e.event == name]
