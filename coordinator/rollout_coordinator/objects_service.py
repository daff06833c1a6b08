"""The Objects service: puts, packs of many small objects, reads, and pins."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Sequence
from contextlib import aclosing, asynccontextmanager
from functools import wraps
from typing import Any
from weakref import WeakValueDictionary

from rollout.model.errors import (
    FencedError,
    InputError,
    ObjectCorruptError,
    ProtocolError,
    RolloutError,
    StorageError,
    UnavailableError,
)
from rollout.model.item import ObjectSlice
from rollout.objects.digest import CHUNK, check_id, chunks_of, hash_pieces
from rollout.objects.pack import ADD_MAX, PACK_BYTES, Packer
from rollout.objects.port import ObjectStore
from rollout.security.roles import Peer, Role, require
from rollout.wire.errors import abort
from rollout.wire.v1 import objects_pb2 as pb
from rollout.wire.v1 import objects_pb2_grpc as rpc

MAX_OBJECT_BYTES = 1 << 40
STALL_S = 60.0
OPERATOR_PIN_S = 30 * 86400.0
"""Pins of a client's objects for a run (a model, large prompts); the coordinator unpins them when the run is
deleted."""
WORKER_PIN_S = 24 * 3600.0
"""Pins of results on their way to the ledger."""
PACKS = "packs"
"""Holder of the pins of packs that this server makes: they expire like a worker's."""
PACK_LINGER_S = 0.05
"""Interval between two packs, each of which costs several ms of processor time; a worker with infrequent rows never
waits."""
MAX_HAS = 10_000
MAX_PARTS = 256
STREAMS_PER_PEER = 8
PROVE_BYTES = 2 * PACK_BYTES
"""Larger objects are not packs, and whoever reads one completely hashes it."""
SOUND_MAX = 65_536


class Watch:
    """Watches the progress of a call with a timeout of `limit_s` seconds."""

    def __init__(self, timeout: asyncio.Timeout, limit_s: float) -> None:
        self._timeout = timeout
        self._limit_s = limit_s
        self._clock = asyncio.get_running_loop().time

    def mark(self) -> None:
        """Note progress; more is expected from now on."""
        if not self._timeout.expired():
            self._timeout.reschedule(self._clock() + self._limit_s)

    def rest(self) -> None:
        """Expect nothing until `mark`."""
        if not self._timeout.expired():
            self._timeout.reschedule(None)


@asynccontextmanager
async def stall_watch(limit_s: float) -> AsyncGenerator[Watch]:
    """Raise UnavailableError inside the block if nothing is marked for `limit_s` seconds.

    It uses one timeout per RPC rather than one around each stream read, which leaks in grpc.aio (grpc issue 43360).
    """
    timeout = asyncio.timeout(limit_s)
    try:
        async with timeout:
            yield Watch(timeout, limit_s)
    except TimeoutError:
        if timeout.expired():
            raise UnavailableError(f"nothing moved on this stream for {limit_s:g} s; retry") from None
        raise


class Sound:
    """Objects whose bytes matched their id since this server started, because a part of an object cannot prove that."""

    def __init__(self, store: ObjectStore) -> None:
        self._store = store
        self._known: OrderedDict[bytes, None] = OrderedDict()
        self._proving: WeakValueDictionary[bytes, asyncio.Lock] = WeakValueDictionary()

    def __contains__(self, object_id: bytes) -> bool:
        return object_id in self._known

    def add(self, object_id: bytes) -> None:
        self._known[object_id] = None
        if len(self._known) > SOUND_MAX:
            self._known.popitem(last=False)

    async def prove(self, object_id: bytes, mark: Callable[[], None]) -> None:
        """Read all of it, once. Raises ObjectCorruptError or NotFoundError."""
        lock = self._proving.setdefault(object_id, asyncio.Lock())
        async with lock:
            if object_id in self._known:
                return
            async with aclosing(self._store.get(object_id)) as pieces:
                async for _ in pieces:
                    mark()
            self.add(object_id)


def _answering(work: Callable[..., Coroutine[Any, Any, Any]]) -> Callable[..., Coroutine[Any, Any, Any]]:
    """Decorate a method, which ends its call with the status of a RolloutError."""

    @wraps(work)
    async def call(self: ObjectsService, request: Any, context: Any) -> Any:
        try:
            return await work(self, request, context)
        except RolloutError as error:
            self.store_errors += isinstance(error, StorageError | ObjectCorruptError)
            await abort(context, error)

    return call


