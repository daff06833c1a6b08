"""`Runs`: everything a client can ask of a cluster, through failovers."""

from __future__ import annotations

import asyncio
import os
import platform
import random
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, Self

import grpc
import grpc.aio

from rollout.client.batches import Batch, batches
from rollout.client.client_telemetry import client_telemetry
from rollout.client.connection import EOF, Connection, Patience, raise_status, unless_replaced
from rollout.client.pages import entries_of, resolved
from rollout.client.relay import ReplicaStream
from rollout.client.submit import Submission
from rollout.model.address import parse_address
from rollout.model.errors import ConfigError, ProtocolError, RolloutError, UnavailableError
from rollout.model.ids import make_ulid
from rollout.model.item import ItemLimits, NewItem
from rollout.model.run import ENDED, RunSpec
from rollout.objects import tree
from rollout.objects.pack import Packer
from rollout.objects.remote import RemoteObjects
from rollout.security import files
from rollout.security.credentials import Credentials
from rollout.security.roles import Role
from rollout.telemetry.spans import Spans, open_spans
from rollout.wire.channel import open_channel
from rollout.wire.codec import ref_from_wire, run_spec_to_wire
from rollout.wire.v1 import history_pb2
from rollout.wire.v1 import runs_pb2 as pb
from rollout.workloads.commit import CommitEntry

Trouble = Callable[[RolloutError | None, float], None]
Items = Callable[[int], Iterable[NewItem | None]]
"""The items from a seq on. None, after an item: more may take a while, so what has come should go."""

_CALL_S, _LONG_CALL_S = 30.0, 300.0
_PAGE_ITEMS = 500
_LIFETIME_S = 4 * 3600.0
_ENDED = frozenset(str(state) for state in ENDED)


