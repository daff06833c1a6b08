"""Processes of the simulated cluster. Each life of one has a loop of its own; what it runs is production code."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any, cast

from rollout.client.runs import Runs
from rollout.model.errors import RolloutError, StateError, StorageFullError, UnavailableError
from rollout.model.item import NewItem
from rollout.model.run import Order, RunSpec
from rollout.model.worker import Inventory
from rollout.wire.epoch import EpochGuard, Stamped
from rollout.wire.v1 import control_pb2_grpc, heartbeat_pb2_grpc, runs_pb2_grpc, work_pb2_grpc
from rollout_coordinator import wiring
from rollout_coordinator.core.core import Core
from rollout_coordinator.core.events import Event, Now
from rollout_coordinator.core.settings import CoreSettings
from rollout_coordinator.core.step import Emit, Reply, Send, SendRevoke, Snapshot, Step
from rollout_coordinator.driver import Driver
from rollout_coordinator.heartbeat_service import ControlService, HeartbeatService
from rollout_coordinator.leadership import Gate, Leadership, StandbyInterceptor
from rollout_coordinator.lease import LeaseKeeper
from rollout_coordinator.lifecycle import Coordinator
from rollout_coordinator.objects_gate import ObjectsGate
from rollout_coordinator.run_views import RunViews
from rollout_coordinator.runs_service import RunsService
from rollout_coordinator.sessions import Router
from rollout_coordinator.watchers import Watchers
from rollout_coordinator.work_service import WorkService
from rollout_worker import driver as worker_driver
from rollout_worker import session_events as ev
from rollout_worker.attempts import Plan
from rollout_worker.executors.port import Run
from rollout_worker.heartbeat import Heartbeat
from rollout_worker.link import Link
from rollout_worker.session import Session, SessionSettings
from rollout_worker.work_stream import RefusedError, WorkStream
from sim_certificates import CLUSTER, SimCredentials, ulid
from sim_checker import Sessions
from sim_executors import SimChild
from sim_loop import DEAD, NodeLoop
from sim_network import Server
from sim_scenario import RunPlan, WorkerPlan
from sim_store import Faults, StoreLedger

if TYPE_CHECKING:
    from sim_world import World

TTL = 5.0
HEARTBEAT = 1.0
TICK = 0.1  # of the coordinator
SELF_FENCE = 4.0
ORPHAN_GRACE = 20.0
WORKER_TICK = 0.5
LAST_WORDS_S = 1.0
WALL_MS = 1_750_000_000_000


class Nothing:
    """In place of metrics and of the objects' child process: takes everything."""

    addr = "objects"

    def __getattr__(self, name: str) -> Any:
        return self

    def __call__(self, *_: Any, **__: Any) -> Nothing:
        return self

    async def start(self) -> None: ...
    async def stop(self) -> None: ...
    async def close(self) -> None: ...


class NoAlarm:
    """In place of the thread that ends a deposed process: its time would be real."""

    daemon = True

    def __init__(self, seconds: float, act: Callable[[], object]) -> None: ...
    def start(self) -> None: ...
    def cancel(self) -> None: ...


class SimClock:
    """The coordinator's `Clock`: monotonic of the node's loop, a wall clock of the host that jumps."""

    def __init__(self, node: Node) -> None:
        self._node = node

    def now(self) -> Now:
        node = self._node
        loop = node.loop
        passed = loop.scheduler.now * loop.rate
        return Now(loop.start + passed, WALL_MS + node.wall_offset_ms + int(passed * 1000))

    def ulid(self) -> str:
        return self._node.world.fresh()


class Node:
    """A host. `start` begins a life of its process; `crash` ends it; `suspend_clock` is what a boot clock adds."""

    def __init__(self, world: World, name: str, rate: float) -> None:
        self.world = world
        self.name = name
        self.rate = rate
        self.wall_offset_ms = 0
        self.lives = 0
        self.lag = 0.0
        self.woke_at = float("-inf")
        self.loop = NodeLoop(world.scheduler, name)
        self.loop.kill()

    @property
    def alive(self) -> bool:
        return self.loop.state != DEAD

    def start(self) -> None:
        if self.alive or self.world.over:
            return
        self.lives += 1
        self.loop = self.world.scheduler.loop(self.name, start=100.0 * self.lives, rate=self.rate)
        self.loop.lag = self.lag
        self.loop.call_soon(self._begin)

    def _begin(self) -> None:
        raise NotImplementedError

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """A task whose failure is a finding."""
        self.loop.create_task(work).add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        error = None if task.cancelled() else task.exception()
        if error is not None:
            self.world.crashed(self.name, error)

    def crash(self) -> None:
        self.loop.kill()
        self.world.network.gone(self.name)

    def restart_in(self, seconds: float) -> None:
        self.world.later(seconds, self.start)

    def set_lag(self, seconds: float) -> None:
        self.lag = self.loop.lag = seconds


