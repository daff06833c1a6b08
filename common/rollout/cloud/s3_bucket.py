"""`Bucket` on S3 and compatible stores: MinIO, Ceph, R2."""

from __future__ import annotations

import heapq
import re
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import AsyncExitStack
from functools import partial
from typing import Any

from rollout.cloud.aws import Aws
from rollout.cloud.aws_errors import NOT_IMPLEMENTED, check_answer, classify, code_of, denied, headers_of, rows
from rollout.cloud.bucket import ABSENT, ALWAYS, Blob, Digest
from rollout.cloud.download import PIECE, Body, download, reached
from rollout.cloud.retry import Failure
from rollout.cloud.s3_answers import answered_ms, etag, ms
from rollout.cloud.s3_probe import Conditions
from rollout.cloud.s3_upload import InterferedError, S3Upload
from rollout.cloud.upload import upload
from rollout.config.cloud import S3Section
from rollout.model.errors import ConfigError, ConflictError, NotFoundError

COPY_PART = 512 << 20
"""Part size of a copy by the service; one request copies at most 5 GiB, and a long one may be cut off."""
COPY_TRIES = 5
"""Number of attempts at a copy while somebody else writes to the key; S3 then asks to start again."""
PAGE = 1000
_MD5 = re.compile(r"([0-9a-f]{32})(?:-(\d+))?")