def new_ulid() -> str:
    """A fresh id for a run or an incarnation."""
    return make_ulid(time.time_ns() // 1_000_000, os.urandom(10))


@dataclass(slots=True)
class Page:
    """A piece of a watched run: entries of its commit log, or its status at the time."""

    entries: list[CommitEntry]
    status: pb.RunStatus | None = None

    @property
    def last(self) -> bool:
        return self.status is not None and self.status.state in _ENDED


@dataclass(frozen=True, slots=True)
class EndedAttempt:
    """An attempt that began and came to nothing. `data`: what it left behind when it failed."""

    seq: int
    status: pb.AttemptStatus
    data: bytes


class Runs:
    """An async client of the coordinators at `addresses`, of which any one may lead.

    Calls follow the leader and retry for `patience_s` seconds; then UnavailableError. Other errors are those the
    coordinator raised (rollout.model.errors). Use `connect` and `async with`.
    """

    def __init__(
        self,
        addresses: Sequence[str],
        credentials: Credentials,
        *,
        patience_s: float = 60.0,
        on_trouble: Trouble | None = None,
        on_addresses: Callable[[list[str]], None] | None = None,
        on_answer: Callable[[], None] | None = None,
        dial: Callable[[str, Credentials], Any] = open_channel,
        jitter: Callable[[float, float], float] = random.uniform,
    ) -> None:
        if not addresses:
            raise ConfigError("no coordinator address is known: give --coordinator HOST:PORT")
        self._connection = Connection(
            list(addresses),
            credentials,
            patience_s=patience_s,
            on_trouble=on_trouble,
            on_addresses=on_addresses,
            on_answer=on_answer,
            dial=dial,
            jitter=jitter,
        )
        self._objects: dict[str, _RunObjects] = {}
        self._objects_addr = ""
        self._spans: Spans | None = None

    @classmethod
    async def connect(
        cls,
        addresses: Sequence[str],
        *,
        tls_dir: Path,
        cluster: str = "rollout",
        lifetime_s: float = _LIFETIME_S,
        patience_s: float = 60.0,
        on_trouble: Trouble | None = None,
        on_answer: Callable[[], None] | None = None,
    ) -> Self:
        """As an operator with the certificates in `tls_dir`. ConfigError says how to join where there are none."""
        credentials = await Credentials.obtain(
            tls_dir=tls_dir,
            cluster=cluster,
            role=Role.OPERATOR,
            incarnation=new_ulid(),
            lifetime_s=lifetime_s,
            addresses=list(addresses),
            patience_s=patience_s,
            on_trouble=on_trouble,
        )
        keep = partial(files.keep_addresses, files.expand(tls_dir))
        return cls(
            addresses,
            credentials,
            patience_s=patience_s,
            on_trouble=on_trouble,
            on_addresses=keep,
            on_answer=on_answer,
        )

    async def close(self) -> None:
        for objects in self._objects.values():
            await objects.close()
        await self._connection.close()
        if self._spans is not None:
            await asyncio.to_thread(self._spans.close)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    @property
    def address(self) -> str:
        return self._connection.address

    @property
    def addresses(self) -> list[str]:
        """Of every coordinator that is known: those that were named, and those that the cluster told of."""
        return list(self._connection.addresses)

    @property
    def patience_s(self) -> float:
        return self._connection.patience_s

    @patience_s.setter
    def patience_s(self, seconds: float) -> None:
        self._connection.patience_s = seconds

    # ---- submitting

    async def open(self, spec: RunSpec) -> pb.RunStatus:
        """Open the run, or find it again: `submitted` says how many items are durable. ConflictError if it differs."""
        found: list[pb.SubmitDown] = []
        await self._submission(spec, lambda _: [], None, seal=False, opened=found.append).run()
        return found[-1].status

    async def submit(
        self,
        spec: RunSpec,
        items: Items,
        *,
        seal: bool = True,
        progress: Callable[[int], None] | None = None,
    ) -> int:
        """Stream items until all are durable, then seal the run; their number.

        `items(seq)` gives those from `seq` on and is called once, with what the ledger already has: a submission that
        was cut off goes on. It runs in a thread. `progress(durable)` is called as items become durable.
        """
        if self._spans is None:
            self._spans = open_spans(client_telemetry(), "rollout", f"{platform.node()}-{os.getpid()}", lambda _: None)
        return await self._submission(spec, items, progress, seal=seal, opened=lambda _: None).run()

    def _submission(
        self,
        spec: RunSpec,
        items: Items,
        progress: Callable[[int], None] | None,
        *,
        seal: bool,
        opened: Callable[[pb.SubmitDown], None],
    ) -> Submission:
        def note(reply: pb.SubmitDown) -> None:
            self._note_objects(reply.objects_addr)
            opened(reply)

        async def source(durable: int) -> AsyncGenerator[Batch, None]:
            async with self.objects(spec.run_id) as objects:
                packer = Packer(objects.put_pieces)
                frames = batches(iter(items(durable)), durable, packer)
                try:
                    async for batch in frames:
                        yield batch
                finally:
                    await frames.aclose()
                    await packer.close()

        wire = run_spec_to_wire(spec)
        return Submission(self._connection, wire, source, seal=seal, progress=progress, opened=note, spans=self._spans)

    # ---- watching

    async def watch(
        self, run_id: str, cursor: int = 0, *, payloads: bool = False, status_only: bool = False
    ) -> AsyncGenerator[Page, None]:
        """The commit log from `cursor` on and about one status a second, until the run has ended.

        Goes on by itself at the next leader, with the entry it had reached. The last page has the final status.
        """
        async with self.objects(run_id) as objects:
            pages = self._pages(run_id, cursor, objects, payloads=payloads, status_only=status_only)
            async with aclosing(pages):
                async for page in pages:
                    yield page

    async def _pages(
        self, run_id: str, cursor: int, objects: RemoteObjects, *, payloads: bool, status_only: bool
    ) -> AsyncGenerator[Page, None]:
        patience = Patience(self._connection)
        turn = self._connection.turn
        while True:
            call: Any = None
            try:
                stub = await self._connection.stub()
                turn = self._connection.turn
                request = pb.WatchRequest(
                    epoch=self._connection.epoch,
                    run_id=run_id,
                    cursor=cursor,
                    payloads=payloads,
                    status_only=status_only,
                )
                call = stub.Watch(request)
                while (message := await self._next(call)) is not EOF:
                    self._connection.seen(message, turn)
                    patience.succeeded()
                    page = await _page(message, cursor, objects)
                    reached = cursor + len(page.entries)
                    if page.last and page.status and not status_only and reached < page.status.cursor:
                        raise UnavailableError(f"the log ended at {reached}, before the run's {page.status.cursor}")
                    cursor = reached
                    yield page
                    if page.last:
                        return
                await raise_status(call)
                raise UnavailableError("the coordinator closed the stream")
            except grpc.aio.AioRpcError as error:
                await patience.failed(self._connection.moved_on(error, turn))
            except UnavailableError as error:
                self._connection.leave(turn)
                await patience.failed(error)
            finally:
                if call is not None:
                    call.cancel()

    async def _next(self, call: Any) -> Any:
        with self._connection.telling():  # a status comes every second
            return await unless_replaced(call.read())

    # ---- asking and commanding

    async def get(self, run_id: str) -> pb.RunStatus:
        """NotFoundError."""
        return (await self._get(run_id)).status

    async def describe(self, run_id: str, *, failures: int = 10) -> pb.RunReply:
        """As `get`, with who works at the run and its last failures. NotFoundError."""
        return await self._get(run_id, failures)

    async def items(
        self, run_id: str, which: str = "all", *, parent: Sequence[int] = (), from_seq: int = 0, limit: int = 0
    ) -> AsyncGenerator[pb.ItemsReply, None]:
        """Pages of a run's items in order, or of the children of the item at `parent`; `limit` in all, 0: every one.

        `which`: all, failed, retried, running, pending. NotFoundError.
        """
        found = 0
        while True:
            wanted = min(limit - found, _PAGE_ITEMS) if limit else _PAGE_ITEMS
            request = pb.ItemsRequest(run_id=run_id, parent=parent, which=which, from_seq=from_seq, limit=wanted)
            page: pb.ItemsReply = await self._ask("Items", request)
            yield page
            found += len(page.items)
            if page.end or found >= limit > 0:
                return
            from_seq = page.next_seq

    async def set_limits(self, run_id: str, config: bytes, limits: ItemLimits) -> pb.RunStatus:
        """Other limits for its own items that have no result; `config`: the run's, with these in it. StateError: it is
        complete."""
        request = pb.SetLimitsRequest(run_id=run_id, config=config, **limits._asdict())
        return (await self._ask("SetLimits", request)).status

    async def cancel_item(self, run_id: str, place: Sequence[int], *, reason: str = "") -> pb.ItemReply:
        """End the item at a place without a result. NotFoundError; StateError: it has one, or its run has ended."""
        return await self._ask("CancelItem", pb.CancelItemRequest(run_id=run_id, place=place, reason=reason))

    async def item(self, run_id: str, place: Sequence[int]) -> pb.ItemReply:
        """The item at a place: its seq, then the ordinal of the child, and so on. NotFoundError."""
        return await self._ask("Item", pb.ItemRequest(run_id=run_id, place=place))

    async def item_bytes(self, run_id: str, reply: pb.ItemReply) -> tuple[bytes, bytes]:
        """Payload and result of what `item` answered. NotFoundError when an object is gone."""
        async with self.objects(run_id) as objects:

            async def read(inline: bytes, field: str) -> bytes:
                ref = getattr(reply, field)
                return await objects.get(ref.object_id, ref.offset, ref.length) if reply.HasField(field) else inline

            return await read(reply.payload, "payload_ref"), await read(reply.result, "result_ref")

    async def attempt_bytes(self, run_id: str, attempts: Sequence[pb.AttemptStatus]) -> Sequence[bytes]:
        """What each left behind, or of the one that ended its item: the result. NotFoundError when an object is
        gone."""
        blobs = [ref_from_wire(one.data_ref) if one.HasField("data_ref") else one.data for one in attempts]
        async with self.objects(run_id) as objects:
            return await resolved(blobs, objects.get)

    async def attempts(
        self, run_id: str, *, parent: Sequence[int] = ()
    ) -> AsyncGenerator[Sequence[EndedAttempt], None]:
        """Pages of the attempts that began and came to nothing, of all items of a run or of all children of the item at
        `parent`, by seq and number. Their data is resolved. NotFoundError."""
        after = (0, 0)
        while True:
            request = pb.AttemptsRequest(
                run_id=run_id, parent=parent, after_seq=after[0], after_attempt=after[1], limit=_PAGE_ITEMS
            )
            page: pb.AttemptsReply = await self._ask("Attempts", request)
            if page.end:
                return
            data = await self.attempt_bytes(run_id, [one.attempt for one in page.attempts])
            yield [EndedAttempt(one.seq, one.attempt, left) for one, left in zip(page.attempts, data, strict=True)]
            last = page.attempts[-1]
            after = (last.seq, last.attempt.attempt)

    async def list(self, states: Sequence[str] = (), limit: int = 100) -> Sequence[pb.RunStatus]:
        """Newest first."""
        return (await self._ask("List", pb.ListRequest(states=states, limit=limit))).runs

    async def find(self, text: str, *, complete: bool = False, limit: int = 20) -> Sequence[pb.FoundRun]:
        """Runs whose id, or the end of it that people see (`model.ids.short`), begins with `text`, or whose name it is
        (`complete`: begins with it); newest first."""
        return (await self._ask("Find", pb.FindRequest(text=text, complete=complete, limit=limit))).runs

    async def command(
        self, run_id: str, verb: str, *, reason: str = "", priority: int = 0, own: bool = False
    ) -> pb.RunStatus:
        """`verb`: pause, resume, kill, continue, priority. NotFoundError, StateError. `own`: ordered by the command
        that submitted the run, for a reason of the run's, and by no person."""
        request = pb.CommandRequest(run_id=run_id, verb=verb, reason=reason, priority=priority, own=own)
        return (await self._ask("Command", request)).status

    async def delete(self, run_id: str, *, force: bool = False) -> pb.DeleteReply:
        """The run and the objects that only it used. StateError unless it has ended, or `force`."""
        return await self._ask("Delete", pb.RunRequest(run_id=run_id, force=force), _LONG_CALL_S)

    async def kept(self, run_id: str, release: Sequence[int] = ()) -> pb.KeptReply:
        """The objects that results of the run name in their data, such as snapshots, and attempts that failed in what
        they left behind (`attempt` > 0). `release`: those of these items are kept no longer, and freed unless something
        else refers to them or they are pinned. NotFoundError."""
        return await self._ask("Kept", pb.KeptRequest(run_id=run_id, release=release), _LONG_CALL_S)

    async def workers(self, *, all: bool = False) -> pb.WorkersReply:
        """Who is there; with `all` those that were, too."""
        return await self._ask("Workers", pb.WorkersRequest(all=all))

    async def worker(self, incarnation: str) -> pb.WorkerStatus:
        """One worker, with what it has in hand. NotFoundError."""
        return (await self._ask("Workers", pb.WorkersRequest(incarnation=incarnation))).workers[0]

    async def worker_command(self, incarnation: str, verb: str, argument: str = "") -> pb.WorkersReply:
        """`verb`: drain, reload, log-level. NotFoundError."""
        return await self._ask("Worker", pb.WorkerCommandRequest(incarnation=incarnation, verb=verb, argument=argument))

    def replicas(self, run_id: str) -> ReplicaStream:
        """The stream of a gateway to the replicas of a run."""
        return ReplicaStream(self._connection, run_id)

    # ---- what is kept for people

    async def output(self, run_id: str, after: int = 0) -> history_pb2.OutputReply:
        """A page of what children of a run printed, from behind position `after`. NotFoundError."""
        return await self._ask("Output", history_pb2.OutputRequest(run_id=run_id, after=after), of_history=True)

    async def events(self, run_id: str = "", *, after: int = 0, newest: int = 0) -> history_pb2.EventsReply:
        """A page of what happened in the cluster, or to a run, from behind number `after`; or the `newest`."""
        request = history_pb2.EventsRequest(run_id=run_id, after=after, newest=newest)
        return await self._ask("Events", request, of_history=True)

    # ---- a call

    async def _get(self, run_id: str, failures: int = 0) -> pb.RunReply:
        return await self._ask("Get", pb.RunRequest(run_id=run_id, failures=failures))

    async def _ask(self, method: str, request: Any, timeout_s: float = _CALL_S, *, of_history: bool = False) -> Any:
        """The reply of whichever coordinator leads; each try has the epoch that is known then."""

        async def call(stub: Any) -> Any:
            stub = await self._connection.history_stub() if of_history else stub
            request.epoch = self._connection.epoch
            return await getattr(stub, method)(request, timeout=timeout_s)

        reply = await self._connection.unary(call)
        self._note_objects(getattr(reply, "objects_addr", ""))
        return reply

    # ---- objects

    @asynccontextmanager
    async def objects(self, run_id: str) -> AsyncGenerator[RemoteObjects, None]:
        """The cluster's objects; what is put is kept for `run_id`, which must be open, until it refers to it.

        Those who use a run's at the same time share a connection, which is closed with the last of them.
        """
        objects = self._objects.get(run_id)
        if objects is None:
            objects = self._objects[run_id] = self._open_objects(run_id)
        objects.users += 1
        try:
            yield objects
        finally:
            objects.users -= 1
            if not objects.users:
                self._objects.pop(run_id, None)
                await objects.close()

    def _open_objects(self, run_id: str) -> _RunObjects:
        async def channel() -> grpc.aio.Channel:
            # Asked again for every channel: a new leader has another objects server.
            await self._get(run_id)
            credentials = self._connection.credentials.channel_credentials()
            return open_channel(self._objects_addr, credentials)

        return _RunObjects(
            self._connection,
            channel,
            pin=run_id,
            guard=self._connection.guard,
            retry_for_s=self._connection.patience_s,
        )

    async def upload_tree(
        self,
        run_id: str,
        directory: Path,
        progress: Callable[[int, int], None] | None = None,
        *,
        files: tree.Chosen | None = None,
        expected: bytes | None = None,
    ) -> bytes:
        """What the cluster lacks of a directory; the id of its manifest. `progress(bytes done, bytes in all)`.

        `files`: those of it that are to travel, with their names in the tree. `expected`: the id that was told before;
        InputError where the files are others now.
        """
        async with self.objects(run_id) as objects:
            return await tree.upload(directory, objects, progress, links="follow", files=files, expected=expected)

    async def download(
        self, run_id: str, object_id: bytes, path: Path, progress: Callable[[int], None] | None = None
    ) -> None:
        """An object into a file, verified. `progress` hears how many bytes came. NotFoundError."""
        async with self.objects(run_id) as objects:
            await objects.fetch(object_id, path, progress)

    def _note_objects(self, address: str) -> None:
        if not address:
            return
        place = parse_address(address, "objects_addr")
        if place.is_wildcard:  # it listens everywhere: reach it where the coordinator is
            place = place._replace(host=parse_address(self._connection.address).host)
        self._objects_addr = str(place)


class _RunObjects(RemoteObjects):
    """Rebuilds its channel when the certificate was renewed: servers refuse an expired one also on old connections."""

    def __init__(self, connection: Connection, channel: Callable[[], Awaitable[grpc.aio.Channel]], **options: Any):
        super().__init__(channel, **options)
        self.users = 0
        self._connection = connection
        self._generation = 0

    async def _stub(self) -> Any:
        generation = await self._connection.renewed()
        if generation != self._generation:
            self._generation = generation
            await self._drop_channel()
        return await super()._stub()


def from_seq(items: Iterable[NewItem]) -> Items:
    """`items`, all of them, as something that can start later."""
    return lambda seq: islice(items, seq, None)


async def _page(message: pb.WatchDown, cursor: int, objects: RemoteObjects) -> Page:
    entries: list[CommitEntry] = []
    if message.HasField("batch"):
        batch = message.batch
        if batch.from_cursor != cursor:
            raise ProtocolError(f"the commit log came from {batch.from_cursor}, wanted was {cursor}")
        entries = await entries_of(batch, objects.get)
    return Page(entries, message.status if message.HasField("status") else None)
