"""Check whether a store honors conditions on writes.

AWS, MinIO since 2024 and R2 do; others ignore the header, or honor it in some calls only.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable
from typing import Any

import structlog
from ulid import ULID

from rollout.cloud.aws import Aws
from rollout.cloud.aws_errors import NOT_IMPLEMENTED, code_of
from rollout.cloud.s3_upload import S3Upload
from rollout.cloud.upload import upload_parts
from rollout.config.cloud import S3Section
from rollout.model.errors import ConflictError, RolloutError

log = structlog.get_logger()

ANOTHER_ETAG = '"00000000000000000000000000000000"'


class Conditions:
    """`[cloud.s3] conditional_writes`. For auto, AWS supports them; another store is asked once, with an object of one
    byte that is deleted."""

    def __init__(self, aws: Aws, bucket: str, section: S3Section) -> None:
        self._aws = aws
        self._bucket = bucket
        self._known: bool | None = {"on": True, "off": False}.get(section.conditional_writes)
        self._lock = asyncio.Lock()

    async def ask(self, beside: str) -> bool:
        """Return whether the store honors conditions. `beside` is a key to be written, next to which writing is
        permitted."""
        async with self._lock:
            if self._known is None:
                self._known = not self._aws.endpoint("s3") or await self._asked(beside.rpartition("/")[0])
                if not self._known:
                    log.warning("cloud_conditions_ignored", bucket=self._bucket)
            return self._known

    async def _asked(self, directory: str) -> bool:
        key = f"{directory}/" if directory else ""
        key += f".rollout-conditions-{ULID()}"
        name = f"s3://{self._bucket}/{key}"
        at: dict[str, Any] = {"Bucket": self._bucket, "Key": key}
        why = "which shows whether the store keeps to conditions; [cloud.s3] conditional_writes says it without"
        what = f"{name} cannot be written ({why})"
        await self._aws.call("s3", "put_object", what=what, **at, Body=b"1")
        try:
            for header, value in (("IfNoneMatch", "*"), ("IfMatch", ANOTHER_ETAG)):
                more: dict[str, Any] = {**at, header: value}
                if not await _refused(self._aws.call("s3", "put_object", what=what, Body=b"2", **more)):
                    return False
            upload = S3Upload(self._aws, self._bucket, key, 1, {"IfNoneMatch": "*"})
            return await _refused(upload_parts(upload, _byte(), 1))
        finally:
            try:
                await self._aws.call("s3", "delete_object", what=f"{name} cannot be deleted", **at)
            except RolloutError as e:
                log.warning("cloud_probe_left", key=name, error=str(e))


async def _refused(call: Awaitable[Any]) -> bool:
    """Return whether the call fails because its condition does not hold."""
    try:
        await call
    except ConflictError:
        return True
    except RolloutError as e:
        if code_of(e.__cause__ or e) not in NOT_IMPLEMENTED:
            raise
    return False


async def _byte() -> AsyncIterator[bytes]:
    yield b"2"
