"""Reads an object in order over connections that break: the missing part of the same version is requested again.

A provider opens a body at a byte; everything else is here.
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
    """Body of an answer. `first` is its first bytes; `more` returns the next piece of at most `PIECE` bytes; `stop` is
    the offset in the object before which the body ends."""

    stack: AsyncExitStack
    more: Callable[[], Awaitable[bytes]]
    version: str
    stop: int
    first: bytes = b""


async def reached(name: str, body: Body, at: int, content_range: str) -> Body:
    """Return `body` once its first piece from byte `at` has come, so that a service that never gets that far uses up
    the retry budget.

    `stop` is the length of the body at this point. A store that ignores ranges sends the whole object. The body is
    closed on every error.
    """
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
    """Yield pieces of at most `PIECE` bytes.

    `opened(at, end, version)` returns a body from byte `at` on, after retries, or None if the object ends before.
    Raises ConflictError if the version differs from the given one or from the first answer's.
    """
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
