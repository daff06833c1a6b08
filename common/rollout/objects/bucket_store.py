"""Objects in a bucket of any provider: `<prefix>cas/ab/cd/<hex>`, the layout of the fs store.

A key becomes visible only after its hash is verified. A small object is gathered, verified and written in one request.
A large one is hashed on its way to `<prefix>temp/pending-<ulid>`, from where the service copies it to its key.
"""

from __future__ import annotations

import asyncio
import json
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import aclosing, suppress

import structlog
from blake3 import blake3
from ulid import ULID

from rollout.cloud.bucket import ABSENT, Blob, Bucket
from rollout.cloud.parallel import gathered
from rollout.cloud.parts import BUFFERS
from rollout.cloud.shielded import to_the_end
from rollout.model.errors import (
    ConflictError,
    NotFoundError,
    ObjectCorruptError,
    RolloutError,
    StorageUnavailableError,
)
from rollout.objects.budget import Budget
from rollout.objects.claims import CLAIM_S, Pins
from rollout.objects.digest import ID_BYTES, Upload, check_id
from rollout.objects.fs import wall_ms
from rollout.objects.place import MARKER
from rollout.objects.port import ObjectMeta
from rollout.objects.running import running, running_stream

log = structlog.get_logger()

STALE_S = 7 * 86_400.0
"""Seconds after which the upload of a killed process is removed; no upload takes so long."""
CORRUPT_KEPT_S = 30 * 86_400.0
SWEEP_EVERY_S = 6 * 3600.0
DELETE_S = CLAIM_S / 2
"""Time limit of a deletion in seconds, including its claim."""
REMOVE_S = 20.0
LEFT_MAX = 100
"""Maximum number of temporary objects that could not be removed and are retried at the end."""
MEMORY = 1 << 30
"""Bytes of all bodies in transit at once, however many peers there are."""
RANGE = 8 << 20
"""Bytes of one request, where a large object is read by several at once."""
RANGES = 3
_CALLS = 16
_PAGE = 500
_TRIES = 5


