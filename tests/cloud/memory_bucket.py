"""A bucket in memory that keeps the contract of `rollout.cloud.bucket`: the fast double of a store."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from dataclasses import dataclass, field

from rollout.cloud.bucket import ABSENT, ALWAYS, Blob, Digest
from rollout.config.cloud import CloudSection
from rollout.model.errors import ConfigError, ConflictError, InputError, NotFoundError

_PIECE = 512 << 10


@dataclass
class MemoryBucket:
    """`before`: called with what is about to be done and its key; it may change the bucket, or raise. `asked`: what was
    listed and read."""

    name: str = "memory"
    objects: dict[str, tuple[bytes, Blob]] = field(default_factory=dict[str, tuple[bytes, Blob]])
    has_conditions: bool = True
    part_bytes: int = 1 << 20
    before: Callable[[str, str], None] = lambda what, key: None
    asked: list[tuple[str, str]] = field(default_factory=list[tuple[str, str]])
    swept: list[str] = field(default_factory=list[str])
    writes: int = 0
    digests: dict[str, Digest] = field(default_factory=dict[str, Digest])

    @property
    def url(self) -> str:
        return f"s3://{self.name}/"

    async def open(self) -> None:
        self.before("open", "")

    async def close(self) -> None:
        return

    async def conditional(self, beside: str) -> bool:
        return self.has_conditions

    def put(self, key: str, body: bytes) -> Blob:
        """As somebody else does."""
        self.writes += 1
        blob = Blob(key, len(body), f"v{self.writes}", round(time.time() * 1000))
        self.objects[key] = (body, blob)
        return blob

    def body(self, key: str) -> bytes:
        return self.objects[key][0]

    async def head(self, key: str) -> Blob | None:
        self.before("head", key)
        return self.objects[key][1] if key in self.objects else None

    async def digest(self, blob: Blob) -> Digest | None:
        return self.digests.get(blob.key)

    async def read(
        self, key: str, offset: int = 0, length: int | None = None, *, version: str = ""
    ) -> AsyncGenerator[bytes]:
        self.asked.append(("read", key))
        end = None if length is None else offset + length
        while True:
            self.before("read", key)
            if key not in self.objects:
                raise NotFoundError(f"{self.url}{key} is not there")
            body, blob = self.objects[key]
            if version and blob.version != version:
                raise ConflictError(f"{self.url}{key} is another object by now")
            piece = body[offset:end][:_PIECE]
            if not piece:
                return
            offset += len(piece)
            await asyncio.sleep(0)
            yield piece

    async def write(self, key: str, chunks: AsyncIterator[bytes], size: int, *, when: str = ALWAYS) -> Blob:
        body = b"".join([piece async for piece in chunks])
        if len(body) != size:
            raise InputError(f"{len(body)} bytes came, not {size}")
        self.before("write", key)
        await asyncio.sleep(0)
        there = self.objects[key][1].version if key in self.objects else ABSENT
        if when not in (ALWAYS, there):
            raise ConflictError(f"{self.url}{key} is not {when}")
        return self.put(key, body)

    async def list(self, prefix: str, *, after: str = "", delimiter: str = "") -> AsyncGenerator[Blob]:
        self.asked.append(("list", prefix))
        told: set[str] = set()
        for key in sorted(self.objects, key=str.encode):
            if not key.startswith(prefix) or key <= after:
                continue
            self.before("list", key)
            end = key.find(delimiter, len(prefix)) if delimiter else -1
            if end < 0:
                yield self.objects[key][1]
            elif (shared := key[: end + 1]) not in told:
                told.add(shared)
                yield Blob(shared, -1, "", 0)
            await asyncio.sleep(0)

    async def copy(self, source: Blob, key: str, *, when: str = ALWAYS) -> Blob:
        async def chunks() -> AsyncIterator[bytes]:
            yield self.objects[source.key][0]

        return await self.write(key, chunks(), source.size, when=when)

    async def delete(self, key: str, *, version: str = "") -> bool:
        if key not in self.objects:
            return False
        if version and self.objects[key][1].version != version:
            raise ConflictError(f"{self.url}{key} has another version")
        del self.objects[key]
        return True

    async def sweep(self, prefix: str, older_than_s: float, *, exact: bool = False) -> int:
        self.swept.append(prefix)
        return 0


@dataclass
class MemoryStore:
    """Buckets by name, in the place of `open_bucket`."""

    buckets: dict[str, MemoryBucket] = field(default_factory=dict[str, MemoryBucket])

    def bucket(self, name: str = "memory") -> MemoryBucket:
        return self.buckets.setdefault(name, MemoryBucket(name))

    def open_bucket(self, cloud: CloudSection, scheme: str, name: str) -> MemoryBucket:
        if name not in self.buckets:
            raise ConfigError(f"there is no bucket {scheme}://{name}: check its name")
        return self.buckets[name]
