"""A worker: production session, driver, streams and heartbeat; its child processes are modelled."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

from rollout.model.errors import ProtocolError
from rollout.model.item import Failure
from rollout.model.worker import Inventory
from rollout.wire.epoch import EpochGuard, Stamped
from rollout.wire.v1 import work_pb2
from rollout_worker import driver as worker_driver
from rollout_worker import session_events as ev
from rollout_worker.attempts import Plan
from rollout_worker.executors.port import Run
from rollout_worker.heartbeat import Heartbeat
from rollout_worker.link import Link
from rollout_worker.session import Session, SessionSettings
from rollout_worker.work_stream import RefusedError, WorkStream
from sim_certificates import SimCredentials
from sim_checker import Violation
from sim_executors import DEVICES, EXECUTORS, REPLICAS, SimChild, section
from sim_node import HEARTBEAT, ORPHAN_GRACE, SELF_FENCE, Node
from sim_scenario import WorkerPlan
from sim_starts import START_ERROR

if TYPE_CHECKING:
    from sim_world import World

WORKER_TICK = 0.5


class ObservedGuard(EpochGuard):
    """The production guard; what it lets pass, on whichever stream, is told to the world."""

    def __init__(self, node: WorkerNode) -> None:
        super().__init__()
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
        devices = tuple(f"{spec.name}-{n}" for n in range(spec.devices))
        capacity = {"slots": float(spec.slots)} | ({"gpus": float(spec.devices)} if devices else {})
        settings = SessionSettings(
            incarnation=incarnation,
            inventory=Inventory(
                capacity=tuple(capacity.items()), labels=(("kind", spec.label),), executors=spec.executors
            ),
            slots=spec.slots, devices=devices, max_engines=2, self_fence_s=SELF_FENCE, orphan_grace_s=ORPHAN_GRACE, cancel_grace_s=1.0,
        )  # fmt: skip
        self._session = Session(settings, plan)
        self._tracing = None
        self._parts = cast(Any, _Parts(guard, incarnation, spec.slots, loop.time))
        self._link = Link(world.addresses, credentials, dial=world.dial(loop), jitter=world.jitter)
        self._work = WorkStream(self._link, guard, self.event, world.fresh)
        self._heartbeat = Heartbeat(
            self._link, guard, HEARTBEAT, self._beat, self._acknowledged, loop.time, ask_after_s=SELF_FENCE / 2
        )
        self._children: dict[int, Any] = {}
        self._tasks: set[asyncio.Task[Any]] = set()
        self._over: asyncio.Future[str] = loop.create_future()
        self._flush_due = None
        self._flushed_at = 0.0
        self._usage = lambda: (0.0, 0)

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

    def _broke_protocol(self, error: ProtocolError) -> None:
        self._node.world.violation("protocol", f"{self._node.name} was sent: {error.message}")

    async def _ticks(self) -> None:
        while True:
            await asyncio.sleep(WORKER_TICK)
            self.event(ev.Tick())

    def _do_start_simulated(self, action: ev.StartChild) -> None:
        devices = action.devices or ()
        self._node.world.leased(
            self._node, devices, action.plan.devices, [c.devices for c in self._children.values() if not c.ended]
        )
        self._children[action.child] = SimChild(action.child, action.plan, self._loop, self._node, devices)

    def _do_emit_simulated(self, action: ev.Emit) -> None:
        self._node.world.note(f"{self._node.name} {action.event}")
        self._node.world.count_event(action.event)

    def renew(self) -> None:
        self._renewed()

    def lie(self) -> None:
        group = work_pb2.ResultGroup(log=1 << 30, seq=[0], attempt=[1], length=[1], data=b"!", duration_ms=[1])
        self._work.send(work_pb2.WorkUp(results=work_pb2.Results(groups=[group])))

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
    if run.executor != run.workload and run.config != section(run.executor):
        raise Violation("executor", f"{run.executor} is told {run.config}")
    return Plan(
        run,
        EXECUTORS[run.executor],
        run.executor,
        devices=DEVICES.get(run.executor, 0),
        replicas=REPLICAS.get(run.executor, 1),
    )


class WorkerNode(Node):
    def __init__(self, world: World, spec: WorkerPlan) -> None:
        super().__init__(world, spec.name, spec.rate)
        self.spec = spec
        self.driver: SimDriver = cast(Any, None)
        self.incarnation = ""
        self.slowness = 1.0
        self.drain_at_revoke: float | None = None
        self.starts_fail: tuple[bool, bool] = (False, False)  # whether, and whether another try may help

    def _begin(self) -> None:
        self.incarnation = self.world.fresh_worker(self.spec.executors)
        self.driver = SimDriver(self, self.incarnation)
        self.spawn(self._live())

    async def _live(self) -> None:
        how = await self.driver.run()
        self.world.note(f"{self.name} ends {how}")
        self.crash()
        self.restart_in(0.3 + self.world.random.random())

    def start_failure(self, executor: str) -> Failure | None:
        """Why a process of that executor does not start."""
        fails, retryable = self.starts_fail
        if executor in self.spec.cannot_start:
            fails, retryable = True, False
        if not fails:
            return None
        self.world.start_failed(self, executor)
        return Failure(START_ERROR, f"{executor} is not there", retryable)

    def crash(self) -> None:
        self.world.checker.died(self.incarnation)
        super().crash()

    def drain(self, budget_s: float) -> None:
        if self.alive and self.driver is not None:
            self.loop.call_soon(self.driver.drain, "preemption", budget_s)
