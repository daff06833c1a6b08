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
"""Yields the items from a seq on. None after an item means that more may take a while, so send what there is."""

_CALL_S, _LONG_CALL_S = 30.0, 300.0
_PAGE_ITEMS = 500
_LIFETIME_S = 4 * 3600.0
_ENDED = frozenset(str(state) for state in ENDED)


def new_ulid() -> str:
    """Return a new id for a run or an incarnation."""
    return make_ulid(time.time_ns() // 1_000_000, os.urandom(10))


@dataclass(slots=True)
class Page:
    """A part of a watched run: entries of its commit log, or its current status."""

    entries: list[CommitEntry]
    status: pb.RunStatus | None = None

    @property
    def last(self) -> bool:
        return self.status is not None and self.status.state in _ENDED


@dataclass(frozen=True, slots=True)
class EndedAttempt:
    """An attempt that began and ended without ending its item. `data` is what it left when it failed."""

    seq: int
    status: pb.AttemptStatus
    data: bytes


class Runs:
    """An async client of the coordinators at `addresses`, any of which may lead.

    Calls follow the leader and retry for `patience_s` seconds; then they raise UnavailableError. Other errors are those
    that the coordinator raised (rollout.model.errors). Use `connect` and `async with`.
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
        """Connect as an operator with the certificates in `tls_dir`. Raises ConfigError that says how to join, if there
        are none."""
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
        """Addresses of all known coordinators: those that were named, and those that the cluster reported."""
        return list(self._connection.addresses)

    @property
    def patience_s(self) -> float:
        return self._connection.patience_s

    @patience_s.setter
    def patience_s(self, seconds: float) -> None:
        self._connection.patience_s = seconds

    # ---- submitting

    async def open(self, spec: RunSpec) -> pb.RunStatus:
        """Open the run, or find it again: `submitted` says how many items are durable. Raises ConflictError if it
        differs."""
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
        """Stream items until all are durable, then seal the run, and return their number.

        `items(seq)` yields those from `seq` on and is called once, with the number that the ledger already has: an
        interrupted submission continues. It runs in a thread. `progress(durable)` is called as items become durable.
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
        """Yield the commit log from `cursor` on and about one status a second, until the run has ended.

        It continues by itself at the next leader, with the next entry. The last page has the final status.
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
        """Return a run's status. Raises NotFoundError."""
        return (await self._get(run_id)).status

    async def describe(self, run_id: str, *, failures: int = 10) -> pb.RunReply:
        """Return a run's status, who works on it, and its last failures. Raises NotFoundError."""
        return await self._get(run_id, failures)

    async def items(
        self, run_id: str, which: str = "all", *, parent: Sequence[int] = (), from_seq: int = 0, limit: int = 0
    ) -> AsyncGenerator[pb.ItemsReply, None]:
        """Yield pages of a run's items in order, or of the children of the item at `parent`; `limit` in all, 0 for no
        limit.

        `which` is all, failed, retried, running or pending. Raises NotFoundError.
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
        """Set other limits for the run's own items without a result. `config` is the run's, with these limits in it.
        Raises StateError if it is complete."""
        request = pb.SetLimitsRequest(run_id=run_id, config=config, **limits._asdict())
        return (await self._ask("SetLimits", request)).status

    async def cancel_item(self, run_id: str, place: Sequence[int], *, reason: str = "") -> pb.ItemReply:
        """End the item at a place without a result. Raises NotFoundError, or StateError if it has one or its run has
        ended."""
        return await self._ask("CancelItem", pb.CancelItemRequest(run_id=run_id, place=place, reason=reason))

    async def item(self, run_id: str, place: Sequence[int]) -> pb.ItemReply:
        """Return the item at a place: its seq, then the ordinal of the child, and so on. Raises NotFoundError."""
        return await self._ask("Item", pb.ItemRequest(run_id=run_id, place=place))

    async def item_bytes(self, run_id: str, reply: pb.ItemReply) -> tuple[bytes, bytes]:
        """Return payload and result of an answer of `item`. Raises NotFoundError if an object is gone."""
        async with self.objects(run_id) as objects:

            async def read(inline: bytes, field: str) -> bytes:
                ref = getattr(reply, field)
                return await objects.get(ref.object_id, ref.offset, ref.length) if reply.HasField(field) else inline

            return await read(reply.payload, "payload_ref"), await read(reply.result, "result_ref")

    async def attempt_bytes(self, run_id: str, attempts: Sequence[pb.AttemptStatus]) -> Sequence[bytes]:
        """Return what each attempt left; for the one that ended its item, the result. Raises NotFoundError if an object
        is gone."""
        blobs = [ref_from_wire(one.data_ref) if one.HasField("data_ref") else one.data for one in attempts]
        async with self.objects(run_id) as objects:
            return await resolved(blobs, objects.get)

    async def attempts(
        self, run_id: str, *, parent: Sequence[int] = ()
    ) -> AsyncGenerator[Sequence[EndedAttempt], None]:
        """Yield pages of the attempts that began and ended without ending their item, of all items of a run or of all
        children of the item at `parent`, by seq and number. Their data is resolved. Raises NotFoundError."""
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
        """Return runs, the newest first."""
        return (await self._ask("List", pb.ListRequest(states=states, limit=limit))).runs

    async def find(self, text: str, *, complete: bool = False, limit: int = 20) -> Sequence[pb.FoundRun]:
        """Return runs whose id, or its short form (`model.ids.short`), begins with `text`, or whose name is `text`
        (`complete`: begins with it), the newest first."""
        return (await self._ask("Find", pb.FindRequest(text=text, complete=complete, limit=limit))).runs

    async def command(
        self, run_id: str, verb: str, *, reason: str = "", priority: int = 0, own: bool = False
    ) -> pb.RunStatus:
        """Command a run. `verb` is pause, resume, kill, continue or priority. With `own`, the command that submitted
        the run gives it for a reason of the run's, not a user. Raises NotFoundError or StateError."""
        request = pb.CommandRequest(run_id=run_id, verb=verb, reason=reason, priority=priority, own=own)
        return (await self._ask("Command", request)).status

    async def delete(self, run_id: str, *, force: bool = False) -> pb.DeleteReply:
        """Delete a run and the objects that only it used. Raises StateError unless it has ended, or `force`."""
        return await self._ask("Delete", pb.RunRequest(run_id=run_id, force=force), _LONG_CALL_S)

    async def kept(self, run_id: str, release: Sequence[int] = ()) -> pb.KeptReply:
        """Return the objects that results of the run name in their data, such as snapshots, and those that failed
        attempts left (`attempt` > 0). Objects of the items `release` are no longer kept, and freed unless something
        else refers to them or they are pinned. Raises NotFoundError."""
        return await self._ask("Kept", pb.KeptRequest(run_id=run_id, release=release), _LONG_CALL_S)

    async def workers(self, *, all: bool = False) -> pb.WorkersReply:
        """Return connected workers; with `all`, also earlier ones."""
        return await self._ask("Workers", pb.WorkersRequest(all=all))

    async def worker(self, incarnation: str) -> pb.WorkerStatus:
        """Return a worker with what it holds. Raises NotFoundError."""
        return (await self._ask("Workers", pb.WorkersRequest(incarnation=incarnation))).workers[0]

    async def worker_command(self, incarnation: str, verb: str, argument: str = "") -> pb.WorkersReply:
        """Command a worker. `verb` is drain, reload or log-level. Raises NotFoundError."""
        return await self._ask("Worker", pb.WorkerCommandRequest(incarnation=incarnation, verb=verb, argument=argument))

    def replicas(self, run_id: str) -> ReplicaStream:
        """Return the stream of a gateway to the replicas of a run."""
        return ReplicaStream(self._connection, run_id)

    # ---- what is kept for people

    async def output(self, run_id: str, after: int = 0) -> history_pb2.OutputReply:
        """Return a page of the output of a run's children, after position `after`. Raises NotFoundError."""
        return await self._ask("Output", history_pb2.OutputRequest(run_id=run_id, after=after), of_history=True)

    async def events(self, run_id: str = "", *, after: int = 0, newest: int = 0) -> history_pb2.EventsReply:
        """Return a page of events of the cluster or a run, after number `after`, or the `newest` ones."""
        request = history_pb2.EventsRequest(run_id=run_id, after=after, newest=newest)
        return await self._ask("Events", request, of_history=True)

    # ---- a call

    async def _get(self, run_id: str, failures: int = 0) -> pb.RunReply:
        return await self._ask("Get", pb.RunRequest(run_id=run_id, failures=failures))

    async def _ask(self, method: str, request: Any, timeout_s: float = _CALL_S, *, of_history: bool = False) -> Any:
        """Return the reply of whichever coordinator leads; each try uses the epoch known then."""

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
        """Yield the cluster's objects; new ones are kept for `run_id`, which must be open, until it refers to them.

        Concurrent users of a run's objects share a connection, which is closed with the last of them.
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
        """Upload what the cluster lacks of a directory, and return the id of its manifest. `progress` is called with
        (bytes done, bytes in all).

        `files` are those to send, with their names in the tree. `expected` is the id that was announced before; raises
        InputError if the files have changed.
        """
        async with self.objects(run_id) as objects:
            return await tree.upload(directory, objects, progress, links="follow", files=files, expected=expected)

    async def download(
        self, run_id: str, object_id: bytes, path: Path, progress: Callable[[int], None] | None = None
    ) -> None:
        """Download an object to a file and verify it. `progress` is called with the bytes received. Raises
        NotFoundError."""
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
    """Rebuilds its channel when the certificate is renewed: servers refuse an expired one also on old connections."""

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
    """Return `items` as a function that can start at a later one."""
    return lambda seq: islice(items, seq, None)


async def _page(message: pb.WatchDown, cursor: int, objects: RemoteObjects) -> Page:
    entries: list[CommitEntry] = []
    if message.HasField("batch"):
        batch = message.batch
        if batch.from_cursor != cursor:
            raise ProtocolError(f"the commit log came from {batch.from_cursor}, wanted was {cursor}")
        entries = await entries_of(batch, objects.get)
    return Page(entries, message.status if message.HasField("status") else None)
