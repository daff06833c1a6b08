"""Whether a store keeps to conditions on writes. AWS, MinIO since 2024 and R2 do; others ignore the header."""

from __future__ import annotations

import asyncio
from typing import Any

import structlog

from rollout.cloud.aws import Aws
from rollout.cloud.s3_upload import new_token
from rollout.config.cloud import S3Section
from rollout.model.errors import ConflictError, RolloutError

log = structlog.get_logger()


class Conditions:
    """`[cloud.s3] conditional_writes`; auto: asked once, with an object of one byte that is deleted again."""

    def __init__(self, aws: Aws, bucket: str, section: S3Section) -> None:
        self._aws = aws
        self._bucket = bucket
        self._prefix = section.prefix if bucket == section.bucket else ""
        self._known: bool | None = {"on": True, "off": False}.get(section.conditional_writes)
        self._lock = asyncio.Lock()

    @property
    def kept(self) -> bool:
        """False also before the store was asked."""
        return bool(self._known)

    async def probe(self, prefix: str) -> None:
        self._prefix = prefix
        await self.ask()

    async def ask(self) -> bool:
        async with self._lock:
            if self._known is None:
                self._known = await self._asked()
                if not self._known:
                    log.warning("cloud_conditions_ignored", bucket=self._bucket)
            return self._known

    async def _asked(self) -> bool:
        key = f"{self._prefix}temp/conditions-{new_token()}"
        what = f"s3://{self._bucket}/{key} cannot be written"
        at: dict[str, Any] = {"Bucket": self._bucket, "Key": key}
        try:
            await self._aws.call("s3", "put_object", what=what, **at, Body=b"1")
            try:
                await self._aws.call("s3", "put_object", what=what, **at, Body=b"2", IfNoneMatch="*")
            except ConflictError:
                return True
            except RolloutError as e:
                if "NotImplemented" not in str(e):
                    raise
            return False
        finally:
            await self._aws.call("s3", "delete_object", what=f"s3://{self._bucket}/{key} cannot be deleted", **at)