class S3Bucket:
    def __init__(self, aws: Aws, name: str, section: S3Section, *, own_session: bool = False) -> None:
        """Use the bucket `name`; `own_session` closes `aws` with the bucket."""
        self._aws = aws
        self._name = name
        self._section = section
        self._own_session = own_session
        self._conditions = Conditions(aws, name, section)

    @property
    def url(self) -> str:
        return f"s3://{self._name}/"

    @property
    def part_bytes(self) -> int:
        return self._section.multipart_chunk_bytes

    async def open(self) -> None:
        configured = self._name == self._section.bucket
        prefix = self._section.prefix if configured else ""
        try:
            answer = await self._call("list_objects_v2", "", "cannot be used", Prefix=prefix, MaxKeys=1)
        except ConfigError as e:
            if configured or not denied(e):
                raise
            # of a URL: to read one object, or to write one, neither permission is needed
            try:
                await self._call("get_bucket_location", "", "cannot be used")
            except ConfigError as e:
                if not denied(e):
                    raise
            return
        headers = headers_of(answer)
        theirs, ours = headers.get("x-amz-bucket-region", ""), self._aws.region()
        if theirs and theirs != ours and not self._aws.endpoint("s3"):
            raise ConfigError(
                f'{self.url} is in region {theirs}, and the calls go to {ours}: set [cloud] region = "{theirs}"'
            )

    async def close(self) -> None:
        if self._own_session:
            await self._aws.close()

    async def conditional(self, beside: str) -> bool:
        return await self._conditions.ask(beside)

    async def _call(self, operation: str, key: str, failed: str, **parameters: Any) -> dict[str, Any]:
        if key:
            parameters["Key"] = key
        what = f"{self.url}{key} {failed}"
        return await self._aws.call("s3", operation, what=what, Bucket=self._name, **parameters)

    async def head(self, key: str) -> Blob | None:
        try:
            answer = await self._head(key)
        except NotFoundError:
            return None
        return Blob(key, int(answer["ContentLength"]), etag(answer), ms(answer["LastModified"]))

    async def digest(self, blob: Blob) -> Digest | None:
        """Return the ETag as a digest; it is no hash if a KMS or customer key encrypts the body."""
        if not self._aws.endpoint("s3").startswith("http://"):
            return None
        answer = await self._head(blob.key)
        encrypted = answer.get("ServerSideEncryption", "AES256") != "AES256" or answer.get("SSECustomerAlgorithm")
        found = _MD5.fullmatch(blob.version)
        if found is None or encrypted or etag(answer) != blob.version:
            return None
        if not found[2]:
            return Digest(found[1])
        first = int((await self._call("head_object", blob.key, "cannot be read", PartNumber=1))["ContentLength"])
        if not first or -(-blob.size // first) != int(found[2]):
            return None
        return Digest(found[1], first)

    async def _head(self, key: str) -> dict[str, Any]:
        async def attempt(client: Any) -> dict[str, Any]:
            at = {"Bucket": self._name, "Key": key}
            try:
                return await client.head_object(**at)
            except Exception as e:
                if code_of(e) not in ("400", "403", "301"):
                    raise
            # the answer to a HEAD has no body that says why
            answer = await client.get_object(**at, Range="bytes=0-0")
            answer["Body"].close()
            return await client.head_object(**at)

        return await self._aws.run(
            "s3", "head_object", attempt, what=f"{self.url}{key} cannot be read", parameters={"Bucket": self._name}
        )

    def read(self, key: str, offset: int = 0, length: int | None = None, *, version: str = "") -> AsyncGenerator[bytes]:
        def kind(error: BaseException) -> Failure | None:
            return classify(error, "s3", "get_object", {"Bucket": self._name})

        return download(f"{self.url}{key}", partial(self._opened, key), kind, offset, length, version)

    async def _opened(self, key: str, at: int, end: int | None, version: str) -> Body | None:
        parameters: dict[str, Any] = {"Bucket": self._name, "Key": key}
        if version:
            parameters["IfMatch"] = f'"{version}"'
        if at or end is not None:
            parameters["Range"] = f"bytes={at}-{'' if end is None else end - 1}"

        async def attempt(client: Any) -> Body | None:
            try:
                answer = await client.get_object(**parameters)
            except Exception as e:
                if code_of(e) in ("InvalidRange", "416"):
                    return None
                raise
            check_answer("get_object", answer)
            stack = AsyncExitStack()
            stack.callback(answer["Body"].close)
            body = Body(stack, partial(answer["Body"].read, PIECE), etag(answer), int(answer["ContentLength"]))
            return await reached(f"{self.url}{key}", body, at, answer.get("ContentRange", ""))

        what = f"{self.url}{key} cannot be read"
        return await self._aws.run("s3", "get_object", attempt, what=what, parameters=parameters)

    async def write(self, key: str, chunks: AsyncIterator[bytes], size: int, *, when: str = ALWAYS) -> Blob:
        return await upload(self._upload(key, size, await self._condition(key, when)), chunks, size)

    def _upload(self, key: str, size: int, condition: dict[str, str]) -> S3Upload:
        return S3Upload(self._aws, self._name, key, size, condition, self.part_bytes)

    async def _condition(self, key: str, when: str) -> dict[str, str]:
        """Return the condition's headers if the store supports it; otherwise check the key now. Raises
        ConflictError."""
        if when == ALWAYS:
            return {}
        if await self._conditions.ask(key):
            return {"IfNoneMatch": "*"} if when == ABSENT else {"IfMatch": f'"{when}"'}
        found = await self.head(key)
        if (found.version if found else ABSENT) != when:
            raise ConflictError(f"{self.url}{key} is another object than the one that was expected")
        return {}

    async def list(self, prefix: str, *, after: str = "", delimiter: str = "") -> AsyncGenerator[Blob]:
        more: dict[str, Any] = {"StartAfter": after} if after else {}
        if delimiter:
            more["Delimiter"] = delimiter
        while True:
            page = await self._call(
                "list_objects_v2", "", f"cannot be listed below {prefix!r}", Prefix=prefix, MaxKeys=PAGE, **more
            )
            objects = [
                Blob(one["Key"], int(one["Size"]), etag(one), ms(one["LastModified"])) for one in rows(page, "Contents")
            ]
            groups = [Blob(one["Prefix"], -1, "", 0) for one in rows(page, "CommonPrefixes")]
            for blob in heapq.merge(objects, groups, key=lambda one: one.key.encode()):
                yield blob
            if not page.get("IsTruncated"):
                return
            more = {k: v for k, v in more.items() if k == "Delimiter"}
            more["ContinuationToken"] = page["NextContinuationToken"]

    async def copy(self, source: Blob, key: str, *, when: str = ALWAYS) -> Blob:
        condition = await self._condition(key, when)
        origin = {"Bucket": self._name, "Key": source.key}
        if source.size and (condition or source.size > COPY_PART):
            return await self._copy_in_parts(source, key, condition)
        answer = await self._call(
            "copy_object",
            key,
            f"cannot be copied from {source.key}",
            CopySource=origin,
            CopySourceIfMatch=f'"{source.version}"',
        )
        result = answer["CopyObjectResult"]
        return Blob(key, source.size, etag(result), ms(result["LastModified"]))

    async def _copy_in_parts(self, source: Blob, key: str, condition: dict[str, str]) -> Blob:
        """Copy in parts, even a small object: most stores support conditions not in CopyObject but when an upload
        completes."""
        tries = 0
        while True:
            tries += 1
            try:
                return await self._upload(key, source.size, condition).copy(source, COPY_PART)
            except InterferedError:
                if tries == COPY_TRIES:
                    raise

    async def delete(self, key: str, *, version: str = "") -> bool:
        found = await self.head(key)
        if found is None:
            return False
        if version and found.version != version:
            raise ConflictError(f"{self.url}{key} is another object than the one that was to be deleted")
        condition = {"IfMatch": f'"{version}"'} if version and await self._conditions.ask(key) else {}

        async def attempt(client: Any) -> dict[str, Any]:
            try:
                return await client.delete_object(Bucket=self._name, Key=key, **condition)
            except Exception as e:
                if not condition or code_of(e) not in NOT_IMPLEMENTED:
                    raise
            return await client.delete_object(Bucket=self._name, Key=key)

        try:
            await self._aws.run("s3", "delete_object", attempt, what=f"{self.url}{key} cannot be deleted")
        except NotFoundError:
            return False
        return True

    async def sweep(self, prefix: str, older_than_s: float, *, exact: bool = False) -> int:
        ended, more = 0, dict[str, Any]()
        while True:
            page = await self._call("list_multipart_uploads", "", "cannot be swept", Prefix=prefix, **more)
            now_ms = answered_ms(page)
            for one in rows(page, "Uploads"):
                if exact and one["Key"] != prefix:
                    continue
                # its date is in whole seconds, and may be rounded up
                if older_than_s > 0 and now_ms - ms(one["Initiated"]) < older_than_s * 1000:
                    continue
                await S3Upload(self._aws, self._name, one["Key"], id=one["UploadId"]).abort()
                ended += 1
            if not page.get("IsTruncated"):
                return ended
            more = {"KeyMarker": page["NextKeyMarker"], "UploadIdMarker": page["NextUploadIdMarker"]}