class ObjectsService(rpc.ObjectsServicer):
    """Isolates clients from each other's slowness and size: each uses one message of memory and a temporary file."""

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
        self._packer = Packer(self._put_pack, linger_s=PACK_LINGER_S)
        self.store_errors = 0
        """Number of calls that the store failed."""

    async def close(self) -> None:
        await self._packer.close()

    @_answering
    async def Put(self, request_iterator: AsyncIterator[pb.PutUp], context: Any) -> pb.PutReply:
        peer = self._check_peer(context)
        async with self._slot(peer), stall_watch(self._stall_s) as watch:
            return await self._put(request_iterator, peer, watch)

    async def _put(self, requests: AsyncIterator[pb.PutUp], peer: Peer, watch: Watch) -> pb.PutReply:
        """Store an object. `watch` covers the peer alone: the store has its own limits, and its last request comes when
        all has arrived."""
        messages = aiter(requests)
        first = await anext(messages, None)
        watch.rest()
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
            while True:
                watch.mark()
                try:
                    message = await anext(messages, None)
                finally:
                    watch.rest()
                if message is None:
                    return
                yield _bounded(message.chunk)

        async with aclosing(chunks()) as source:
            existed = not await self.store.put(object_id, source, size)
        if not existed:
            self._sound.add(object_id)
        return pb.PutReply(epoch=self.epoch, existed=existed, size=size)

    @_answering
    async def Add(self, request: pb.AddRequest, context: Any) -> pb.AddReply:
        async with self._slot(self._check_peer(context)):
            self._check_epoch(request)
            data = request.data  # each look makes a copy
            if len(data) > ADD_MAX:
                raise InputError(f"at most {ADD_MAX} bytes are added at once, these are {len(data)}")
            if hash_pieces([data]) != request.digest:
                raise ObjectCorruptError(f"{len(data)} bytes came that do not match their digest")
            place = await self._packer.add(data)
            return pb.AddReply(epoch=self.epoch, object_id=place.object_id, offset=place.offset)

    async def _put_pack(self, pieces: Sequence[bytes]) -> ObjectSlice:
        """Store the objects of several callers as one."""
        size = sum(map(len, pieces))
        object_id = await asyncio.to_thread(hash_pieces, pieces)
        await self.store.pin([object_id], PACKS, WORKER_PIN_S)
        if await self.store.put(object_id, chunks_of(pieces), size):
            self._sound.add(object_id)
        return ObjectSlice(object_id, 0, size)

    @_answering
    async def Get(self, request: pb.GetRequest, context: Any) -> None:
        async with self._slot(self._check_peer(context)), stall_watch(self._stall_s) as watch:
            await self._get(request, context, watch.mark)

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

    @_answering
    async def Read(self, request: pb.ReadRequest, context: Any) -> pb.ReadReply:
        async with self._slot(self._check_peer(context)):
            self._check_epoch(request)
            object_id = check_id(request.object_id)
            parts = list(zip(request.offset, request.length, strict=False))
            if len(request.offset) != len(request.length) or len(parts) > MAX_PARTS:
                raise InputError(f"as many lengths as offsets, and at most {MAX_PARTS} parts, are read at once")
            if sum(request.length) > CHUNK:
                raise InputError(f"at most {CHUNK} bytes are read at once, these are {sum(request.length)}")
            if max(request.offset, default=0) > MAX_OBJECT_BYTES:
                raise InputError(f"no object has a byte {max(request.offset)}")
            if object_id not in self._sound:
                await self._prove(object_id)
            return pb.ReadReply(epoch=self.epoch, part=await self.store.parts(object_id, parts))

    async def _prove(self, object_id: bytes) -> None:
        meta = await self.store.head(object_id)
        if meta is not None and meta.size <= PROVE_BYTES:
            async with stall_watch(self._stall_s) as watch:
                await self._sound.prove(object_id, watch.mark)

    @_answering
    async def Has(self, request: pb.HasRequest, context: Any) -> pb.HasReply:
        peer = self._check_peer(context)
        self._check_epoch(request)
        if len(request.object_ids) > MAX_HAS:
            raise InputError(f"at most {MAX_HAS} ids a request, this one has {len(request.object_ids)}")
        ids = [check_id(i) for i in request.object_ids]
        await self._pin(ids, request.pin, peer.role)  # first: what is there now cannot go any more
        return pb.HasReply(epoch=self.epoch, has=await self.store.has(ids))

    async def _pin(self, object_ids: list[bytes], holder: str, role: Role) -> None:
        if len(holder) > 128:
            raise InputError("the holder of a pin is an incarnation or a run id")
        if holder and object_ids:
            await self.store.pin(object_ids, holder, WORKER_PIN_S if role is Role.WORKER else OPERATOR_PIN_S)

    def _slot(self, peer: Peer) -> asyncio.Semaphore:
        """Return a peer's own semaphore, so that its many streams block only further ones of its own."""
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
