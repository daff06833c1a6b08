"""Write to S3: PutObject, or an upload in parts that is resumed if an answer is missing.

Source: https://docs.aws.amazon.com/AmazonS3/latest/userguide/mpuoverview.html.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar, cast

import structlog
from ulid import ULID

from rollout.cloud.aws import Aws
from rollout.cloud.aws_errors import code_of, rows
from rollout.cloud.bucket import Blob, StartOverError
from rollout.cloud.parallel import gathered
from rollout.cloud.parts import BUFFERS, Body, Part
from rollout.cloud.s3_answers import etag, written_blob
from rollout.cloud.upload import STAMP, GoneError, in_parts
from rollout.model.errors import NotFoundError, RolloutError

log = structlog.get_logger()

T = TypeVar("T")
MOST_PARTS = 10_000
MIB = 1 << 20
PART_BUDGET_S = 300.0
"""Seconds for attempts at one part, from its first failure on."""
STALL_S = 60.0
"""Seconds without progress after which a body is sent again, because its peer is gone."""
ANSWER_S = 120.0
SMALL = 64 << 10
COPIES = 6
"""Number of parts that are copied concurrently; the service takes many seconds for each."""


class InterferedError(StartOverError):
    """Somebody else wrote to the key at the same time; the upload must start again."""


@dataclass
class S3Upload:
    """Upload to a key.

    `condition` is IfNoneMatch or IfMatch. `least_part` is the part size in bytes, larger if there would be too many
    parts. `id` is that of an upload in progress.
    """

    aws: Aws
    bucket: str
    key: str
    size: int = 0
    condition: dict[str, str] = field(default_factory=dict[str, str])
    least_part: int = MIB
    id: str = ""
    stamp: str = field(default_factory=lambda: str(ULID()))
    parts: dict[int, str] = field(default_factory=dict[int, str])

    @property
    def whole_bytes(self) -> int:
        return self.least_part

    @property
    def part_bytes(self) -> int:
        fewest = -(-self.size // MOST_PARTS)
        return max(self.least_part, -(-fewest // MIB) * MIB)

    @property
    def parallel(self) -> int:
        return BUFFERS

    @property
    def _object(self) -> dict[str, Any]:
        return {"Bucket": self.bucket, "Key": self.key}

    @property
    def _at(self) -> dict[str, Any]:
        return {**self._object, "UploadId": self.id}

    @property
    def _name(self) -> str:
        return f"s3://{self.bucket}/{self.key}"

    @property
    def _what(self) -> str:
        return f"{self._name} cannot be written"

    async def whole(self, pieces: list[bytes]) -> Blob:
        data = b"".join(pieces)

        async def attempt(client: Any) -> dict[str, Any]:
            put = partial(client.put_object, **self._object, Metadata={STAMP: self.stamp}, **self.condition)
            # of plain bytes botocore sends no "Expect: 100-continue", whose answer costs a round trip
            return await (put(Body=data) if len(data) <= SMALL else _unless_stalled(put, Body(data)))

        answer = await self.aws.run(
            "s3", "put_object", attempt, what=self._what, budget_s=PART_BUDGET_S, parameters=self._object
        )
        return written_blob(self.key, self.size, answer)

    async def begin(self) -> None:
        answer = await self.aws.call(
            "s3", "create_multipart_upload", what=self._what, **self._object, Metadata={STAMP: self.stamp}
        )
        self.id = answer["UploadId"]

    async def send(self, part: Part) -> None:
        tries = 0

        async def attempt(client: Any) -> str:
            nonlocal tries
            tries += 1
            if tries > 1 and (found := await self._stored(client, part)):
                return found
            upload = partial(client.upload_part, **self._at, PartNumber=part.number)
            return etag(await _unless_stalled(upload, Body(part.data)))

        what = f"part {part.number} of {self._what}"
        self.parts[part.number] = await self._run("upload_part", attempt, what, PART_BUDGET_S)

    async def _stored(self, client: Any, part: Part) -> str:
        """Return the ETag of a part that has arrived although its answer was lost."""
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

    async def complete(self) -> Blob:
        listed = [{"PartNumber": n, "ETag": f'"{tag}"'} for n, tag in sorted(self.parts.items())]

        async def attempt(client: Any) -> dict[str, Any]:
            try:
                return await client.complete_multipart_upload(
                    **self._at, MultipartUpload={"Parts": listed}, **self.condition
                )
            except Exception as e:
                if code_of(e) == "ConditionalRequestConflict":
                    said = f"{self._what}: somebody else wrote there meanwhile; write it again"
                    raise InterferedError(said) from e
                raise

        answer = await self._run("complete_multipart_upload", attempt, self._what, 60.0)
        return written_blob(self.key, self.size, answer)

    async def _run(self, operation: str, attempt: Callable[[Any], Awaitable[T]], what: str, budget_s: float) -> T:
        """Run a call of the upload; a 404 then concerns the upload."""
        try:
            return await self.aws.run("s3", operation, attempt, what=what, budget_s=budget_s, parameters=self._at)
        except NotFoundError as e:
            raise GoneError(what) from e

    async def abort(self) -> None:
        """Abort the upload, and check for parts that were in transit and may arrive after it."""
        try:
            for _ in range(3 if self.id else 0):
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

    async def written(self) -> Blob | None:
        try:
            found = await self.aws.call("s3", "head_object", what=self._name, **self._object)
        except NotFoundError:
            return None
        metadata = cast("dict[str, str]", found.get("Metadata") or {})
        ours = metadata.get(STAMP) == self.stamp and found["ContentLength"] == self.size
        return written_blob(self.key, self.size, found) if ours else None

    async def copy(self, source: Blob, part_bytes: int) -> Blob:
        """Fill the upload with parts of `source`, copied by the service."""
        origin = {"Bucket": self.bucket, "Key": source.key}

        async def copy_part(start: int) -> None:
            number, last = start // part_bytes + 1, min(start + part_bytes, source.size) - 1
            answer = await self.aws.call(
                "s3",
                "upload_part_copy",
                what=f"{source.key} cannot be copied to {self._name}",
                budget_s=PART_BUDGET_S,
                **self._at,
                PartNumber=number,
                CopySource=origin,
                CopySourceIfMatch=f'"{source.version}"',
                CopySourceRange=f"bytes={start}-{last}",
            )
            self.parts[number] = etag(answer["CopyPartResult"])

        async def fill() -> None:
            await gathered(copy_part, range(0, source.size, part_bytes), COPIES)

        return await in_parts(self, fill)


async def _unless_stalled(call: Callable[..., Awaitable[dict[str, Any]]], body: Body) -> dict[str, Any]:
    """Return the answer of `call`. Raises TimeoutError if the peer accepts no more of the body, or does not answer
    within `ANSWER_S` after its last byte. A slow link is not cut off as long as bytes move."""
    task = asyncio.ensure_future(call(Body=body))
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
