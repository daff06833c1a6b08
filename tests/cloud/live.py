"""Real clouds, as far as variables name them: what is not named is skipped, and the skip says which variable it wants.

Credentials come from the providers' default chains, and AWS_ENDPOINT_URL points the AWS half at another store.
"""

from __future__ import annotations

import os
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from dataclasses import replace

import boto3
import pytest
from rollout.cloud.bucket import ALWAYS, Blob, Bucket, Digest
from rollout.config.cloud import CloudSection
from ulid import ULID

PREFIX = "rollout-live/"


def named(*variables: str) -> str:
    """The value of the first that is set."""
    found = next((os.environ[name] for name in variables if os.environ.get(name)), "")
    if not found:
        pytest.skip(f"set {' or '.join(variables)} to run this against a real cloud (docs/cloud-testing.md)")
    return found


def aws_cloud(**sections: object) -> CloudSection:
    return CloudSection.model_validate({"provider": "aws", "region": os.environ.get("AWS_REGION", ""), **sections})


def gcp_cloud(**sections: object) -> CloudSection:
    project = os.environ.get("ROLLOUT_LIVE_GCP_PROJECT", "")
    return CloudSection.model_validate({"provider": "gcp", "project": project, **sections})


def unfinished_on_s3(bucket: str, prefix: str) -> list[str]:
    """boto3 looks, not what is tested."""
    client = boto3.client("s3")
    try:
        pages = client.list_multipart_uploads(Bucket=bucket, Prefix=prefix)
        return [one["Key"] for one in pages.get("Uploads", [])]
    finally:
        client.close()


class Below:
    """A bucket's keys below a prefix of its own, as a bucket that is empty at first; emptied when it is closed."""

    def __init__(self, bucket: Bucket) -> None:
        self._bucket = bucket
        self.prefix = f"{PREFIX}{ULID()}/"

    @property
    def url(self) -> str:
        return self._bucket.url

    @property
    def part_bytes(self) -> int:
        return self._bucket.part_bytes

    async def digest(self, blob: Blob) -> Digest | None:
        return await self._bucket.digest(replace(blob, key=self.prefix + blob.key))

    async def conditional(self, beside: str) -> bool:
        return await self._bucket.conditional(self.prefix + beside)

    async def open(self) -> None:
        await self._bucket.open()

    async def close(self) -> None:
        try:
            async for blob in self.list(""):
                await self.delete(blob.key)
        finally:
            await self._bucket.close()

    def _outside(self, blob: Blob) -> Blob:
        return replace(blob, key=blob.key.removeprefix(self.prefix))

    async def head(self, key: str) -> Blob | None:
        found = await self._bucket.head(self.prefix + key)
        return found and self._outside(found)

    def read(self, key: str, offset: int = 0, length: int | None = None, *, version: str = "") -> AsyncGenerator[bytes]:
        return self._bucket.read(self.prefix + key, offset, length, version=version)

    async def write(self, key: str, chunks: AsyncIterator[bytes], size: int, *, when: str = ALWAYS) -> Blob:
        return self._outside(await self._bucket.write(self.prefix + key, chunks, size, when=when))

    async def list(self, prefix: str, *, after: str = "", delimiter: str = "") -> AsyncGenerator[Blob]:
        start = self.prefix + after if after else ""
        async with aclosing(self._bucket.list(self.prefix + prefix, after=start, delimiter=delimiter)) as found:
            async for blob in found:
                yield self._outside(blob)

    async def copy(self, source: Blob, key: str, *, when: str = ALWAYS) -> Blob:
        inside = replace(source, key=self.prefix + source.key)
        return self._outside(await self._bucket.copy(inside, self.prefix + key, when=when))

    async def delete(self, key: str, *, version: str = "") -> bool:
        return await self._bucket.delete(self.prefix + key, version=version)

    async def sweep(self, prefix: str, older_than_s: float, *, exact: bool = False) -> int:
        return await self._bucket.sweep(self.prefix + prefix, older_than_s, exact=exact)
