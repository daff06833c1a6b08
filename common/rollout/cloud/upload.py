"""A body on its way to a key: in one request or in parts, bounded in memory, aborted on every failure.

A provider gives the calls and their sizes (`Upload`); everything else is here.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from typing import Protocol

from rollout.cloud.bucket import Blob, StartOverError
from rollout.cloud.parallel import each
from rollout.cloud.parts import Part, parts_of, whole_of
from rollout.cloud.shielded import shielded, uninterrupted
from rollout.model.errors import ConflictError

ABORT_S = 20.0
STAMP = "rollout-write"
"""Metadata key of every object: which write it is of. A condition that does not hold may be due to this very write,
whose answer was lost."""


class GoneError(Exception):
    """The service does not know the upload any more."""


class Upload(Protocol):
    """One write of one provider. What can be tried again is tried again in each call."""

    @property
    def whole_bytes(self) -> int:
        """Up to here a body is one request."""
        ...

    @property
    def part_bytes(self) -> int: ...

    @property
    def parallel(self) -> int:
        """Parts that are sent at once, not more than `parts.BUFFERS`. 1: in order."""
        ...

    async def whole(self, pieces: list[bytes]) -> Blob:
        """In one request."""
        ...

    async def begin(self) -> None: ...

    async def send(self, part: Part) -> None:
        """The service has it on return. GoneError."""
        ...

    async def complete(self) -> Blob:
        """GoneError, ConflictError."""
        ...

    async def abort(self) -> None:
        """Nothing is left of it, also where it was not begun, or has ended."""
        ...

    async def written(self) -> Blob | None:
        """What is at the key, where it is whole and has the stamp of this write."""
        ...


async def upload(target: Upload, chunks: AsyncIterator[bytes], size: int) -> Blob:
    """`size` bytes. InputError: `chunks` had another number. ConflictError: somebody else's object does not allow it.
    StartOverError: the service lost what it had."""
    if size > target.whole_bytes:
        return await upload_parts(target, chunks, size)
    pieces = await whole_of(chunks, size)
    try:
        return await target.whole(pieces)
    except ConflictError:
        if (found := await target.written()) is None:
            raise
        return found


async def upload_parts(target: Upload, chunks: AsyncIterator[bytes], size: int) -> Blob:
    """As `upload`, in parts however small it is."""

    async def send(part: Part) -> None:
        try:
            await target.send(part)
        finally:
            part.free()

    async def fill() -> None:
        async with aclosing(parts_of(chunks, size, target.part_bytes)) as parts:
            await each(send, parts, target.parallel)

    return await in_parts(target, fill)


async def in_parts(target: Upload, fill: Callable[[], Awaitable[None]]) -> Blob:
    """Begins, fills and completes; aborts whatever goes wrong, cancellation included, within `ABORT_S`."""
    try:
        await uninterrupted(target.begin(), ABORT_S)  # cancelled in between, nobody would know its id
        await fill()
        return await target.complete()
    except BaseException as e:
        await shielded(target.abort(), ABORT_S)
        if isinstance(e, (GoneError, ConflictError)) and (found := await target.written()) is not None:
            return found
        if isinstance(e, GoneError):
            raise StartOverError(f"{e}: its upload ended, and what is there is not of it; write it again") from e
        raise
