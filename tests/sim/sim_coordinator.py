"""A coordinator: production code from the services to the lease, watched at the core and where sends leave."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

from rollout.wire.v1 import control_pb2_grpc, heartbeat_pb2_grpc, runs_pb2_grpc, work_pb2_grpc
from rollout_coordinator import wiring
from rollout_coordinator.core.core import Core
from rollout_coordinator.core.events import Event, Now
from rollout_coordinator.core.settings import CoreSettings
from rollout_coordinator.core.step import Emit, Reply, Send, SendRevoke, Snapshot, Step
from rollout_coordinator.driver import Driver
from rollout_coordinator.heartbeat_service import ControlService, HeartbeatService
from rollout_coordinator.history import History
from rollout_coordinator.leadership import Gate, Leadership, StandbyInterceptor
from rollout_coordinator.lease import LeaseKeeper
from rollout_coordinator.lifecycle import Coordinator
from rollout_coordinator.members import Members
from rollout_coordinator.objects_gate import ObjectsGate
from rollout_coordinator.relay import Relay
from rollout_coordinator.run_views import RunViews
from rollout_coordinator.runs_service import RunsService
from rollout_coordinator.sessions import Router
from rollout_coordinator.watchers import Watchers
from rollout_coordinator.work_service import WorkService
from sim_certificates import CLUSTER
from sim_checker import Sessions
from sim_network import Server
from sim_node import HEARTBEAT, ORPHAN_GRACE, TTL, Node
from sim_store import Faults, StoreLedger

if TYPE_CHECKING:
    from sim_world import World

TICK = 0.1  # of the coordinator
LAST_WORDS_S = 1.0
WALL_MS = 1_750_000_000_000
_tuple = tuple.__new__  # what `Now(...)` calls, without a function of Python between


class Nothing:
    """In place of metrics and of the objects' child process: takes everything."""

    addr = "objects"

    def __getattr__(self, name: str) -> Any:
        setattr(self, name, self)  # asked once
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
        return _tuple(Now, (loop.start + passed, WALL_MS + node.wall_offset_ms + int(passed * 1000)))

    def ulid(self) -> str:
        return self._node.world.fresh()


class ObservedCore:
    """The production core; every step is told to the world before its sends can leave."""

    def __init__(self, core: Core, node: CoordinatorNode) -> None:
        self._core = core
        self._node = node

    def handle(self, events: list[Event], now: Now) -> Step:
        step = self._core.handle(events, now)
        self._node.world.stepped(self._node, events, step, self._core._state)  # pyright: ignore[reportPrivateUsage]
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
        self.ended: set[tuple[int, int, int]] = set()  # attempts that it cancelled, or whose worker left by it
        self.sessions = Sessions()
        self.crashes_to_come: list[tuple[float, float]] = []  # as leader: so long after it began to be one, down for
        self._core: Core | None = None

    def recovering(self) -> bool:
        """It leads, and a worker of its ledger that holds something has not said Hello to it."""
        assert self._core is not None
        workers = self._core._state.workers.values()  # pyright: ignore[reportPrivateUsage]
        return any(worker.batches and not worker.session for worker in workers)

    @property
    def epoch(self) -> int:
        return self.leadership.epoch

    def _begin(self) -> None:
        world = self.world
        clock = SimClock(self)
        ledger = cast(Any, StoreLedger(world.store, self.loop, self.faults))  # without what only people read
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
            self._core = Core.replay(settings, snapshot, now)
            return ObservedCore(self._core, self)

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
        relay = Relay(metrics)
        work = WorkService(gate, driver, router, objects_gate, relay, CLUSTER)
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
            work=work, runs=runs, relay=relay, serve=cast(Any, None), heartbeat=heartbeat, control=control,
            doctor=cast(Any, None), members=Members(store, (), lambda: clock.now().wall_ms),
            history=History(ledger, clock), history_service=cast(Any, None),
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
        world.checker.sent(self.name, self.epoch, send, self.continued, self.ended)
        if isinstance(send, SendRevoke):
            world.revoking(send.session)

    def stop(self) -> None:
        if self.coordinator is not None:
            self.coordinator.stop()
