"""Serves objects over mTLS from a process of its own, so that gigabytes never delay a beat.

The coordinator starts `python -m rollout_coordinator.objects_server` and writes one JSON line to its stdin:
`{"objects": {...}, "storage": {...}, "transport": {...}, "incarnation": ULID, "epoch": N}`; it answers with one line on
stdout, `{"event": "objects_ready", "addr": HOST:PORT}`. Later lines `{"epoch": N}` tell it of a new epoch. It ends when
stdin closes, so it never outlives its coordinator. Logs go to stderr.
"""

from __future__ import annotations

import asyncio
import json
import os
import select
import signal
import sys
import threading
import time
from collections import OrderedDict
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Generator
from contextlib import aclosing, contextmanager
from pathlib import Path
from typing import Any, cast
from weakref import WeakValueDictionary

import grpc.aio
import structlog
from rollout.cli.malloc import tune_malloc
from rollout.config.settings import ObjectsSection, StorageSection, TransportSection
from rollout.model.errors import ConfigError, FencedError, InputError, ProtocolError, RolloutError, UnavailableError
from rollout.objects import open_store
from rollout.objects.digest import CHUNK, check_id
from rollout.objects.pack import PACK_BYTES
from rollout.objects.port import ObjectStore
from rollout.security.credentials import Credentials
from rollout.security.roles import Peer, Role, require
from rollout.wire import event_loop
from rollout.wire.channel import SERVER_OPTIONS
from rollout.wire.errors import abort
from rollout.wire.strict import StrictInterceptor
from rollout.wire.v1 import objects_pb2 as pb
from rollout.wire.v1 import objects_pb2_grpc as rpc

log = structlog.get_logger()

MAX_OBJECT_BYTES = 1 << 40
STALL_S = 60.0
OPERATOR_PIN_S = 30 * 86400.0
"""What a client puts for a run (a model, large prompts); the coordinator unpins it when the run is deleted."""
WORKER_PIN_S = 24 * 3600.0
"""Results on their way to the ledger."""
MAX_HAS = 10_000
STREAMS_PER_PEER = 8
PROVE_BYTES = 2 * PACK_BYTES
"""Larger ones are no packs, and who reads on in one hashes all of it."""
SOUND_MAX = 65_536
END_S = 3.0
"""Seconds to end in, once the coordinator is gone; less than it waits when it closes stdin itself."""
_RENEW_CHECK_S = 1.0


@contextmanager
def stall_watch(limit_s: float) -> Generator[Callable[[], None]]:
    """Gives `mark()`; ends the current task's block with UnavailableError when it is not called for `limit_s` seconds.

    One timer an RPC instead of a timeout around each stream read, which leaks in grpc.aio (grpc issue 43360).
    """
    loop = asyncio.get_running_loop()
    task = asyncio.current_task()
    assert task is not None
    last = loop.time()
    stalled = False

    def mark() -> None:
        nonlocal last
        last = loop.time()

    def check() -> None:
        nonlocal stalled, timer
        left = last + limit_s - loop.time()
        if left > 0:
            timer = loop.call_later(left, check)
        else:
            stalled = True
            task.cancel()

    timer = loop.call_later(limit_s, check)
    try:
        yield mark
    except asyncio.CancelledError:
        if not stalled:
            raise
        task.uncancel()
        raise UnavailableError(f"nothing moved on this stream for {limit_s:g} s; retry") from None
    finally:
        timer.cancel()


class Sound:
    """Objects whose bytes were found to match their id since this server began: a part of one cannot show that."""

    def __init__(self, store: ObjectStore) -> None:
        self._store = store
        self._known: OrderedDict[bytes, None] = OrderedDict()
        self._proving: WeakValueDictionary[bytes, asyncio.Lock] = WeakValueDictionary()

    def add(self, object_id: bytes) -> None:
        self._known[object_id] = None
        if len(self._known) > SOUND_MAX:
            self._known.popitem(last=False)

    async def prove(self, object_id: bytes, mark: Callable[[], None]) -> None:
        """Reads all of it, once. ObjectCorruptError, NotFoundError."""
        lock = self._proving.setdefault(object_id, asyncio.Lock())
        async with lock:
            if object_id in self._known:
                return
            async with aclosing(self._store.get(object_id)) as pieces:
                async for _ in pieces:
                    mark()
            self.add(object_id)