class BucketObjectStore:
    """Store in a bucket. Several processes and hosts may share it if they share `pins`."""

    def __init__(self, bucket: Bucket, prefix: str, pins: Pins) -> None:
        self._bucket = bucket
        self._prefix = prefix
        self._pins = pins
        self._budget = Budget(MEMORY)
        self._sweeping: asyncio.Task[None] | None = None
        self._left: set[str] = set()

    async def open(self) -> None:
        try:
            await self._bucket.open()
            await self._pins.open()
        except BaseException:
            await self._pins.close()
            await self._bucket.close()
            raise
        self._sweeping = asyncio.create_task(self._sweep_again())

    async def close(self) -> None:
        sweeping, self._sweeping = self._sweeping, None
        if sweeping is not None:
            sweeping.cancel()
            await asyncio.gather(sweeping, return_exceptions=True)
        try:
            async with asyncio.timeout(REMOVE_S):
                for key in list(self._left):
                    await self._remove_temporary(key)
        except TimeoutError:
            log.warning("cloud_leftovers_not_removed", bucket=self._bucket.url, error="no answer")
        finally:
            await self._pins.close()
            await self._bucket.close()

    def key_of(self, object_id: bytes) -> str:
        name = check_id(object_id).hex()
        return f"{self._prefix}cas/{name[:2]}/{name[2:4]}/{name}"

    def _corrupt_key(self, object_id: bytes) -> str:
        return f"{self._prefix}corrupt/{object_id.hex()}"

    async def _absent(self, object_id: bytes) -> NotFoundError:
        """Return the error, which says what happened to an object that was damaged."""
        away = self._corrupt_key(object_id)
        if await self._bucket.head(away) is not None:
            return NotFoundError(
                f"object {object_id.hex()} was damaged in the bucket, and was moved to {self._bucket.url}{away}; a new "
                "upload heals it"
            )
        return NotFoundError(f"no object {object_id.hex()} in {self._bucket.url}{self._prefix}")

    async def owner(self) -> str:
        try:
            async with aclosing(self._bucket.read(self._prefix + MARKER)) as pieces:
                body = b"".join([piece async for piece in pieces])
        except NotFoundError:
            return ""
        try:
            return str(json.loads(body)["ledger"])
        except (ValueError, KeyError, TypeError):
            return f"what {MARKER} says"

    async def take(self, ledger: str) -> str:
        body = json.dumps({"ledger": ledger}).encode()
        with suppress(ConflictError):
            await self._bucket.write(self._prefix + MARKER, _again([body]), len(body), when=ABSENT)
        return await self.owner()

    # writing

    @running
    async def put(self, object_id: bytes, chunks: AsyncIterator[bytes], size: int) -> bool:
        key = self.key_of(object_id)
        found = await self._bucket.head(key)
        if found is not None and await self._pins.settled(object_id):  # it was on its way out
            found = await self._bucket.head(key)
        if found is not None and found.size == size:
            await self._pins.touch(object_id)
            return False
        part = self._bucket.part_bytes
        if size > part:
            async with self._budget.share(BUFFERS * part):
                return await self._put_large(object_id, chunks, size)
        async with self._budget.share(2 * size):  # as it came, and as it is sent
            pieces = [piece async for piece in _verified(object_id, chunks, size)]
            return await self._publish(
                object_id, size, lambda when: self._bucket.write(key, _again(pieces), size, when=when), found
            )

    async def _put_large(self, object_id: bytes, chunks: AsyncIterator[bytes], size: int) -> bool:
        key, temporary = self.key_of(object_id), f"{self._prefix}temp/pending-{ULID()}"
        self._left.add(temporary)
        try:
            pending = await self._bucket.write(temporary, _verified(object_id, chunks, size), size)
            found = await self._bucket.head(key)
            return await self._publish(object_id, size, lambda when: self._bucket.copy(pending, key, when=when), found)
        finally:
            await to_the_end(self._remove_temporary(temporary))

    async def _publish(
        self, object_id: bytes, size: int, write: Callable[[str], Awaitable[Blob]], found: Blob | None
    ) -> bool:
        """Write the object under its key, replacing a damaged one of another size. Returns False if somebody else was
        faster."""
        for _ in range(_TRIES):
            if found is not None and found.size == size:
                await self._pins.touch(object_id)
                return False
            try:
                await write(found.version if found else ABSENT)
                return True
            except ConflictError:
                found = await self._bucket.head(self.key_of(object_id))
        raise StorageUnavailableError(f"object {object_id.hex()[:12]} was not stored: others write it all the time")

    async def _remove_temporary(self, key: str) -> None:
        """Remove the key and any upload to it whose start was not confirmed. What remains is swept when it is a week
        old."""
        try:
            async with asyncio.timeout(REMOVE_S):
                await self._bucket.delete(key)
                await self._bucket.sweep(key, 0.0, exact=True)
        except (RolloutError, TimeoutError) as e:
            if len(self._left) > LEFT_MAX:
                self._left.discard(key)
            log.warning("cloud_temporary_left", key=self._bucket.url + key, error=str(e) or "no answer")
        else:
            self._left.discard(key)

    async def _sweep_again(self) -> None:
        while True:
            await self._sweep()
            await asyncio.sleep(SWEEP_EVERY_S)

    async def _sweep(self) -> None:
        try:
            removed = 0
            for part, kept_s in (("temp/", STALE_S), ("corrupt/", CORRUPT_KEPT_S)):
                async with aclosing(self._bucket.list(self._prefix + part)) as found:
                    async for blob in found:
                        if wall_ms() - blob.modified_ms > kept_s * 1000:
                            removed += await self._bucket.delete(blob.key)
            for part in ("temp/", "cas/"):
                removed += await self._bucket.sweep(self._prefix + part, STALE_S)
            if removed:
                log.info("cloud_leftovers_removed", bucket=self._bucket.url, count=removed)
        except RolloutError as e:
            log.warning("cloud_leftovers_not_removed", bucket=self._bucket.url, error=str(e))

    # reading

    @running_stream
    async def get(self, object_id: bytes, offset: int = 0, length: int | None = None) -> AsyncGenerator[bytes]:
        key = self.key_of(object_id)
        blob = await self._bucket.head(key)
        if blob is None:
            raise await self._absent(object_id)
        end = blob.size if length is None else min(blob.size, offset + length)
        if offset >= end and not (offset == 0 and blob.size == 0):
            return
        whole = offset == 0 and end == blob.size
        hasher, at = blake3(), offset
        async with aclosing(self._ranges(key, offset, end)) as pieces:
            async for piece in pieces:
                at += len(piece)
                if whole:
                    hasher.update(piece)
                    if at == end and hasher.digest() != object_id:  # before the last piece leaves
                        await self._quarantine(object_id, blob)
                yield piece
        if (whole and at < end) or (blob.size == 0 and hasher.digest() != object_id):
            await self._quarantine(object_id, blob)

    async def _ranges(self, key: str, offset: int, end: int) -> AsyncGenerator[bytes]:
        """Yield [offset, end) in order, read by a few concurrent requests while there is memory."""
        starts = deque(range(offset, end, RANGE))
        ahead: deque[tuple[int, asyncio.Task[list[bytes]]]] = deque()
        try:
            while starts or ahead:
                while starts and len(ahead) < RANGES:
                    start, length = starts[0], min(RANGE, end - starts[0])
                    if not self._budget.try_take(length):
                        break
                    starts.popleft()
                    ahead.append((length, asyncio.create_task(self._range(key, start, length))))
                if not ahead:
                    start = starts.popleft()
                    async with aclosing(self._as_it_comes(key, start, min(RANGE, end - start))) as pieces:
                        async for piece in pieces:
                            yield piece
                    continue
                for piece in await ahead[0][1]:
                    yield piece
                self._budget.give(ahead.popleft()[0])
        finally:
            for _, task in ahead:
                task.cancel()
            await asyncio.gather(*(task for _, task in ahead), return_exceptions=True)
            self._budget.give(sum(length for length, _ in ahead))

    async def _as_it_comes(self, key: str, offset: int, length: int) -> AsyncGenerator[bytes]:
        try:
            async with aclosing(self._bucket.read(key, offset, length)) as pieces:
                async for piece in pieces:
                    yield piece
        except ConflictError as e:
            raise StorageUnavailableError(
                f"{self._bucket.url}{key} was written while it was read; read it again"
            ) from e

    async def _range(self, key: str, offset: int, length: int) -> list[bytes]:
        for again in (True, False):
            try:
                async with aclosing(self._bucket.read(key, offset, length)) as pieces:
                    return [piece async for piece in pieces]
            except ConflictError as e:  # it was stored anew meanwhile: the same bytes
                if not again:
                    raise StorageUnavailableError(f"{self._bucket.url}{key} is written all the time") from e
        return []

    @running
    async def parts(self, object_id: bytes, parts: Sequence[tuple[int, int]]) -> list[bytes]:
        key = self.key_of(object_id)

        async def one(part: tuple[int, int]) -> bytes:
            return b"".join(await self._range(key, *part))

        try:
            return await gathered(one, parts, _CALLS)
        except NotFoundError:
            raise await self._absent(object_id) from None

    async def _quarantine(self, object_id: bytes, blob: Blob) -> None:
        """Move a damaged object away, so that the next upload of the true bytes heals the store.

        It is read again first, because the bytes may have been damaged in transit.
        """
        hasher = blake3()
        async with aclosing(self._ranges(blob.key, 0, blob.size)) as pieces:
            async for piece in pieces:
                hasher.update(piece)
        if hasher.digest() == object_id:
            raise StorageUnavailableError(f"object {object_id.hex()} was damaged on its way from {self._bucket.url}")
        away = self._corrupt_key(object_id)
        try:
            await self._bucket.copy(blob, away)
            await self._bucket.delete(blob.key, version=blob.version)
        except (ConflictError, NotFoundError) as e:  # somebody else was faster, and may have healed it
            raise StorageUnavailableError(
                f"object {object_id.hex()} was damaged in {self._bucket.url} and has changed meanwhile; read it again"
            ) from e
        moved_to = self._bucket.url + away
        log.error("object_corrupt", object_id=object_id.hex(), moved_to=moved_to)
        raise ObjectCorruptError(
            f"object {object_id.hex()} does not match its id; moved to {moved_to}. A new upload heals it"
        )

    @running
    async def head(self, object_id: bytes) -> ObjectMeta | None:
        blob = await self._bucket.head(self.key_of(object_id))
        if blob is None:
            return None
        touched = await self._pins.touched([object_id])
        return ObjectMeta(object_id, blob.size, max(blob.modified_ms, touched.get(object_id, 0)))

    @running
    async def has(self, object_ids: list[bytes]) -> list[bool]:
        found = await gathered(self._bucket.head, map(self.key_of, object_ids), _CALLS)
        return [blob is not None for blob in found]

    @running_stream
    async def list(self) -> AsyncGenerator[ObjectMeta]:
        page: list[tuple[bytes, Blob]] = []
        async with aclosing(self._bucket.list(f"{self._prefix}cas/")) as blobs:
            async for blob in blobs:
                if (object_id := self._id_of(blob.key)) is not None:
                    page.append((object_id, blob))
                if len(page) == _PAGE:
                    for meta in await self._metas(page):
                        yield meta
                    page = []
        for meta in await self._metas(page):
            yield meta

    def _id_of(self, key: str) -> bytes | None:
        """Return the object id of a key, or None if the key is no object of ours."""
        try:
            object_id = bytes.fromhex(key.rpartition("/")[2])
        except ValueError:
            return None
        return object_id if len(object_id) == ID_BYTES and self.key_of(object_id) == key else None

    async def _metas(self, page: Sequence[tuple[bytes, Blob]]) -> Sequence[ObjectMeta]:
        touched = await self._pins.touched([i for i, _ in page]) if page else {}
        return [ObjectMeta(i, blob.size, max(blob.modified_ms, touched.get(i, 0))) for i, blob in page]

    # freeing

    @running
    async def delete(self, object_id: bytes) -> bool:
        """Delete the object. Returns False if it was absent or is pinned."""
        key = self.key_of(object_id)
        until = asyncio.get_running_loop().time() + DELETE_S  # from before the claim begins
        owner = await self._pins.claim(object_id)
        if not owner:
            return False

        async def remove() -> bool:
            # Where it fails, the service may still do it: the claim stays until it ends by itself.
            try:
                async with asyncio.timeout_at(until):
                    gone = await self._bucket.delete(key)
            except TimeoutError as e:
                raise StorageUnavailableError(f"{self._bucket.url}{key} was not deleted in {DELETE_S:.0f} s") from e
            await self._pins.release(object_id, owner)
            return gone

        return await to_the_end(remove())

    async def pin(self, object_ids: list[bytes], holder: str, ttl_s: float) -> None:
        await self._pins.pin(object_ids, holder, ttl_s)

    async def unpin(self, holder: str, object_ids: list[bytes] | None = None) -> None:
        await self._pins.unpin(holder, object_ids)

    async def pinned(self, object_ids: list[bytes]) -> set[bytes]:
        return await self._pins.pinned(object_ids)


async def _verified(object_id: bytes, chunks: AsyncIterator[bytes], size: int) -> AsyncGenerator[bytes]:
    """Yield `chunks`. Raises ObjectCorruptError before the last one if they are not what was promised."""
    upload, held = Upload(object_id, size), b""
    async for piece in chunks:
        if held:
            yield held
        upload.add(piece)
        held = piece
    upload.check()
    if held:
        yield held


async def _again(pieces: Iterable[bytes]) -> AsyncGenerator[bytes]:
    for piece in pieces:
        yield piece