class ObservedCore:
    """The production core; every step is told to the world before its sends can leave."""

    def __init__(self, core: Core, node: CoordinatorNode) -> None:
        self._core = core
        self._node = node

    def handle(self, events: list[Event], now: Now) -> Step:
        step = self._core.handle(events, now)
        self._node.world.stepped(self._node, events, step, self._core._state.sessions)  # pyright: ignore[reportPrivateUsage]
        for send in step.sends:
            if isinstance(send, Reply):
                self._node.replies[send.request] = send
        return step

    def __getattr__(self, name: str) -> Any:
        return getattr(self._core, name)


class ObservedDriver(Driver):
    """The production driver; a reply is checked as it leaves."""

    node: CoordinatorNode

    def _answer(self, reply: Reply) -> None:
        self.node.world.checker.replied(self.node.name, self.node.epoch, reply.value)
        super()._answer(reply)


class CoordinatorNode(Node):
    def __init__(self, world: World, name: str, rate: float) -> None:
        super().__init__(world, name, rate)
        self.faults = Faults()
        self.address = f"{name}:7000"
        self.coordinator: Coordinator | None = None
        self.leadership = Leadership()
        self.replies: dict[int, Reply] = {}
        self.continued: set[str] = set()  # runs that went on by the last step
        self.sessions = Sessions()

    @property
    def epoch(self) -> int:
        return self.leadership.epoch

    def _begin(self) -> None:
        world = self.world
        clock = SimClock(self)
        ledger = StoreLedger(world.store, self.loop, self.faults)
        metrics = cast(Any, Nothing())
        store = cast(Any, Nothing())
        leadership = self.leadership = Leadership()
        watchers = Watchers()
        router = Router(watchers)
        gate = Gate(leadership, metrics, clock, lambda host: False)
        settings = CoreSettings(
            heartbeat_interval=HEARTBEAT, coordinator_failure_timeout=TTL, orphan_grace=ORPHAN_GRACE,
            ended_on_disk=True, window_items=24, window_items_max=64, commit_horizon=40, assign_items_max=4,
            retry_backoff_cap=3.0,
        )  # fmt: skip

        def make_core(snapshot: Snapshot, now: Now) -> Any:
            world.led(self)
            self.sessions = Sessions()
            return ObservedCore(Core.replay(settings, snapshot, now), self)

        def deliver(send: Send) -> None:
            self._deliver(send)
            router.deliver(send)

        driver = ObservedDriver(
            ledger=ledger, make_core=make_core, clock=clock, deliver=deliver,
            tick_interval=TICK, metrics=metrics,
        )  # fmt: skip
        driver.node = self
        router.find_run = driver.run_view
        views = RunViews(driver, ledger, clock)
        objects_gate = ObjectsGate(store)
        work = WorkService(gate, driver, router, objects_gate, CLUSTER)
        runs = RunsService(
            gate=gate, driver=driver, ledger=ledger, views=views, watchers=watchers, objects=objects_gate,
            store=store, clock=clock,
        )  # fmt: skip
        heartbeat = HeartbeatService(gate, driver, router, clock, metrics)
        control = ControlService(gate, router)
        incarnation = clock.ulid()
        lease = LeaseKeeper(ledger, incarnation, self.address, TTL, clock=self.loop.time, margin=0.5)
        parts = wiring.Parts(
            settings=cast(Any, None), clock=clock, incarnation=incarnation, ledger=ledger, storage=store, store=store,
            leadership=leadership, metrics=metrics, watchers=watchers, router=router, driver=driver, views=views,
            objects_gate=objects_gate, objects_child=cast(Any, Nothing()), gate=gate, revocations=cast(Any, None),
            work=work, runs=runs, heartbeat=heartbeat, control=control,
        )  # fmt: skip
        server = Server(self.loop, StandbyInterceptor(leadership))
        for add, servicer in (
            (work_pb2_grpc.add_WorkServicer_to_server, work),
            (runs_pb2_grpc.add_RunsServicer_to_server, runs),
            (heartbeat_pb2_grpc.add_HeartbeatServicer_to_server, heartbeat),
            (control_pb2_grpc.add_ControlServicer_to_server, control),
        ):
            cast(Any, add)(servicer, server)
        world.network.servers[self.address] = server
        coordinator = self.coordinator = Coordinator(
            parts, exit_hard=lambda code: None, lease=lease, hint_every_s=TTL / 3, alarm=NoAlarm
        )
        coordinator._frozen = True  # pyright: ignore[reportPrivateUsage]  # the interpreter is not the simulation's
        self.spawn(self._live(coordinator, server))

    async def _live(self, coordinator: Coordinator, server: Server) -> None:
        code = await coordinator.run()
        self.world.note(f"{self.name} exits {code}")
        server.listening = False
        self.loop.kill()
        # What it wrote is still sent: the kernel closes a connection behind its last bytes.
        self.world.later(LAST_WORDS_S, lambda loop=self.loop: self.world.network.ended(loop))
        self.restart_in(0.5 + self.world.random.random())

    def _deliver(self, send: Send) -> None:
        world = self.world
        if isinstance(send, Emit):
            world.emitted(self, send)
            return
        world.checker.sent(self.name, self.epoch, send, self.continued)
        if isinstance(send, SendRevoke):
            world.revoking(send.session)

    def stop(self) -> None:
        if self.coordinator is not None:
            self.coordinator.stop()


