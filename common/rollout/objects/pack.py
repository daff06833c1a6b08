"""Packs: many blobs in one object, so that no row costs its own file, round trip or fsync."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from rollout.model.errors import StateError
from rollout.model.item import INLINE_MAX, Blob, ObjectSlice

PACK_BYTES = 8 << 20
LINGER_S = 0.02
ADD_MAX = 256 << 10
"""Maximum bytes that a worker adds to a shared pack in one message; larger blobs become objects of their own."""


class _Pack:
    def __init__(self) -> None:
        self.pieces: list[bytes] = []
        self.size = 0
        self.place: asyncio.Future[ObjectSlice] = asyncio.get_running_loop().create_future()
        self.timer: asyncio.TimerHandle | None = None  # None: it has waited long enough


class Packer:
    """Gathers blobs up to `max_bytes`, or until `linger_s` seconds after the last upload, and stores them together.

    `put` makes pieces durable and returns their common place, as `RemoteObjects.put_pieces` does. Up to `uploads` run
    at once: one is sent while the one before is made durable. More would share the link and delay the first. While that
    many run, new blobs join the waiting pack.
    """

    def __init__(
        self,
        put: Callable[[Sequence[bytes]], Awaitable[ObjectSlice]],
        *,
        max_bytes: int = PACK_BYTES,
        linger_s: float = LINGER_S,
        uploads: int = 2,
    ) -> None:
        self._put = put
        self._max_bytes = max_bytes
        self._linger_s = linger_s
        self._slots = asyncio.Semaphore(uploads)
        self._open: _Pack | None = None
        self._sent_at = -linger_s
        self._tasks: set[asyncio.Future[Any]] = set()
        self._closed = False

    async def store(self, data: bytes) -> Blob:
        """Return `data` itself if it may travel inline, else its durable slice."""
        return data if len(data) <= INLINE_MAX else await self.add(data)

    async def store_many(self, blobs: list[Blob]) -> list[Blob]:
        """Store many blobs in few uploads; a blob that is a slice already stays as it is."""
        large = {n: b for n, b in enumerate(blobs) if isinstance(b, bytes) and len(b) > INLINE_MAX}
        slices = await self.add_many(list(large.values()))
        found = list(blobs)
        for n, stored in zip(large, slices, strict=True):
            found[n] = stored
        return found

    async def add(self, data: bytes) -> ObjectSlice:
        """Add a blob; it is durable on return. Raises what `put` raised for the whole pack."""
        return (await self.add_many([data]))[0]

    async def add_many(self, blobs: list[bytes]) -> list[ObjectSlice]:
        """Add several blobs, as `add` does."""
        if self._closed:
            raise StateError("the packer is closed")
        places: list[tuple[asyncio.Future[ObjectSlice], int, int]] = []
        for data in blobs:
            if len(data) >= self._max_bytes:
                places.append((self._alone(data), 0, len(data)))
            else:
                pack, offset = self._place(data)
                places.append((pack.place, offset, len(data)))
        # Shielded: one caller that gives up must not take its neighbours' upload with it.
        await asyncio.shield(asyncio.gather(*{future for future, _, _ in places}))
        return [_within(future.result(), offset, length) for future, offset, length in places]

    def _alone(self, data: bytes) -> asyncio.Future[ObjectSlice]:
        task = asyncio.ensure_future(self._put([data]))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def _place(self, data: bytes) -> tuple[_Pack, int]:
        pack = self._open
        if pack is not None and pack.size + len(data) > self._max_bytes:
            self._send()
            pack = None
        if pack is None:
            pack = self._open = _Pack()
            loop = asyncio.get_running_loop()
            pack.timer = loop.call_at(max(loop.time(), self._sent_at + self._linger_s), self._due)
        offset = pack.size
        pack.pieces.append(data)
        pack.size += len(data)
        if pack.size >= self._max_bytes:
            self._send()
        return pack, offset

    async def flush(self) -> None:
        """Wait until everything added so far is durable or has failed."""
        self._send()
        if self._tasks:
            await asyncio.wait(list(self._tasks))

    async def close(self) -> None:
        """Flush; later calls of `add` are refused."""
        self._closed = True
        await self.flush()

    def _due(self) -> None:
        if self._open is not None:
            self._open.timer = None
            if not self._slots.locked():
                self._send()

    def _send(self) -> None:
        pack, self._open = self._open, None
        if pack is None:
            return
        if pack.timer is not None:
            pack.timer.cancel()
        self._sent_at = asyncio.get_running_loop().time()
        task = asyncio.get_running_loop().create_task(self._upload(pack))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _upload(self, pack: _Pack) -> None:
        try:
            async with self._slots:
                place = await self._put(pack.pieces)
        except asyncio.CancelledError:
            pack.place.cancel()
            raise
        except Exception as e:  # noqa: BLE001 - whatever the upload raised belongs to those who wait for the pack
            pack.place.set_exception(e)
            pack.place.exception()  # seen, even if every waiter has gone
        else:
            pack.place.set_result(place)
        finally:
            if self._open is not None and self._open.timer is None:
                self._due()


def _within(place: ObjectSlice, offset: int, length: int) -> ObjectSlice:
    return ObjectSlice(place.object_id, place.offset + offset, length)
