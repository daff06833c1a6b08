"""The bytes of an object in order, through connections that break: what is missing is asked for again, of one version.

A provider opens a body from a byte on; everything else is here.
"""

from __future__ import annotations

import re
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass

import structlog

from rollout.cloud.retry import Failure
from rollout.model.errors import ConflictError, StorageError

log = structlog.get_logger()

PIECE = 512 * 1024
_RANGE = re.compile(r"bytes (\d+)-(\d+)/(?:\d+|\*)")


@dataclass(slots=True)
class Body:
    """The body of an answer. `first`: its first bytes from the one that was asked for. `more`: the next piece, of at
    most `PIECE` bytes. `stop`: the byte of the object before which it ends."""

    stack: AsyncExitStack
    more: Callable[[], Awaitable[bytes]]
    version: str
    stop: int
    first: bytes = b""


async def reached(name: str, body: Body, at: int, content_range: str) -> Body:
    """`body`, whose first piece from byte `at` on has come: a service that never gets so far uses up the budget for
    retries. `stop`: so far the length of the body. A store that ignores ranges sends all of the object. Closed on
    every error."""
    try:
        came = 0
        if content_range:
            told = _RANGE.fullmatch(content_range)
            if told is None or int(told[1]) > at:
                raise StorageError(
                    f"{name} cannot be read: bytes from {at} on were asked for, and the answer has {content_range!r}"
                )
            came, body.stop = int(told[1]), int(told[2]) + 1
        while came <= at < body.stop:
            if not (piece := await body.more()):
                raise ConnectionError(f"the body ended {body.stop - came} bytes early")
            came += len(piece)
            body.first = piece[max(0, len(piece) - (came - at)) :]
        return body
    except BaseException:
        await body.stack.aclose()
        raise


async def download(
    name: str,
    opened: Callable[[int, int | None, str], Awaitable[Body | None]],
    classify: Callable[[BaseException], Failure | None],
    offset: int,
    length: int | None,
    version: str,
) -> AsyncGenerator[bytes]:
    """Pieces of at most `PIECE` bytes. `opened(at, end, version)`: a body from byte `at` on, after retries; None: the
    object ends before. ConflictError: it is of another version than the given one, or than the first answer."""
    at, end = offset, None if length is None else offset + length
    while end is None or at < end:
        try:
            body = await opened(at, end, version)
        except ConflictError as e:
            raise ConflictError(f"{name} has become another object") from e
        if body is None:
            return
        version = version or body.version
        end = body.stop if end is None else min(end, body.stop)
        async with body.stack:
            piece = body.first
            while piece := piece[: end - at]:
                at += len(piece)
                yield piece
                if at == end:
                    return
                try:
                    piece = await body.more()
                except Exception as e:
                    failure = classify(e)
                    if failure is None or not failure.again:
                        raise
                    if not version:
                        raise failure.error(f"{name} cannot be read (an answer without a version)") from e
                    log.debug("cloud_read_resumed", key=name, at=at, said=failure.said)
                    break