class ObservedGuard(EpochGuard):
    """The production guard; what it lets pass, on whichever stream, is told to the world."""

    def __init__(self, node: WorkerNode) -> None:
        super().__init__("worker")
        self._node = node

    def check_peer(self, message: Stamped) -> None:
        super().check_peer(message)
        self._node.world.heard(self._node, message.epoch)


class SimDriver(worker_driver.Driver):
    """The production driver with modelled child processes; no files, no subprocesses."""

    def __init__(self, node: WorkerNode, incarnation: str) -> None:
        world, loop = node.world, node.loop
        spec = node.spec
        self._node = node
        self._loop = loop
        guard = ObservedGuard(node)
        credentials = cast(Any, SimCredentials("worker", incarnation))
        settings = SessionSettings(
            incarnation=incarnation,
            inventory=Inventory(
                capacity=(("slots", float(spec.slots)),), labels=(("kind", spec.label),), executors=("slot", "engine")
            ),
            slots=spec.slots, max_engines=2, self_fence_s=SELF_FENCE, orphan_grace_s=ORPHAN_GRACE, cancel_grace_s=1.0,
        )  # fmt: skip
        self._session = Session(settings, plan)
        self._parts = cast(Any, _Parts(guard, incarnation, spec.slots, loop.time))
        self._link = Link(world.addresses, credentials, dial=world.dial(loop), jitter=world.jitter)
        self._work = WorkStream(self._link, guard, self.event, world.fresh)
        self._heartbeat = Heartbeat(
            self._link, guard, HEARTBEAT, self._beat, self._acknowledged, loop.time, ask_after_s=SELF_FENCE / 3
        )
        self._children: dict[int, Any] = {}
        self._tasks: set[asyncio.Task[Any]] = set()
        self._over: asyncio.Future[str] = loop.create_future()
        self._flush_due = False
        self._flushed_at = 0.0
        self._process = cast(Any, _Process())

    async def run(self) -> str:
        loops = [
            self._loop.create_task(task)
            for task in (self._work.run(), self._heartbeat.run(), self._control(), self._ticks())
        ]
        await asyncio.wait([*loops, self._over], return_when=asyncio.FIRST_COMPLETED)
        if self._over.done():
            if self._over.result() == "drained":
                await self._work.finish(worker_driver.LEAVE_S)
            return self._over.result()
        for task in loops:
            if task.done():
                try:
                    task.result()
                except RefusedError:
                    return "refused"
        raise AssertionError("a loop of the worker ended")

    async def _ticks(self) -> None:
        while True:
            await asyncio.sleep(WORKER_TICK)
            self.event(ev.Tick())

    def _do_start_simulated(self, action: ev.StartChild) -> None:
        self._children[action.child] = SimChild(action.child, action.plan, self._loop, self._node)

    def _do_emit_simulated(self, action: ev.Emit) -> None:
        self._node.world.note(f"{self._node.name} {action.event}")
        self._node.world.count_event(action.event)

    def renew(self) -> None:
        self._renewed()

    @property
    def session_id(self) -> str:
        return self._work._session  # pyright: ignore[reportPrivateUsage]

    def child_ended(self, number: int) -> None:
        self._children.pop(number, None)

    def crash_child(self) -> bool:
        for child in self._children.values():
            child.crash()
            return True
        return False

    _ACTIONS = {
        **worker_driver.Driver._ACTIONS,  # pyright: ignore[reportPrivateUsage]
        ev.StartChild: _do_start_simulated,
        ev.Emit: _do_emit_simulated,
    }


class _Process:
    def cpu_percent(self) -> float:
        return 0.0

    def memory_info(self) -> Any:
        return self

    rss = 0


class _Parts:
    """What the reused methods of the driver read of its parts."""

    def __init__(self, guard: EpochGuard, incarnation: str, slots: int, clock: Callable[[], float]) -> None:
        self.guard = guard
        self.clock = clock
        self.incarnation = incarnation
        self.settings = self
        self.worker = self
        self.slots = slots
        self.drain_budget_s = 2.0


