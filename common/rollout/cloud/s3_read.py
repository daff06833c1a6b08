"""Reading an object of S3 through broken connections."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncGenerator
from typing import Any

import structlog

from rollout.cloud.aws import Aws
from rollout.cloud.aws_errors import classify, code_of
from rollout.model.errors import ConflictError, NotFoundError, StorageError, StorageUnavailableError

log = structlog.get_logger()

PIECE = 512 * 1024
BREAKS = 10
"""In a row without a byte between them; each waits longer than the one before."""
_RANGE = re.compile(r"bytes (\d+)-(\d+)/(\d+|\*)")


async def read_object(
    aws: Aws, bucket: str, key: str, offset: int, length: int | None, version: str
) -> AsyncGenerator[bytes]:
    name = f"s3://{bucket}/{key}"
    end = None if length is None else offset + length
    at, breaks, begun = offset, 0, False
    while end is None or at < end or not begun:
        answer = await _open(aws, bucket, key, at, end, version, begun)
        begun = True
        if answer is None:
            return  # the object ends before `at`
        version = version or str(answer.get("ETag", "")).strip('"')
        start, stop = _extent(answer, name, at)
        stop = stop if end is None else min(stop, end)
        body: Any = answer["Body"]
        came = at
        try:
            skip = at - start
            while at < stop or skip > 0:
                piece: bytes = await body.read(PIECE)
                if not piece:
                    raise ConnectionError(f"the body ended {stop - at} bytes early")
                if skip:
                    piece, skip = piece[skip:], max(0, skip - len(piece))
                piece = piece[: stop - at]
                if piece:
                    at += len(piece)
                    yield piece
            return
        except Exception as e:
            failure = classify(e, "s3", "get_object", {"Bucket": bucket})
            if failure is None or not failure.again:
                raise
            breaks = 1 if at > came else breaks + 1
            if breaks > BREAKS:
                raise StorageUnavailableError(f"{name} cannot be read: its body breaks off at byte {at}: {e}") from e
            log.debug("cloud_read_resumed", key=name, at=at, said=str(e))
            await asyncio.sleep(min(5.0, 0.05 * 2**breaks))
        finally:
            body.close()


async def _open(
    aws: Aws, bucket: str, key: str, at: int, end: int | None, version: str, resumed: bool
) -> dict[str, Any] | None:
    name = f"s3://{bucket}/{key}"
    parameters: dict[str, Any] = {"Bucket": bucket, "Key": key}
    if version:
        parameters["IfMatch"] = f'"{version}"'
    if end is not None and end <= at:
        await aws.call("s3", "head_object", what=f"{name} cannot be read", **parameters)
        return None
    if at or end is not None:
        parameters["Range"] = f"bytes={at}-{'' if end is None else end - 1}"

    async def attempt(client: Any) -> dict[str, Any] | None:
        try:
            return await client.get_object(**parameters)
        except Exception as e:
            if code_of(e) in ("InvalidRange", "416"):
                return None
            raise

    try:
        return await aws.run("s3", "get_object", attempt, what=f"{name} cannot be read", parameters=parameters)
    except ConflictError as e:
        raise ConflictError(f"{name} has become another object while it was read") from e
    except NotFoundError as e:
        if resumed:
            raise NotFoundError(f"{name} was deleted while it was read") from e
        raise


def _extent(answer: dict[str, Any], name: str, at: int) -> tuple[int, int]:
    """[start, stop) of the object that the body holds. A store that ignores Range sends all of it."""
    told = answer.get("ContentRange")
    size = int(answer["ContentLength"])
    if not told:
        return 0, size
    found = _RANGE.match(told)
    if found is None or int(found[1]) > at:
        raise StorageError(f"{name} cannot be read: the store answers with {told!r} where bytes from {at} were asked")
    return int(found[1]), int(found[2]) + 1
