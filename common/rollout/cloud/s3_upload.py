"""An upload in parts of S3: bounded, resumed where an answer is in doubt, aborted on every failure.

Source: https://docs.aws.amazon.com/AmazonS3/latest/userguide/mpuoverview.html. An upload carries a token in its
metadata, so that what is found at the key afterwards can be told from what was there before.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing, suppress
from dataclasses import dataclass, field
from typing import Any, cast

import structlog
from ulid import ULID

from rollout.cloud.aws import Aws
from rollout.cloud.aws_errors import code_of, rows
from rollout.cloud.bucket import StartOverError
from rollout.cloud.parts import BUFFERS, Body, Part, parts_of
from rollout.cloud.shielded import shielded
from rollout.model.errors import NotFoundError, RolloutError

log = structlog.get_logger()

MOST_PARTS = 10_000
MIB = 1 << 20
PART_BUDGET_S = 300.0
"""For tries of one part, from its first failure on."""
STALL_S = 60.0
"""A body of which nothing more is taken for so long is sent again: its peer is gone."""
ANSWER_S = 120.0
ABORT_S = 20.0
COPIES = 6
TOKEN = "rollout-upload"
"""Metadata key: which write an object is of."""


class InterferedError(StartOverError):
    """Somebody else wrote to the key at the same time; the upload is to be begun anew."""


def new_token() -> str:
    return str(ULID())


def part_size(size: int, part_bytes: int) -> int:
    """Of parts, so that there are not too many."""
    least = -(-size // MOST_PARTS)
    return max(part_bytes, -(-least // MIB) * MIB)


def etag(answer: dict[str, Any]) -> str:
    return str(answer.get("ETag", "")).strip('"')


@dataclass
class Upload:
    """One unfinished upload. `condition`: of the completion, IfNoneMatch or IfMatch."""

    aws: Aws
    bucket: str
    key: str
    condition: dict[str, str]
    token: str = field(default_factory=new_token)
    id: str = ""
    parts: dict[int, str] = field(default_factory=dict[int, str])

    @property
    def _at(self) -> dict[str, Any]:
        return {"Bucket": self.bucket, "Key": self.key, "UploadId": self.id}

    @property
    def _name(self) -> str:
        return f"s3://{self.bucket}/{self.key}"

    async def begin(self) -> None:
        answer = await self.aws.call(
            "s3",
            "create_multipart_upload",
            what=f"{self._name} cannot be written",
            Bucket=self.bucket,
            Key=self.key,
            Metadata={TOKEN: self.token},
        )
        self.id = answer["UploadId"]

    async def send(self, chunks: AsyncIterator[bytes], size: int, part_bytes: int) -> None:
        """All parts; the next is filled as soon as one of those under way has arrived."""
        running: set[asyncio.Task[None]] = set()
        try:
            async with aclosing(parts_of(chunks, size, part_size(size, part_bytes))) as parts:
                async for part in parts:
                    while len(running) >= BUFFERS:
                        running = await _one_done(running)
                    running.add(asyncio.create_task(self._send_part(part)))
            while running:
                running = await _one_done(running)
        finally:
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)

    async def _send_part(self, part: Part) -> None:
        tries = 0

        async def attempt(client: Any) -> str:
            nonlocal tries
            tries += 1
            if tries > 1 and (found := await self._stored(client, part)):
                return found
            body = Body(part.data)
            call = client.upload_part(**self._at, PartNumber=part.number, Body=body)
            return etag(await unless_stalled(call, body))

        what = f"part {part.number} of {self._name} cannot be written"
        try:
            self.parts[part.number] = await self.aws.run(
                "s3", "upload_part", attempt, what=what, budget_s=PART_BUDGET_S, parameters=self._at
            )
        except NotFoundError as e:  # the upload itself is gone: nothing that another try of the part could mend
            raise StartOverError(f"{what}: the upload was ended by somebody else; write it again") from e
        finally:
            part.free()

    async def _stored(self, client: Any, part: Part) -> str:
        """The ETag where the part has arrived after all: its answer may have been lost."""
        try:
            answer = await client.list_parts(**self._at, PartNumberMarker=part.number - 1, MaxParts=1)
        except Exception as e:
            if code_of(e) == "NoSuchUpload":
                raise
            log.debug("cloud_part_not_asked", error=str(e))
            return ""
        for one in rows(answer, "Parts"):
            if one["PartNumber"] == part.number and one["Size"] == part.length:
                digest = await asyncio.to_thread(lambda: hashlib.md5(part.data, usedforsecurity=False).hexdigest())
                return digest if etag(one) == digest else ""
        return ""

    async def copy(self, source: dict[str, str], version: str, size: int, part_bytes: int) -> None:
        """All parts, by the service, a few at once: it takes many seconds for each."""
        running: set[asyncio.Task[None]] = set()
        try:
            for number, first in enumerate(range(0, size, part_bytes), 1):
                while len(running) >= COPIES:
                    running = await _one_done(running)
                last = min(first + part_bytes, size) - 1
                running.add(asyncio.create_task(self._copy_part(number, source, version, first, last)))
            while running:
                running = await _one_done(running)
        finally:
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)

    async def _copy_part(self, number: int, source: dict[str, str], version: str, first: int, last: int) -> None:
        answer = await self.aws.call(
            "s3",
            "upload_part_copy",
            what=f"{source['Key']} cannot be copied to {self._name}",
            budget_s=PART_BUDGET_S,
            **self._at,
            PartNumber=number,
            CopySource=source,
            CopySourceIfMatch=f'"{version}"',
            CopySourceRange=f"bytes={first}-{last}",
        )
        self.parts[number] = etag(answer["CopyPartResult"])

    async def complete(self, size: int) -> dict[str, Any]:
        """Its answer, or that to a HEAD where the upload had ended with an earlier try. ConflictError: the condition
        does not hold. StorageUnavailableError: somebody else was writing there; this is to be begun anew."""
        listed = [{"PartNumber": n, "ETag": f'"{tag}"'} for n, tag in sorted(self.parts.items())]
        what = f"{self._name} cannot be written"
        tries = 0

        async def attempt(client: Any) -> dict[str, Any]:
            nonlocal tries
            tries += 1
            if tries > 1 and (found := await self._ours(size)):
                return found
            try:
                return await client.complete_multipart_upload(
                    **self._at, MultipartUpload={"Parts": listed}, **self.condition
                )
            except Exception as e:
                code = code_of(e)
                if code == "ConditionalRequestConflict":
                    raise InterferedError(f"{what}: somebody else wrote there meanwhile; write it again") from e
                if code in ("NoSuchUpload", "404", "PreconditionFailed", "412"):
                    if found := await self._ours(size):
                        return found
                    if code in ("NoSuchUpload", "404"):
                        raise StartOverError(
                            f"{what}: its upload ended, and what is there is not of it; write it again"
                        ) from e
                raise

        return await self.aws.run("s3", "complete_multipart_upload", attempt, what=what, parameters=self._at)

    async def _ours(self, size: int) -> dict[str, Any] | None:
        return await written(self.aws, self.bucket, self.key, self.token, size)

    async def abort(self) -> None:
        """Parts that were under way may arrive after it: it is asked whether any are left."""
        try:
            for _ in range(3):
                with suppress(NotFoundError):
                    await self.aws.call(
                        "s3", "abort_multipart_upload", what=f"an upload to {self._name} cannot be aborted", **self._at
                    )
                try:
                    await self.aws.call("s3", "list_parts", what=self._name, budget_s=5.0, **self._at, MaxParts=1)
                except NotFoundError:
                    return
        except RolloutError as e:
            log.warning("cloud_upload_left", key=self._name, upload=self.id, error=str(e))


async def written(aws: Aws, bucket: str, key: str, token: str, size: int) -> dict[str, Any] | None:
    """The answer to a HEAD where what is there is whole and of the write with that token."""
    try:
        found = await aws.call("s3", "head_object", what=f"s3://{bucket}/{key}", Bucket=bucket, Key=key)
    except NotFoundError:
        return None
    metadata = cast("dict[str, str]", found.get("Metadata") or {})
    return found if metadata.get(TOKEN) == token and found["ContentLength"] == size else None


async def in_parts(upload: Upload, size: int, fill: Callable[[], Awaitable[None]]) -> dict[str, Any]:
    """Begins, fills and completes; aborts whatever goes wrong, cancellation included, within `ABORT_S`."""
    beginning = asyncio.ensure_future(upload.begin())
    try:
        await asyncio.shield(beginning)  # cancelled in between, nobody would know its id
        await fill()
        return await upload.complete(size)
    except BaseException:
        await shielded(_end(beginning, upload), ABORT_S)
        raise


async def _end(beginning: asyncio.Future[None], upload: Upload) -> None:
    with suppress(RolloutError):
        await beginning
    if upload.id:
        await upload.abort()


async def unless_stalled(call: Awaitable[dict[str, Any]], body: Body) -> dict[str, Any]:
    """The answer. TimeoutError: the peer takes nothing more of the body, or gives no answer for `ANSWER_S` after its
    last byte. A slow link is not cut off: what counts is that bytes move."""
    task = asyncio.ensure_future(call)
    try:
        while True:
            done, _ = await asyncio.wait({task}, timeout=STALL_S / 4)
            if done:
                return task.result()
            if body.idle_s > (ANSWER_S if body.sent else STALL_S):
                raise TimeoutError(f"nothing of the body was taken for {STALL_S:.0f} s, or no answer came")
    finally:
        if not task.done():
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


async def _one_done(running: set[asyncio.Task[None]]) -> set[asyncio.Task[None]]:
    done, left = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
    for task in done:
        task.result()
    return left
