"""Upload of a body to a key: in one request or in parts, with bounded memory, aborted on every failure.

A provider supplies the calls and their sizes (`Upload`); everything else is here.
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
"""Metadata key that identifies the write of each object. A condition that fails may be due to this very write, whose
answer was lost."""


class GoneError(Exception):
    """The service no longer knows the upload."""


class Upload(Protocol):
    """One write of one provider. Each call retries what can be retried."""

    @property
    def whole_bytes(self) -> int:
        """Maximum bytes of a body that is sent in one request."""
        ...

    @property
    def part_bytes(self) -> int: ...

    @property
    def parallel(self) -> int:
        """Number of parts that are sent concurrently, at most `parts.BUFFERS`; 1 sends them in order."""
        ...

    async def whole(self, pieces: list[bytes]) -> Blob:
        """Send the body in one request."""
        ...

    async def begin(self) -> None: ...

    async def send(self, part: Part) -> None:
        """Send a part; the service has it on return. Raises GoneError."""
        ...

    async def complete(self) -> Blob:
        """Complete the upload. Raises GoneError and ConflictError."""
        ...

    async def abort(self) -> None:
        """Remove what is left of the upload, even if it was not begun or has ended."""
        ...

    async def written(self) -> Blob | None:
        """Return the object at the key if it is whole and has the stamp of this write."""
        ...


async def upload(target: Upload, chunks: AsyncIterator[bytes], size: int) -> Blob:
    """Upload `size` bytes.

    Raises InputError if `chunks` has another number of bytes, ConflictError if somebody else's object does not permit
    it, and StartOverError if the service lost what it had.
    """
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
    """Upload in parts, however small the body is. Otherwise as `upload`."""

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
    """Begin, fill and complete an upload; abort it within `ABORT_S` after any error, including cancellation."""
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
