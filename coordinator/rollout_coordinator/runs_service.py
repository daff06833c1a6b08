"""The service for clients: submit and seal, watch the commit log, commands, lists."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import structlog
from rollout.model.errors import InputError, NotFoundError, ProtocolError, RolloutError, StateError
from rollout.model.ids import check_ulid, is_ulid
from rollout.model.item import ItemLimits
from rollout.model.run import ENDED
from rollout.objects.port import ObjectStore
from rollout.security.roles import Peer, Role
from rollout.wire.codec import item_batch_from_wire, run_config, run_spec_from_wire
from rollout.wire.v1 import runs_pb2, runs_pb2_grpc

from rollout_coordinator.clock import Clock
from rollout_coordinator.core.events import (
    Event,
    ItemCancel,
    RunCommand,
    RunDelete,
    RunLimits,
    SubmitItems,
    SubmitOpen,
    SubmitSeal,
    WorkerCommand,
)
from rollout_coordinator.core.item_commands import CANCELLED
from rollout_coordinator.core.step import SubmitReply
from rollout_coordinator.driver import Driver
from rollout_coordinator.freeing import free_let_go, free_loose
from rollout_coordinator.item_views import ItemViews
from rollout_coordinator.leadership import Gate, address_of, read, unary
from rollout_coordinator.ledger.ledger import Ledger
from rollout_coordinator.objects_gate import ObjectsGate
from rollout_coordinator.run_views import RunViews
from rollout_coordinator.runs_codec import (
    CONFIG_MAX,
    check_items,
    commit_frames,
    status_to_wire,
    worker_row_to_wire,
    worker_to_wire,
)
from rollout_coordinator.sessions import Note, unnoted
from rollout_coordinator.watchers import Watch, Watchers

log = structlog.get_logger()

WINDOW = 32  # batches of one Submit stream that wait for their commit
DRAIN_S = 0.5
PAGE_ROWS = 4096
PAGE_BYTES = 800 << 10
STATUS_INTERVAL_S = 1.0
BURST_PAUSE_S = 0.02  # a watcher that is up to date reads again at most this often
LIST_MAX = 1000
ARGUMENT_MAX = 4096
FIND_MAX = 1024
DIGITS_MAX = 12
VERBS = ("pause", "resume", "kill", "continue", "priority")
WORKER_VERBS = ("drain", "reload", "log-level")


def _check_config(config: bytes) -> None:
    if len(config) > CONFIG_MAX:
        raise InputError(
            f"The run's configuration has {len(config)} bytes, the limit is {CONFIG_MAX}: put large parts into objects."
        )
    run_config(config)


class Replies(asyncio.Queue["asyncio.Future[SubmitReply] | None"]):
    """The replies of one Submit stream, in order; None ends them."""

    def __init__(self) -> None:
        super().__init__(WINDOW)
        self.given_up = False

    def give_up(self) -> None:
        """Drop what the client sends from now on; the reader never waits."""
        self.given_up = True
        while not self.empty():
            self.get_nowait()


class RunsService(runs_pb2_grpc.RunsServicer):
    def __init__(
        self,
        *,
        gate: Gate,
        driver: Driver,
        ledger: Ledger,
        views: RunViews,
        watchers: Watchers,
        objects: ObjectsGate,
        store: ObjectStore,
        clock: Clock,
        note: Note = unnoted,
        told: Callable[[], Sequence[str]] = tuple,
        host_name: Callable[[str], Awaitable[str]] | None = None,
    ) -> None:
        self._gate = gate
        self._driver = driver
        self._ledger = ledger
        self._views = views
        self._watchers = watchers
        self._objects = objects
        self._store = store
        self._clock = clock
        self._note = note
        self._told = told
        self._host_name = host_name
        self._items = ItemViews(driver, ledger, views)
        self.leader_addr = ""
        self.objects_addr = ""

    def _admit(self, request: Any, context: Any) -> Peer:
        self._gate.check(request)
        return self._gate.peer(context, Role.OPERATOR)

    # ---- submit

    async def Submit(self, request_iterator: Any, context: Any) -> None:
        async with self._gate.answering(context):
            first: runs_pb2.SubmitUp | None = await read(context)
            if first is None or first.WhichOneof("body") != "open":
                raise ProtocolError("The first frame of Submit must open the run.")
            peer = self._admit(first, context)
            run_id = await self._open(first.open, peer, context)
            replies = Replies()
            reader = asyncio.create_task(self._read_batches(run_id, replies, context))
            try:
                await self._write_replies(replies, context)
            except RolloutError:
                # A stream that ends while its client writes loses its status on the way (grpc.aio reports INTERNAL),
                # so what the client still has in its window is read and dropped before it is told.
                replies.give_up()
                await asyncio.wait({reader}, timeout=DRAIN_S)
                raise
            finally:
                reader.cancel()
                await asyncio.gather(reader, return_exceptions=True)

    async def _open(self, wire: runs_pb2.RunSpec, peer: Peer, context: Any) -> str:
        _check_config(wire.config)
        spec = run_spec_from_wire(wire)
        check_ulid(spec.run_id, "run_id")
        by, address = await self._person(peer), address_of(context.peer())
        reply: SubmitReply = await (await self._driver.request(lambda n: SubmitOpen(n, spec, by, address)))
        async with self._gate.waiting():
            view = await self._views.get(spec.run_id)
        await context.write(
            runs_pb2.SubmitDown(
                epoch=self._gate.epoch,
                durable=reply.durable,
                sealed=reply.sealed,
                status=status_to_wire(view),
                objects_addr=self.objects_addr,
                coordinators=self._told(),
            )
        )
        return spec.run_id

    async def _read_batches(self, run_id: str, replies: Replies, context: Any) -> None:
        """Feed batches to the driver; the bounded queue of replies is the client's window."""
        while (frame := await read(context)) is not None:
            if replies.given_up:
                continue
            try:
                self._gate.check(frame)
                await replies.put(await self._submit(run_id, frame))
            except RolloutError as error:
                failed: asyncio.Future[SubmitReply] = asyncio.get_running_loop().create_future()
                failed.set_exception(error)
                failed.exception()
                await replies.put(failed)  # after the replies of the batches before it
                replies.given_up = True
        await replies.put(None)

    async def _submit(self, run_id: str, frame: runs_pb2.SubmitUp) -> asyncio.Future[SubmitReply]:
        kind = frame.WhichOneof("body")
        if kind == "items":
            first_seq, ids, payloads, specs, index = item_batch_from_wire(frame.items)
            async with self._gate.waiting():
                await self._objects.check_payloads(check_items(ids, payloads, first_seq))
            return await self._driver.request(lambda n: SubmitItems(n, run_id, first_seq, ids, payloads, specs, index))
        if kind == "seal":
            return await self._driver.request(lambda n: SubmitSeal(n, run_id, frame.seal.count))
        raise ProtocolError(f"Submit: expected items or seal, got {kind}.")

    async def _write_replies(self, replies: Replies, context: Any) -> None:
        carried: asyncio.Future[SubmitReply] | None = None
        while (future := carried or await replies.get()) is not None:
            carried = None
            reply = await future
            ended = False
            while not replies.empty() and carried is None:  # the newest of those that are ready says it all
                following = replies.get_nowait()
                if following is None:
                    ended = True
                    break
                if following.done():
                    reply = following.result()
                else:
                    carried = following
            await context.write(runs_pb2.SubmitDown(epoch=self._gate.epoch, durable=reply.durable, sealed=reply.sealed))
            if ended:
                return

    # ---- watch

    async def Watch(self, request: runs_pb2.WatchRequest, context: Any) -> None:
        async with self._gate.answering(context):
            self._admit(request, context)
            async with self._gate.waiting():
                view = await self._views.get(request.run_id)
            if request.cursor > view.cursor:
                raise InputError(
                    f"Cursor {request.cursor} is past the commit log of run {request.run_id}, which has {view.cursor} "
                    "entries: the cursor belongs to another run or database."
                )
            watch = self._watchers.add(request.run_id)
            try:
                await self._follow(request, watch, context)
            finally:
                self._watchers.remove(request.run_id, watch)

    async def _follow(self, request: runs_pb2.WatchRequest, watch: Watch, context: Any) -> None:
        cursor = request.cursor
        told_at = float("-inf")
        behind = False
        while True:
            await watch.wait(0.0 if behind else STATUS_INTERVAL_S)
            # A view may be shared for less than this pause, so it is never older than the move that woke us.
            await asyncio.sleep(BURST_PAUSE_S)
            async with self._gate.waiting():
                view = await self._views.get(request.run_id, max_age=BURST_PAUSE_S / 2)
            if not request.status_only:
                cursor, behind = await self._pages(request, view.root_log, cursor, context)
            ended = view.state in ENDED
            if ended and behind:
                continue  # the status of an ended run is the last frame: nothing may follow it
            now = self._clock.now().mono
            if ended or now - told_at >= STATUS_INTERVAL_S:
                told_at = now
                status = status_to_wire(view)
                told = self._told()
                await context.write(runs_pb2.WatchDown(epoch=self._gate.epoch, status=status, coordinators=told))
            if ended:
                return

    async def _pages(
        self, request: runs_pb2.WatchRequest, root_log: int, cursor: int, context: Any
    ) -> tuple[int, bool]:
        """Send the commit log from `cursor` on, for as long as a status may wait. Returns (new cursor, whether there is
        more)."""
        until = self._clock.now().mono + STATUS_INTERVAL_S
        while True:
            async with self._gate.waiting():
                page = await self._ledger.commit_log(root_log, cursor, PAGE_ROWS, PAGE_BYTES, request.payloads)
            if not page.seq:
                return cursor, False
            for batch in commit_frames(page):
                await context.write(runs_pb2.WatchDown(epoch=self._gate.epoch, batch=batch))
            cursor += len(page.seq)
            if self._clock.now().mono >= until:
                return cursor, True

    # ---- unary

    @unary(Role.OPERATOR)
    async def Get(self, request: runs_pb2.RunRequest, peer: Peer) -> runs_pb2.RunReply:
        reply = await self._reply(request.run_id)
        if request.failures:
            await self._items.describe(await self._views.get(request.run_id), request.failures, reply)
        return reply

    @unary(Role.OPERATOR)
    async def Items(self, request: runs_pb2.ItemsRequest, peer: Peer) -> runs_pb2.ItemsReply:
        return await self._items.page(request)

    @unary(Role.OPERATOR)
    async def Item(self, request: runs_pb2.ItemRequest, peer: Peer) -> runs_pb2.ItemReply:
        reply = await self._items.item(request)
        reply.objects_addr = self.objects_addr
        return reply

    @unary(Role.OPERATOR)
    async def Attempts(self, request: runs_pb2.AttemptsRequest, peer: Peer) -> runs_pb2.AttemptsReply:
        reply = await self._items.attempts(request)
        reply.objects_addr = self.objects_addr
        return reply

    async def _reply(self, run_id: str) -> runs_pb2.RunReply:
        view = await self._views.get(run_id)
        return runs_pb2.RunReply(
            status=status_to_wire(view),
            objects_addr=self.objects_addr,
            coordinators=self._told(),
        )

    @unary(Role.OPERATOR)
    async def List(self, request: runs_pb2.ListRequest, peer: Peer) -> runs_pb2.ListReply:
        views = await self._views.newest(tuple(request.states), min(request.limit or 100, LIST_MAX))
        found = [status_to_wire(view) for view in views]
        return runs_pb2.ListReply(runs=found, coordinators=self._told())

    @unary(Role.OPERATOR)
    async def Find(self, request: runs_pb2.FindRequest, peer: Peer) -> runs_pb2.FindReply:
        if len(request.text) > FIND_MAX:
            raise InputError(f"A run's name or id has at most {FIND_MAX} characters, this has {len(request.text)}.")
        limit = min(request.limit or 20, LIST_MAX)
        found = await self._ledger.find_runs(request.text, complete=request.complete, limit=limit)
        return runs_pb2.FindReply(runs=[runs_pb2.FoundRun(**r._asdict()) for r in found])

    @unary(Role.OPERATOR)
    async def Command(self, request: runs_pb2.CommandRequest, peer: Peer) -> runs_pb2.RunReply:
        if request.verb not in VERBS:
            raise InputError(f"Unknown verb {request.verb!r}; there are {', '.join(VERBS)}.")
        await self._views.get(request.run_id)
        by = "" if request.own else await self._person(peer)
        await self._order(lambda n: RunCommand(n, request.run_id, request.verb, request.reason, request.priority, by))
        return await self._reply(request.run_id)

    @unary(Role.OPERATOR)
    async def SetLimits(self, request: runs_pb2.SetLimitsRequest, peer: Peer) -> runs_pb2.RunReply:
        _check_config(request.config)
        limits = ItemLimits(request.timeout_ms, request.max_attempts, request.max_worker_lost, request.retry_backoff_ms)
        if not (limits.max_attempts and limits.max_worker_lost):
            raise InputError("The limits lack max_attempts or max_worker_lost, which are at least 1.")
        await self._views.get(request.run_id)
        await self._order(lambda n: RunLimits(n, request.run_id, request.config, limits))
        return await self._reply(request.run_id)

    @unary(Role.OPERATOR)
    async def CancelItem(self, request: runs_pb2.CancelItemRequest, peer: Peer) -> runs_pb2.ItemReply:
        by = await self._person(peer)
        shown = runs_pb2.ItemRequest(run_id=request.run_id, place=request.place)
        await self._items.item(shown)  # NotFoundError
        place = tuple(request.place)
        try:
            await self._order(lambda n: ItemCancel(n, request.run_id, place, request.reason, by))
        except StateError:
            if (reply := await self._items.item(shown)).item.code != CANCELLED:
                raise
        else:
            reply = await self._items.item(shown)
        reply.objects_addr = self.objects_addr
        return reply

    async def _order(self, make: Callable[[int], Event]) -> None:
        """Wait until the command is durable. Raises the core's refusal."""
        await (await self._driver.request(make))

    async def _person(self, peer: Peer) -> str:
        """Return the name of the user who gives a command. A certificate without a host was issued where the CA's key
        is."""
        name = await self._host_name(peer.host_id) if self._host_name is not None else peer.host_id
        return f"{peer.role} on host {name}" if name else f"{peer.role} with the cluster's own key"

    @unary(Role.OPERATOR)
    async def Delete(self, request: runs_pb2.RunRequest, peer: Peer) -> runs_pb2.DeleteReply:
        by = await self._person(peer)
        view = await self._views.get(request.run_id)
        objects = await self._ledger.run_objects(request.run_id)
        await self._order(lambda n: RunDelete(n, request.run_id, request.force))
        self._views.forget(request.run_id)
        await self._store.unpin(request.run_id)
        freed = len(await free_loose(self._store, self._ledger, objects, self._objects.forget))
        said: dict[str, Any] = {"run_id": request.run_id, "items": view.submitted, "objects_freed": freed, "by": by}
        log.info("run_deleted", **said)
        self._note("run_deleted", **said)
        return runs_pb2.DeleteReply(items=view.submitted, objects_freed=freed)

    @unary(Role.OPERATOR)
    async def Kept(self, request: runs_pb2.KeptRequest, peer: Peer) -> runs_pb2.KeptReply:
        await self._views.get(request.run_id)
        found = await self._ledger.kept(request.run_id)
        release = set(request.release)
        gone = {one.object_id for one in found if one.seq in release}
        freed = 0
        if gone:
            await self._ledger.release(self._gate.epoch, request.run_id, list(request.release))
            deleted = await free_let_go(self._store, self._ledger, self._gate.epoch, self._objects.forget)
            freed = len(gone & deleted)
            found = await self._ledger.kept(request.run_id)
        entries = [runs_pb2.KeptEntry(**one._asdict()) for one in found]
        return runs_pb2.KeptReply(entries=entries, objects_freed=freed)

    @unary(Role.OPERATOR)
    async def Workers(self, request: runs_pb2.WorkersRequest, peer: Peer) -> runs_pb2.WorkersReply:
        if request.incarnation:
            return await self._worker(request.incarnation)
        return await self._workers(all=request.all)

    async def _worker(self, incarnation: str) -> runs_pb2.WorkersReply:
        """Return one worker with what it holds."""
        live = {view.incarnation: view for view in await self._views.workers()}
        row = await self._items.known_worker(incarnation)
        if incarnation in live:
            status = worker_to_wire(live[incarnation])
            await self._items.worker(incarnation, status)
            status.ended_ms = row.ended_ms if row is not None else 0
        elif row is not None:
            status = worker_row_to_wire(row, self._clock.now().wall_ms)
        else:
            raise NotFoundError(f"There is no worker {incarnation!r}; `rollout workers --all` shows those that were.")
        return runs_pb2.WorkersReply(leader=self.leader_addr, workers=[status])

    async def _workers(self, *, all: bool) -> runs_pb2.WorkersReply:
        live = await self._views.workers()
        reply = runs_pb2.WorkersReply(
            leader=self.leader_addr,
            workers=[worker_to_wire(view) for view in live],
            coordinators=self._told(),
        )
        if all:
            known = {v.incarnation for v in live}
            now_ms = self._clock.now().wall_ms
            rows = await self._ledger.workers(LIST_MAX)
            reply.workers.extend(worker_row_to_wire(r, now_ms) for r in rows if r.incarnation not in known)
        return reply

    @unary(Role.OPERATOR)
    async def Worker(self, request: runs_pb2.WorkerCommandRequest, peer: Peer) -> runs_pb2.WorkersReply:
        if request.verb not in WORKER_VERBS:
            raise InputError(f"Unknown verb {request.verb!r}; there are {', '.join(WORKER_VERBS)}.")
        if not is_ulid(request.incarnation):
            raise NotFoundError(
                f"there is no worker {request.incarnation!r} in this cluster; `rollout workers --all`, with the "
                "same options, lists them"
            )
        if len(request.argument) > ARGUMENT_MAX:
            raise InputError(f"The argument of {request.verb} has over {ARGUMENT_MAX} characters.")
        if request.verb == "drain" and len(request.argument) > DIGITS_MAX and request.argument.isdecimal():
            raise InputError(f"A drain takes milliseconds of at most {DIGITS_MAX} digits.")
        by = await self._person(peer)
        await self._order(lambda n: WorkerCommand(n, request.incarnation, request.verb, request.argument, by))
        return await self._workers(all=False)