class ObjectsService(rpc.ObjectsServicer):
    """One client's slowness or bytes touch nobody else: a message of memory and a temporary file each."""

    def __init__(
        self,
        store: ObjectStore,
        epoch: int,
        *,
        max_object_bytes: int = MAX_OBJECT_BYTES,
        stall_s: float = STALL_S,
        check_peer: Callable[[Any], Peer] = require,
    ) -> None:
        self.store = store
        self.epoch = epoch
        self._max_object_bytes = max_object_bytes
        self._stall_s = stall_s
        self._check_peer = check_peer
        self._slots: WeakValueDictionary[str, asyncio.Semaphore] = WeakValueDictionary()
        self._sound = Sound(store)

    async def Put(self, request_iterator: AsyncIterator[pb.PutUp], context: Any) -> pb.PutReply:
        try:
            peer = self._check_peer(context)
            async with self._slot(peer):
                with stall_watch(self._stall_s) as mark:
                    return await self._put(request_iterator, peer, mark)
        except RolloutError as e:
            return await abort(context, e)

    async def _put(self, requests: AsyncIterator[pb.PutUp], peer: Peer, mark: Callable[[], None]) -> pb.PutReply:
        first = await anext(aiter(requests), None)
        if first is None:
            raise ProtocolError("an upload must begin with a message that names the object")
        self._check_epoch(first)
        object_id, size = check_id(first.object_id), first.size
        if size > self._max_object_bytes:
            raise InputError(f"an object of {size} bytes is over the limit of {self._max_object_bytes}")
        await self._pin([object_id], first.pin, peer.role)

        async def chunks() -> AsyncGenerator[bytes]:
            if first.chunk:
                yield _bounded(first.chunk)
            async for message in requests:
                mark()
                yield _bounded(message.chunk)

        async with aclosing(chunks()) as source:
            existed = not await self.store.put(object_id, source, size)
        if not existed:
            self._sound.add(object_id)
        return pb.PutReply(epoch=self.epoch, existed=existed, size=size)

    async def Get(self, request: pb.GetRequest, context: Any) -> None:
        try:
            async with self._slot(self._check_peer(context)):
                with stall_watch(self._stall_s) as mark:
                    await self._get(request, context, mark)
        except RolloutError as e:
            await abort(context, e)

    async def _get(self, request: pb.GetRequest, context: Any, mark: Callable[[], None]) -> None:
        self._check_epoch(request)
        meta = await self.store.head(check_id(request.object_id))
        size = meta.size if meta is not None else 0
        partial = request.offset > 0 or 0 < request.length < size
        if partial and size <= PROVE_BYTES:
            await self._sound.prove(request.object_id, mark)
        sent = False
        pieces = self.store.get(request.object_id, request.offset, request.length or None)
        async with aclosing(pieces) as source:
            async for piece in source:
                await context.write(pb.GetDown(epoch=self.epoch, chunk=piece, size=size))
                sent = True
                mark()
        if not sent:
            await context.write(pb.GetDown(epoch=self.epoch, size=size))

    async def Has(self, request: pb.HasRequest, context: Any) -> pb.HasReply:
        try:
            peer = self._check_peer(context)
            self._check_epoch(request)
            if len(request.object_ids) > MAX_HAS:
                raise InputError(f"at most {MAX_HAS} ids a request, this one has {len(request.object_ids)}")
            ids = [check_id(i) for i in request.object_ids]
            await self._pin(ids, request.pin, peer.role)  # first: what is there now cannot go any more
            return pb.HasReply(epoch=self.epoch, has=await self.store.has(ids))
        except RolloutError as e:
            return await abort(context, e)

    async def _pin(self, object_ids: list[bytes], holder: str, role: Role) -> None:
        if len(holder) > 128:
            raise InputError("the holder of a pin is an incarnation or a run id")
        if holder and object_ids:
            await self.store.pin(object_ids, holder, WORKER_PIN_S if role is Role.WORKER else OPERATOR_PIN_S)

    def _slot(self, peer: Peer) -> asyncio.Semaphore:
        """A peer's own, so that its many streams hold up none but its own further ones."""
        return self._slots.setdefault(peer.id, asyncio.Semaphore(STREAMS_PER_PEER))

    def _check_epoch(self, request: Any) -> None:
        if not request.HasField("epoch"):
            raise ProtocolError("the message carries no epoch")
        if request.epoch > self.epoch:
            # What is put here may be in a store that the newer leader does not read.
            raise FencedError(f"epoch {request.epoch} has begun, this server belongs to epoch {self.epoch}")


def _bounded(chunk: bytes) -> bytes:
    if len(chunk) > CHUNK:
        raise ProtocolError(f"a chunk has at most {CHUNK} bytes, this one has {len(chunk)}")
    return chunk


