"""One incarnation of a worker. It waits and moves bytes for the session, which makes all decisions."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Coroutine
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import grpc
import grpc.aio
import structlog
from rollout.compute.usage import Usage
from rollout.config.logging import set_level
from rollout.config.settings import WorkerSettings
from rollout.model.errors import ProtocolError, RolloutError, UnavailableError
from rollout.model.ids import make_ulid
from rollout.objects.fs import make_directory
from rollout.security import files
from rollout.security.credentials import Credentials
from rollout.telemetry.spans import Spans
from rollout.wire.channel import open_channel, parse_address
from rollout.wire.epoch import EpochGuard
from rollout.wire.v1 import control_pb2, control_pb2_grpc, heartbeat_pb2

from rollout_worker import session_events as ev
from rollout_worker.attempts import Plan
from rollout_worker.heartbeat import Heartbeat
from rollout_worker.linger import LINGER_S, linger
from rollout_worker.link import EOF, Link, told_to_stop
from rollout_worker.processes.child import ChildProcess, Guard, Handlers
from rollout_worker.processes.guard import clock
from rollout_worker.processes.memory import MemoryGroups
from rollout_worker.sandboxes import trees
from rollout_worker.session import Phase, Session
from rollout_worker.shipping import Shipper
from rollout_worker.supply import CallPlugin, Supply
from rollout_worker.tracing import AttemptTracing
from rollout_worker.work_stream import RefusedError, WorkStream

log = structlog.get_logger()

TICK_S = 0.05
LEAVE_S = 2.0
END_CHILDREN_S = 1.0
"""Seconds for the children of a drained worker to close, which ends their output."""
SHIP_S = 2.5
_PHASES = {
    Phase.INIT: heartbeat_pb2.WORKER_STATE_INIT,
    Phase.READY: heartbeat_pb2.WORKER_STATE_READY,
    Phase.DRAINING: heartbeat_pb2.WORKER_STATE_DRAINING,
    Phase.FENCED: heartbeat_pb2.WORKER_STATE_FENCED,
}


def new_ulid() -> str:
    return make_ulid(time.time_ns() // 1_000_000, os.urandom(10))


_IN_CHILD: dict[type, Callable[[ChildProcess, Any], None]] = {
    ev.RelayIn: lambda child, action: child.relay(action.frame),
    ev.StopChild: lambda child, action: child.kill() if action.kill else child.stop(),
    ev.KillAt: lambda child, action: child.kill_at(action.at),
    ev.Deliver: lambda child, action: child.deliver(action.attempts),
    ev.CancelIn: lambda child, action: child.cancel(action.keys),
    ev.RecallIn: lambda child, action: child.recall(action.keys),
    ev.LeaveIn: lambda child, action: child.leave(action.budget_s),
    ev.HoldIn: lambda child, action: child.hold(action.on),
    ev.PassChildren: lambda child, action: child.pass_children(action.results),
    ev.ResumeIn: lambda child, action: child.resume(action.key),
}
"""Requests to a child process that still exists."""


@dataclass(slots=True)
class Parts:
    """Parts of an incarnation."""

    settings: WorkerSettings
    session: Session
    credentials: Credentials
    guard: EpochGuard
    incarnation: str
    reload_plugins: Callable[[list[str]], Coroutine[Any, Any, None]]
    call_plugin: CallPlugin
    secrets: Callable[[], Coroutine[Any, Any, dict[str, str]]]
    clock: Callable[[], float] = clock  # a simulation brings its own
    spans: Spans | None = None


class Driver:
    """Incarnation: `await run()` returns how it ended: drained | orphaned | refused."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._session = parts.session
        self._tracing = AttemptTracing(parts.spans, parts.incarnation) if parts.spans is not None else None
        settings = parts.settings
        self._link = Link(
            settings.transport.coordinator_addrs or [settings.transport.listen_addr],
            parts.credentials,
            on_addresses=partial(files.keep_addresses, files.expand(Path(settings.transport.tls_dir))),
        )
        self._work = WorkStream(self._link, parts.guard, self.event, new_ulid)
        self._heartbeat = Heartbeat(
            self._link,
            parts.guard,
            settings.transport.heartbeat_interval_ms / 1000,
            self._beat,
            self._acknowledged,
            parts.clock,
            ask_after_s=settings.transport.worker_self_fence_timeout_ms / 2000,
        )
        self._shipper = Shipper(self._link, parts.guard, parts.incarnation)
        self._scratch = Path(settings.worker.scratch_dir).absolute() / parts.incarnation
        self._children: dict[int, ChildProcess] = {}
        self._guard: Guard | None = None
        self._memory: MemoryGroups | None = None
        self._supply = Supply(
            settings.objects,
            self._objects_channel,
            parts.incarnation,
            parts.guard,
            parts.call_plugin,
            self.event,
            self._spawn_task,
        )
        self._tasks: set[asyncio.Task[Any]] = set()
        self._child_tasks: set[asyncio.Task[None]] = set()
        self._over: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._flush_due: asyncio.TimerHandle | None = None
        self._flushed_at = 0.0
        self._usage = Usage(parts.clock)
        self._work_tasks: list[asyncio.Task[Any]] = []

    @property
    def session(self) -> Session:
        return self._session

    @property
    def children(self) -> dict[int, ChildProcess]:
        return self._children

    # ---- life

    async def run(self) -> str:
        await asyncio.to_thread(self._prepare_scratch)
        self._guard = Guard(self._scratch)
        self._memory = MemoryGroups(f"rollout-{self._parts.incarnation}", self._guard.remove_groups)
        work = asyncio.create_task(self._work.run())
        loops = [
            work,
            asyncio.create_task(self._heartbeat.run()),
            asyncio.create_task(self._control()),
            asyncio.create_task(self._ticks()),
            asyncio.create_task(self._shipper.run()),
            asyncio.create_task(self._parts.credentials.keep_renewed(self._renewed)),
        ]
        self._work_tasks = loops
        try:
            await asyncio.wait([*loops, self._over], return_when=asyncio.FIRST_COMPLETED)
            if self._over.done():
                if self._over.result() == "drained":
                    await self._ship_output()
                    await self._work.finish(LEAVE_S)
                return self._over.result()
            for task in loops:
                if task.done():
                    try:
                        task.result()
                    except RefusedError as error:
                        log.error("worker_refused", error=error.message, by=error.context.get("by"))
                        return "refused" if error.context.get("by") != "not_allowed" else "not_allowed"
            raise AssertionError("a loop of the worker ended")
        finally:
            await self._close(loops)

    async def _ship_output(self) -> None:
        """Ship output of children, so that a drained worker does not leave before it is durable, within limits."""
        for child in self._children.values():
            child.stop()
        if self._child_tasks:
            await asyncio.wait(self._child_tasks, timeout=END_CHILDREN_S)
        lost = await self._shipper.drain(SHIP_S)
        if lost:
            log.warning("output_lost", worker=self._parts.incarnation, lines=lost)

    async def _close(self, loops: list[asyncio.Task[Any]]) -> None:
        if not self._over.done():
            self._over.set_result("closed")
        for child in self._children.values():
            child.kill()
        for task in [*loops, *self._tasks]:
            if task not in self._child_tasks:
                task.cancel()
        self._heartbeat.close()
        await asyncio.gather(*loops, *self._tasks, return_exceptions=True)
        await self._supply.close()
        await self._link.close()
        assert self._guard is not None
        await asyncio.to_thread(self._guard.close)

    def _prepare_scratch(self) -> None:
        make_directory(self._scratch, "[worker] scratch_dir")
        make_directory(Path(self._parts.settings.objects.cache_dir).absolute(), "[objects] cache_dir", 0o700)
        # What a machine that lost its power left behind; live daemons of this host refresh theirs.
        for old in self._scratch.parent.iterdir():
            if old.is_dir() and len(old.name) == 26 and old != self._scratch and _age_s(old) > 86400:
                with suppress(OSError):
                    trees.remove(str(old))

    def drain(self, reason: str, budget_s: float, preempted: bool = False) -> None:
        self.event(ev.Drain(reason, budget_s, preempted))

    # ---- the session

    def event(self, event: ev.Event) -> None:
        try:
            actions = self._session.handle(event, self._parts.clock())
        except ProtocolError as error:
            if not isinstance(event, ev.Frame):
                raise
            self._broke_protocol(error)
            return
        if self._tracing is not None:
            self._tracing.seen(event, actions)
        for action in actions:
            self._ACTIONS[type(action)](self, action)
        if self._session.wants_flush:
            self._flush_soon()

    def _flush_soon(self) -> None:
        """Flush at once for a single message, later for several together."""
        loop = asyncio.get_running_loop()
        due = self._flush_due
        if due is not None and due.when() - loop.time() <= LINGER_S:
            return
        linger_s = linger(self._fed(), self._session.credit.answer_s, self._session.news)
        if due is not None:
            if due.when() - loop.time() <= linger_s:
                return
            due.cancel()  # the engines have less in hand now, so others may wait for it; or it is enough
        idle = loop.time() - self._flushed_at > 2 * linger_s
        self._flush_due = loop.call_later(0 if idle else linger_s, self._flush)

    def _fed(self) -> bool:
        """Return whether only engines work, and each holds rows beyond those it runs, so that nothing waits for one
        report."""
        busy = [child for child in self._session.place.children.values() if child.in_hand]
        return bool(busy) and all(c.plan.kind == "engine" and len(c.in_hand) > c.width for c in busy)

    def _broke_protocol(self, error: ProtocolError) -> None:
        log.error("coordinator_broke_protocol", error=error.message)
        self._work.drop()

    def _flush(self) -> None:
        self._flush_due = None
        self._flushed_at = asyncio.get_running_loop().time()
        self.event(ev.Flush())

    async def _ticks(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            self.event(ev.Tick())

    def _spawn_task(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    # ---- actions

    def _do_send(self, action: ev.Send) -> None:
        self._work.send(action.frame)

    def _do_relay(self, action: ev.Relay) -> None:
        self._work.relay(action.frame)

    def _do_start(self, action: ev.StartChild) -> None:
        assert self._guard is not None
        number = action.child
        handlers = Handlers(self.event, self._supply.answer, self._parts.secrets, self._shipper)
        scratch = self._scratch / f"child-{number}"
        child = ChildProcess(action, scratch, self._supply.cache_dir, self._guard, handlers, self._memory)
        self._children[number] = child
        task = self._spawn_task(self._run_child(number, action.plan, child))
        self._child_tasks.add(task)
        task.add_done_callback(self._child_tasks.discard)

    async def _run_child(self, number: int, plan: Plan, child: ChildProcess) -> None:
        log.debug("child_starting", child=number, executor=plan.run.executor, kind=plan.kind)
        try:
            await child.run()
        finally:
            self._children.pop(number, None)

    def _do_in_child(self, action: Any) -> None:
        child = self._children.get(action.child)
        if child is not None:
            _IN_CHILD[type(action)](child, action)

    def _do_fetch(self, action: ev.Fetch) -> None:
        self._supply.fetch(action.held)

    def _do_store(self, action: ev.Store) -> None:
        self._supply.store(action)

    def _do_drop(self, action: ev.DropStream) -> None:
        self._work.drop(renewed=action.reason == "self_fence")

    def _do_emit(self, action: ev.Emit) -> None:
        getattr(log, action.level)(action.event, worker=self._parts.incarnation, **action.fields)

    def _do_exit(self, action: ev.Exit) -> None:
        if not self._over.done():
            self._over.set_result(action.how)

    # ---- objects

    async def _objects_channel(self) -> grpc.aio.Channel:
        address = self._session.objects_addr
        if not address:
            raise UnavailableError("no coordinator has said yet where objects are served")
        parsed = parse_address(address)
        if parsed.is_wildcard:
            address = str(parsed._replace(host=self._link.host))
        return open_channel(address, self._parts.credentials.channel_credentials())

    # ---- beats, control, certificates

    def _beat(self) -> heartbeat_pb2.BeatUp:
        session = self._session
        running = session.running
        cpu_percent, memory_mib = self._usage()
        return heartbeat_pb2.BeatUp(
            incarnation=self._parts.incarnation,
            state=_PHASES[session.phase],
            load=running / max(1, self._parts.settings.worker.slots),
            running=running,
            backlog=session.backlog,
            cpu_percent=cpu_percent,
            memory_mib=memory_mib,
        )

    def _acknowledged(self, sent_at: float, known: bool) -> None:
        self.event(ev.Acknowledged(sent_at))

    def _renewed(self) -> None:
        """Handle a renewed link: other loops follow it, and Work says Hello again without losses."""
        log.debug("certificate_renewed", worker=self._parts.incarnation)
        self._link.rebuild()
        self._work.drop(renewed=True)

    async def _control(self) -> None:
        while True:
            changed = self._link.changed
            stub: Any = control_pb2_grpc.ControlStub(self._link.channel)
            request = control_pb2.SubscribeRequest(
                epoch=self._parts.guard.current, incarnation=self._parts.incarnation
            )  # fmt: skip
            try:
                call = stub.Subscribe(request)
                while (command := await call.read()) is not EOF:
                    self._parts.guard.check_peer(command)
                    await self._command(command)
            except (grpc.aio.AioRpcError, grpc.aio.UsageError, RolloutError) as error:
                log.debug("control_ended", error=str(error))
            except asyncio.CancelledError:
                if told_to_stop():
                    raise
            waiting = asyncio.ensure_future(changed.wait())
            await asyncio.wait([waiting], timeout=1.0)
            waiting.cancel()

    async def _command(self, command: control_pb2.ControlCommand) -> None:
        kind = command.WhichOneof("body")
        if kind == "drain":
            budget = command.drain.budget_ms / 1000 or self._parts.settings.worker.drain_budget_s
            self.drain(command.drain.reason or "drained by an operator", budget)
        elif kind == "reload":
            await self._parts.reload_plugins(list(command.reload.names))
        elif kind == "log_level":
            try:
                set_level(command.log_level.level)
            except KeyError:
                log.warning("log_level_unknown", level=command.log_level.level)
        else:
            log.warning("control_ignored", kind=kind)

    _ACTIONS: ClassVar[dict[type, Any]] = {
        ev.Send: _do_send,
        ev.Relay: _do_relay,
        ev.StartChild: _do_start,
        **dict.fromkeys(_IN_CHILD, _do_in_child),
        ev.Fetch: _do_fetch,
        ev.Store: _do_store,
        ev.DropStream: _do_drop,
        ev.Emit: _do_emit,
        ev.Exit: _do_exit,
    }


def _age_s(path: Path) -> float:
    try:
        return time.time() - path.stat().st_mtime
    except OSError:
        return 0.0
