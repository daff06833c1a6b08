"""Client of the coordinator's Objects service: retries, resumes, and trusts no byte that it has not hashed."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import grpc
import grpc.aio
import structlog
from blake3 import blake3
from tenacity import AsyncRetrying, RetryCallState, retry_if_exception, stop_after_delay, wait_random_exponential

from rollout.model.errors import AuthError, FencedError, ObjectCorruptError, RolloutError, UnavailableError
from rollout.model.item import ObjectSlice
from rollout.objects.digest import CHUNK, check_id, chunks_of, hash_file, hash_pieces
from rollout.objects.fs import storage_errors
from rollout.objects.pack import ADD_MAX
from rollout.wire.epoch import EpochGuard, StaleEpochError
from rollout.wire.errors import error_of
from rollout.wire.v1 import objects_pb2 as pb
from rollout.wire.v1 import objects_pb2_grpc as rpc

log = structlog.get_logger()
T = TypeVar("T")

_CALL_TIMEOUT_S = 60.0
_HAS_BATCH = 4096
_READ_BATCH = 256


def _worth_retrying(e: BaseException) -> bool:
    return isinstance(e, RolloutError) and (e.retryable or isinstance(e, FencedError))


class RemoteObjects:
    """Objects of the coordinator.

    `open_channel` returns a channel to the present Objects server; it is called again after a failure, so that a new
    leader is found. `pin` names the holder of what is put (an incarnation or a run id) until the ledger refers to it.
    `guard` is the process's own: it stamps requests and rejects replies of a deposed coordinator. Retryable errors are
    retried for `retry_for_s` seconds; then the last UnavailableError is raised.
    """

    def __init__(
        self,
        open_channel: Callable[[], Awaitable[grpc.aio.Channel]],
        *,
        pin: str = "",
        guard: EpochGuard | None = None,
        retry_for_s: float = 60.0,
    ) -> None:
        self._open_channel = open_channel
        self._pin = pin
        self._guard = guard or EpochGuard()
        self._retry_for_s = retry_for_s
        self._channel: grpc.aio.Channel | None = None
        self._proven: grpc.aio.Channel | None = None  # the last that a call succeeded on
        self._opening = asyncio.Lock()

    async def close(self) -> None:
        channel, self._channel = self._channel, None
        if channel is not None:
            await channel.close()

    # putting

    async def put(self, data: bytes) -> bytes:
        """Store `data`, durably on return, and return its content id."""
        return (await self.put_pieces([data])).object_id

    async def put_pieces(self, pieces: Sequence[bytes]) -> ObjectSlice:
        """Store the bytes of all pieces in order as one object, as `put` does."""
        size = sum(map(len, pieces))
        name = await asyncio.to_thread(hash_pieces, pieces) if size > CHUNK else hash_pieces(pieces)
        await self._put(name, size, lambda: chunks_of(pieces))
        return ObjectSlice(name, 0, size)

    async def add_pieces(self, pieces: Sequence[bytes]) -> ObjectSlice:
        """Store pieces as `put_pieces` does; few bytes become part of an object that the server makes for many callers.

        The server pins that object, for as long as it would a worker's.
        """
        if sum(map(len, pieces)) > ADD_MAX:
            return await self.put_pieces(pieces)
        data = b"".join(pieces)
        digest = hash_pieces([data])

        reply = await self._ask("Add", pb.AddRequest(data=data, digest=digest))
        return ObjectSlice(check_id(reply.object_id), reply.offset, len(data))

    async def put_path(
        self, path: Path, *, known_id: bytes | None = None, progress: Callable[[int], None] | None = None
    ) -> bytes:
        """Store a file as `put` does, streamed; it must not change meanwhile.

        `known_id` is its id if it was hashed already. `progress` is called with the number of bytes sent.
        """
        if known_id is None:
            name, size = await asyncio.to_thread(hash_file, path)
        else:
            name, size = known_id, (await asyncio.to_thread(path.stat)).st_size

        async def pieces() -> AsyncGenerator[bytes]:
            with await asyncio.to_thread(path.open, "rb", buffering=0) as file:
                sent = 0
                while piece := await asyncio.to_thread(file.read, CHUNK):
                    yield piece
                    sent += len(piece)
                    if progress is not None:
                        progress(sent)

        await self._put(name, size, pieces)
        return name

    async def _put(self, name: bytes, size: int, pieces: Callable[[], AsyncGenerator[bytes]]) -> None:
        failure: BaseException | None = None

        async def messages() -> AsyncIterator[pb.PutUp]:
            nonlocal failure
            yield pb.PutUp(epoch=self._guard.current, object_id=name, size=size, pin=self._pin)
            try:
                async with aclosing(pieces()) as source:
                    async for piece in source:
                        yield pb.PutUp(epoch=self._guard.current, chunk=piece)
            except OSError as e:  # grpc would only say that the call was cancelled
                failure = e
                raise

        async def once(stub: Any) -> None:
            nonlocal failure
            failure = None
            try:
                reply = await stub.Put(messages())
            except (grpc.aio.AioRpcError, asyncio.CancelledError):
                if failure is not None:
                    with storage_errors("the upload cannot be read"):
                        raise failure from None
                raise
            self._guard.check_peer(reply)

        if size > CHUNK and (await self.has([name]))[0]:
            return
        await self._retrying(once)

    async def has(self, object_ids: list[bytes]) -> list[bool]:
        """Return which objects are stored; those are pinned for `pin` too."""
        found: list[bool] = []
        for start in range(0, len(object_ids), _HAS_BATCH):
            part = [check_id(i) for i in object_ids[start : start + _HAS_BATCH]]
            found += (await self._ask("Has", pb.HasRequest(object_ids=part, pin=self._pin), 30.0)).has
        return found

    # getting

    async def get(self, object_id: bytes, offset: int = 0, length: int | None = None) -> bytes:
        """Return the bytes. A read of the whole object is verified (ObjectCorruptError). Raises NotFoundError."""
        data = bytearray()
        async with aclosing(self.stream(object_id, offset, length)) as pieces:
            async for piece in pieces:
                data += piece
        return bytes(data)

    async def read(self, object_id: bytes, parts: Sequence[tuple[int, int]]) -> list[bytes]:
        """Return the bytes of each (offset, length), fewer at the object's end. Raises NotFoundError.

        The server verifies a whole pack before it sends any byte of it; ObjectCorruptError.
        """
        pieces = [
            (n, at, min(CHUNK, offset + length - at))
            for n, (offset, length) in enumerate(parts)
            for at in range(offset, offset + length, CHUNK)
        ]
        found = [b""] * len(parts)
        while pieces:
            count = total = 0
            while count < min(len(pieces), _READ_BATCH) and (total := total + pieces[count][2]) <= CHUNK:
                count += 1
            now, pieces = pieces[:count], pieces[count:]
            offsets, lengths = [at for _, at, _ in now], [length for _, _, length in now]
            reply = await self._ask("Read", pb.ReadRequest(object_id=object_id, offset=offsets, length=lengths))
            for (n, _, _), data in zip(now, reply.part, strict=True):
                found[n] += data
        return found

    async def stream(self, object_id: bytes, offset: int = 0, length: int | None = None) -> AsyncGenerator[bytes]:
        """Yield pieces of at most 512 KiB. A broken stream resumes at the byte it reached."""
        check_id(object_id)
        if length == 0:
            return
        hasher = blake3() if offset == 0 and length is None else None
        at, size = offset, -1
        want = length
        while True:
            # One request may end early for a fault; each new one starts where the last stopped.
            first = await self._retrying(lambda stub, at=at, want=want: self._begin(stub, object_id, at, want))
            call, message = first
            broken: grpc.aio.AioRpcError | StaleEpochError | None = None
            try:
                while message is not None:
                    self._guard.check_peer(message)
                    size = message.size
                    if chunk := message.chunk:  # each look makes a copy
                        at += len(chunk)
                        if want is not None:
                            want -= len(chunk)
                        if hasher is not None:
                            hasher.update(chunk)
                        yield chunk
                    message = await self._next(call)
            except (grpc.aio.AioRpcError, StaleEpochError) as e:
                broken = e
            finally:
                call.cancel()
            if broken is None or at == size or want == 0:
                break
            error = broken if isinstance(broken, StaleEpochError) else error_of(broken)
            if not _worth_retrying(error):
                raise error from broken
            log.info("object_get_resumed", object_id=object_id.hex(), offset=at, reason=str(error))
            await self._drop_channel()
        if hasher is not None and hasher.digest() != object_id:
            raise ObjectCorruptError(f"the bytes received for object {object_id.hex()} do not match its id")

    async def _begin(self, stub: Any, object_id: bytes, at: int, want: int | None) -> tuple[Any, pb.GetDown | None]:
        call = stub.Get(pb.GetRequest(epoch=self._guard.current, object_id=object_id, offset=at, length=want or 0))
        try:
            return call, await self._next(call)
        except BaseException:
            call.cancel()
            raise

    @staticmethod
    async def _next(call: Any) -> pb.GetDown | None:
        message = await call.read()
        return message if isinstance(message, pb.GetDown) else None  # else grpc.aio.EOF

    async def fetch(self, object_id: bytes, path: Path, progress: Callable[[int], None] | None = None) -> None:
        """Write the object to `path`, by one rename after verification. `progress` is called with the number of bytes
        received.

        `<path>.partial` keeps what was received, so that a later call, also of another process, resumes.
        """
        partial = path.with_name(path.name + ".partial")
        with storage_errors(f"object {object_id.hex()[:12]} was not fetched"):
            done = await self._resume(object_id, partial, progress)
            if not done:  # what an earlier process left was damaged: once more from the first byte
                partial.unlink(missing_ok=True)
                if not await self._resume(object_id, partial, progress):
                    partial.unlink(missing_ok=True)
                    raise ObjectCorruptError(f"the bytes received for object {object_id.hex()} do not match its id")
            partial.replace(path)

    async def _resume(self, object_id: bytes, partial: Path, progress: Callable[[int], None] | None) -> bool:
        hasher = blake3()

        def write(file: BinaryIO, piece: bytes) -> None:
            file.write(piece)
            hasher.update(piece)

        with await asyncio.to_thread(partial.open, "ab+", buffering=0) as file:
            await asyncio.to_thread(file.seek, 0)
            at = 0
            while piece := await asyncio.to_thread(file.read, 4 * CHUNK):
                hasher.update(piece)
                at += len(piece)
            if at and hasher.digest() == object_id:  # complete, cut off just before its rename
                return True
            # With a length given the stream does not hash: the whole is hashed here, over what was there before too.
            async with aclosing(self.stream(object_id, at, 1 << 62)) as pieces:
                async for piece in pieces:
                    await asyncio.to_thread(write, file, piece)
                    at += len(piece)
                    if progress is not None:
                        progress(at)
            await asyncio.to_thread(os.fsync, file.fileno())
        return hasher.digest() == object_id

    # channel

    async def _stub(self) -> Any:
        async with self._opening:
            if self._channel is None:
                self._channel = await self._open_channel()
            return rpc.ObjectsStub(self._channel)

    async def _drop_channel(self) -> None:
        channel, self._channel = self._channel, None
        if channel is not None:
            await channel.close(grace=30)  # neighbours' streams on it may be well

    async def _ask(self, method: str, request: Any, timeout_s: float = _CALL_TIMEOUT_S) -> Any:
        async def once(stub: Any) -> Any:
            request.epoch = self._guard.current
            reply = await getattr(stub, method)(request, timeout=timeout_s)
            self._guard.check_peer(reply)
            return reply

        return await self._retrying(once)

    async def _retrying(self, call: Callable[[Any], Awaitable[T]]) -> T:
        async def before_sleep(state: RetryCallState) -> None:
            log.debug("objects_retry", attempt=state.attempt_number)
            await self._drop_channel()

        async def once() -> T:
            stub = await self._stub()
            channel = self._channel
            try:
                value = await call(stub)
            except grpc.aio.AioRpcError as e:
                error = error_of(e)
                if isinstance(error, AuthError) and channel is not None and channel is self._proven:
                    # What it presented when it was opened has expired; a new channel presents the renewed one.
                    raise UnavailableError(error.message) from e
                raise error from e
            except grpc.aio.UsageError as e:  # a neighbour has just closed the channel
                raise UnavailableError(str(e)) from e
            self._proven = channel
            return value

        retrying = AsyncRetrying(
            retry=retry_if_exception(_worth_retrying),
            wait=wait_random_exponential(multiplier=0.1, max=5),
            stop=stop_after_delay(self._retry_for_s),
            before_sleep=before_sleep,
            reraise=True,
        )
        return await retrying(once)
