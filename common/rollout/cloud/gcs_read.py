"""Reading an object of GCS: a body that breaks is gone on with from where it broke, of the same generation."""

from __future__ import annotations

import re
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any

from rollout.cloud.gcp import PIECE, Gcp
from rollout.cloud.gcp_errors import Access, classify
from rollout.model.errors import StorageError

_RANGE = re.compile(r"bytes (\d+)-\d+/(\d+)")


@dataclass(slots=True)
class _Body:
    stack: AsyncExitStack
    pieces: AsyncIterator[bytes]
    first: bytes
    generation: str
    end: int
    """Of what was asked for, in bytes from the beginning of the object."""


async def read_object(
    gcp: Gcp, url: str, *, offset: int, end: int | None, generation: str, what: str, access: Access
) -> AsyncGenerator[bytes]:
    """Pieces of at most 512 KiB of the bytes from `offset` to before `end`, or to the object's end.

    NotFoundError: no such object, or (with a `generation`, given or of the first answer) not of that generation."""
    at = offset
    while end is None or at < end:

        async def begun(at: int = at, end: int | None = end, generation: str = generation) -> _Body | None:
            return await _begin(gcp, url, at, end, generation)

        body = await gcp.retried(begun, what=what, access=access)
        if body is None:
            return
        end, generation = body.end, body.generation
        async with body.stack:
            piece = body.first
            while piece:
                at += len(piece)
                yield piece
                try:
                    piece = await anext(body.pieces, b"")
                except Exception as e:
                    failure = classify(e)
                    if failure is None or not failure.again:
                        raise
                    if not generation:
                        raise failure.error(f"{what} (an answer without x-goog-generation)") from e
                    break


async def _begin(gcp: Gcp, url: str, at: int, end: int | None, generation: str) -> _Body | None:
    """With its first piece: a server that never gets that far uses up the budget. None: nothing from there on."""
    params = {"alt": "media"} | ({"generation": generation} if generation else {})
    # Stored gzip is sent as it is stored: unpacked, it has no ranges.
    headers = {"Accept-Encoding": "gzip"}
    if at or end is not None:
        headers["Range"] = f"bytes={at}-{'' if end is None else end - 1}"
    stack = AsyncExitStack()
    try:
        answer = await stack.enter_async_context(
            gcp.stream("GET", url, params=params, headers=headers, expect=(200, 206, 416))
        )
        if answer.status == 416:
            await stack.aclose()
            return None
        length = int(answer.headers.get("Content-Length", "-1"))
        if length < 0:
            raise StorageError(f"{url}: the answer does not say how long it is")
        if answer.status == 206:
            found = _RANGE.fullmatch(answer.headers.get("Content-Range", ""))
            begins = int(found[1]) if found else -1
        else:
            begins = 0
        if begins != at:
            raise StorageError(f"{url}: asked for bytes from {at} on, the answer begins at {begins}")
        pieces: Any = answer.content.iter_chunked(PIECE)
        first = await anext(pieces, b"")
        return _Body(stack, pieces, first, generation or answer.headers.get("X-Goog-Generation", ""), at + length)
    except BaseException:
        await stack.aclose()
        raise
