"""Many blobs in one object, so that no row costs a file, a round trip or an fsync of its own."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from rollout.model.errors import StateError
from rollout.model.item import INLINE_MAX, Blob, ObjectSlice

PACK_BYTES = 8 << 20
LINGER_S = 0.02


class _Pack:
    def __init__(self) -> None:
        self.pieces: list[bytes] = []
        self.size = 0
        self.id: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self.timer: asyncio.TimerHandle | None = None


class Packer:
    """Gathers blobs until `max_bytes` or `linger_s` (seconds) is reached, then puts them as one object.

    `put` makes pieces durable as one object and returns its id, e.g. `RemoteObjects.put_pieces`. `uploads` at once: one
    on its way while the one before is made durable. More would share the link, and the first be there later.
    """

    def __init__(
        self,
        put: Callable[[Sequence[bytes]], Awaitable[bytes]],
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
        self._tasks: set[asyncio.Future[Any]] = set()
        self._closed = False

    async def store(self, data: bytes) -> Blob:
        """`data` itself if it may travel inline, else its slice, durable."""
        return data if len(data) <= INLINE_MAX else await self.add(data)

    async def store_many(self, blobs: list[Blob]) -> list[Blob]:
        """As `store` for each, at the cost of a few: what is an object's slice already stays."""
        large = {n: b for n, b in enumerate(blobs) if isinstance(b, bytes) and len(b) > INLINE_MAX}
        slices = await self.add_many(list(large.values()))
        found = list(blobs)
        for n, stored in zip(large, slices, strict=True):
            found[n] = stored
        return found

    async def add(self, data: bytes) -> ObjectSlice:
        """Durable when it returns. Raises what `put` raised for the whole pack."""
        return (await self.add_many([data]))[0]

    async def add_many(self, blobs: list[bytes]) -> list[ObjectSlice]:
        """As `add`, of all of them."""
        if self._closed:
            raise StateError("the packer is closed")
        places: list[tuple[asyncio.Future[bytes], int, int]] = []
        for data in blobs:
            if len(data) >= self._max_bytes:
                places.append((self._alone(data), 0, len(data)))
            else:
                pack, offset = self._place(data)
                places.append((pack.id, offset, len(data)))
        # Shielded: one caller that gives up must not take its neighbours' upload with it.
        await asyncio.shield(asyncio.gather(*{future for future, _, _ in places}))
        return [ObjectSlice(future.result(), offset, length) for future, offset, length in places]

    def _alone(self, data: bytes) -> asyncio.Future[bytes]:
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
            pack.timer = asyncio.get_running_loop().call_later(self._linger_s, self._send)
        offset = pack.size
        pack.pieces.append(data)
        pack.size += len(data)
        if pack.size >= self._max_bytes:
            self._send()
        return pack, offset

    async def flush(self) -> None:
        """Returns when everything added so far is durable or has failed."""
        self._send()
        if self._tasks:
            await asyncio.wait(list(self._tasks))

    async def close(self) -> None:
        """Flushes; later `add` calls are refused."""
        self._closed = True
        await self.flush()

    def _send(self) -> None:
        pack, self._open = self._open, None
        if pack is None:
            return
        if pack.timer is not None:
            pack.timer.cancel()
        task = asyncio.get_running_loop().create_task(self._upload(pack))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _upload(self, pack: _Pack) -> None:
        try:
            async with self._slots:
                object_id = await self._put(pack.pieces)
        except asyncio.CancelledError:
            pack.id.cancel()
            raise
        except Exception as e:  # noqa: BLE001 - whatever the upload raised belongs to those who wait for the pack
            pack.id.set_exception(e)
            pack.id.exception()  # seen, even if every waiter has gone
        else:
            pack.id.set_result(object_id)