def _listen_on(objects: ObjectsSection, transport: TransportSection) -> tuple[str, str]:
    """(address to bind, host that others reach it at)."""
    listen = objects.listen_addr or transport.listen_addr.rpartition(":")[0] + ":0"
    host = listen.rpartition(":")[0]
    if transport.advertise_addr and (not objects.listen_addr or host in ("0.0.0.0", "[::]", "")):
        host = transport.advertise_addr.rpartition(":")[0]
    return listen, host


async def _stdin() -> asyncio.StreamReader:
    reader = asyncio.StreamReader(limit=1 << 20)
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    return reader


async def _keep_renewed(credentials: Credentials) -> None:
    while True:
        await asyncio.sleep(_RENEW_CHECK_S)
        if credentials.renew_due(time.time()):
            try:
                await credentials.renew()
            except RolloutError as e:  # the next second tries again; the old one lives as long again
                log.warning("certificate_not_renewed", reason=str(e))


async def serve(reader: asyncio.StreamReader, write: Callable[[str], object]) -> None:
    """Serves until `reader` ends; `write` gets the ready line."""
    line = await reader.readline()
    if not line:
        return
    start: dict[str, Any] = json.loads(line)
    objects = ObjectsSection.model_validate(start["objects"])
    storage = StorageSection.model_validate(start["storage"])
    transport = TransportSection.model_validate(start["transport"])
    store = open_store(objects, storage)
    await store.open()
    server: grpc.aio.Server | None = None
    renewing: asyncio.Task[None] | None = None
    try:
        credentials = await Credentials.obtain(
            tls_dir=Path(transport.tls_dir),
            cluster=transport.cluster,
            role=Role.COORDINATOR,
            incarnation=start["incarnation"],
            lifetime_s=transport.certificate_lifetime_s,
            addresses=transport.coordinator_addrs,
        )
        renewing = asyncio.create_task(_keep_renewed(credentials))
        service = ObjectsService(store, int(start["epoch"]))
        server = grpc.aio.server(options=SERVER_OPTIONS, interceptors=[StrictInterceptor()])
        cast(Any, rpc).add_ObjectsServicer_to_server(service, server)
        listen, host = _listen_on(objects, transport)
        try:
            port = server.add_secure_port(listen, credentials.server_credentials())
        except RuntimeError as error:
            raise ConfigError(
                f"[objects] listen_addr {listen!r} cannot be listened on: is another process there, or is it not an "
                "address of this host? Choose a free host:port, or leave it empty for any free port"
            ) from error
        await server.start()
        write(json.dumps({"event": "objects_ready", "addr": f"{host}:{port}"}))
        while line := await reader.readline():
            service.epoch = max(service.epoch, int(cast("dict[str, Any]", json.loads(line))["epoch"]))
    finally:
        if renewing is not None:
            renewing.cancel()
        if server is not None:
            await server.stop(grace=1.0)
        await store.close()


def _end_with_stdin() -> None:
    """A thread that ends this process END_S after its stdin has no writer any more, whatever else it is doing.

    Leaving in order can take long: a thread in a system call cannot be cancelled, and both the store's close and the
    end of asyncio.run wait for it. A pin that waits for a lock of SQLite held it up for 30 s (its busy timeout), a file
    system or a database that does not answer does so for as long as they please. Nothing is lost by not waiting: an
    object is there once it is renamed into place, a pin or a row once its transaction is committed.
    """
    poll = select.poll()
    poll.register(sys.stdin.fileno(), 0)  # a hang-up is always told

    def watch() -> None:
        poll.poll()
        time.sleep(END_S)
        os._exit(0)

    threading.Thread(target=watch, name="end-with-stdin", daemon=True).start()


async def _main() -> None:
    def write(line: str) -> None:
        sys.stdout.write(line + "\n")
        sys.stdout.flush()

    try:
        await serve(await _stdin(), write)
    except RolloutError as e:
        write(json.dumps({"event": "objects_failed", "code": e.code, "message": e.message}))
        raise SystemExit(2 if e.code == "config_invalid" else 1) from None


def main() -> None:
    # A terminal's Ctrl-C and systemd's SIGTERM reach the whole group; uploads of a drain still need this process.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    tune_malloc()
    _end_with_stdin()
    structlog.configure(
        processors=[
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.JSONRenderer(),
        ],
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
    )
    event_loop.run(_main())


if __name__ == "__main__":
    main()