def plan(run: Run) -> Plan:
    return Plan(run, run.workload, f"{run.workload}")


class WorkerNode(Node):
    def __init__(self, world: World, spec: WorkerPlan) -> None:
        super().__init__(world, spec.name, spec.rate)
        self.spec = spec
        self.driver: SimDriver = cast(Any, None)
        self.incarnation = ""
        self.slowness = 1.0
        self.drain_at_revoke: float | None = None

    def _begin(self) -> None:
        self.incarnation = self.world.fresh_worker()
        self.driver = SimDriver(self, self.incarnation)
        self.spawn(self._live())

    async def _live(self) -> None:
        how = await self.driver.run()
        self.world.note(f"{self.name} ends {how}")
        self.crash()
        self.restart_in(0.3 + self.world.random.random())

    def crash(self) -> None:
        self.world.checker.died(self.incarnation)
        super().crash()

    def drain(self, budget_s: float) -> None:
        if self.alive and self.driver is not None:
            self.loop.call_soon(self.driver.drain, "preemption", budget_s)


class ClientNode(Node):
    """Submits its runs and reads their commit logs; what it has read is on its disk and survives it."""

    def __init__(self, world: World, name: str) -> None:
        super().__init__(world, name, 1.0)
        self.plans: list[tuple[str, RunPlan]] = []
        self.cursors: dict[str, int] = {}
        self.done: set[str] = set()

    def _begin(self) -> None:
        credentials = cast(Any, SimCredentials("operator", ulid(1)))
        runs = Runs(
            self.world.addresses,
            credentials,
            patience_s=1000.0,
            dial=self.world.dial(self.loop),
            jitter=self.world.jitter,
        )
        for run_id, how in self.plans:
            if run_id not in self.done:
                self.spawn(self._submit(runs, run_id, how))
                self.spawn(self._watch(runs, run_id))

    async def _submit(self, runs: Runs, run_id: str, how: RunPlan) -> None:
        await asyncio.sleep(max(0.0, how.at - self.world.scheduler.now))
        ids = self.world.ids(run_id)
        items = [
            NewItem(ids[n], act.payload(), how.specs[index]) for n, (act, index) in enumerate(how.items)
        ]  # fmt: skip
        spec = run_spec(run_id, how)
        while True:
            try:
                await runs.submit(
                    spec, lambda seq: items[seq:], progress=lambda n: self.world.checker.acknowledged_submit(run_id, n)
                )
                return
            except StateError as error:  # the run has ended meanwhile: killed, failed or stopped early
                if not self.world.is_known(run_id):
                    raise self.world.violation("submit", f"{run_id}: {error}") from error
                if self.world.final(run_id):
                    return
                await asyncio.sleep(0.5)  # somebody will continue it
            except StorageFullError:
                await asyncio.sleep(1.0)  # the user makes room and gives the same command again

    async def _watch(self, runs: Runs, run_id: str) -> None:
        await asyncio.sleep(max(0.0, self.world.opened_at(run_id) + 0.2 - self.world.scheduler.now))
        while run_id not in self.done:
            try:
                async for page in runs.watch(run_id, self.cursors.get(run_id, 0), payloads=False):
                    self.world.checker.page(run_id, page.entries)
                    self.cursors[run_id] = self.cursors.get(run_id, 0) + len(page.entries)
                    if page.last and self.world.final(run_id):
                        self.done.add(run_id)
                        self.world.finished(run_id)
            except UnavailableError:
                raise
            except RolloutError as error:
                if error.code not in ("not_found", "storage_full"):
                    raise
            await asyncio.sleep(0.5)


class OperatorNode(Node):
    """Gives the scenario's commands."""

    def __init__(self, world: World) -> None:
        super().__init__(world, "op", 1.0)
        self.runs: Runs = cast(Any, None)

    def _begin(self) -> None:
        credentials = cast(Any, SimCredentials("operator", ulid(2)))
        self.runs = Runs(
            self.world.addresses,
            credentials,
            patience_s=1000.0,
            dial=self.world.dial(self.loop),
            jitter=self.world.jitter,
        )

    async def verb(self, run_id: str, verb: str, priority: int = 0) -> bool:
        """Whether it was obeyed; a run in another state says no."""
        while True:
            try:
                await self.runs.command(run_id, verb, priority=priority)
            except StorageFullError:
                await asyncio.sleep(1.0)
            except RolloutError as error:
                if error.code in ("wrong_state", "not_found"):
                    return False
                raise
            else:
                return True


def run_spec(run_id: str, how: RunPlan) -> RunSpec:
    return RunSpec(
        run_id, how.kind, b"{}", order=Order(how.order), priority=how.priority, max_in_flight=how.max_in_flight,
        lanes=how.lanes, policies=how.policies, pause_timeout_ms=how.pause_timeout_ms,
    )  # fmt: skip
