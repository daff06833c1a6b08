"""A bucket in memory, for what is about the store and not about a provider."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, AsyncIterator
from dataclasses import replace

from rollout.cloud.bucket import ABSENT, ALWAYS, Blob
from rollout.model.errors import ConflictError, NotFoundError

PIECE = 512 * 1024


class MemoryBucket:
    url = "memory://bucket/"
    part_bytes = 5 << 20
    conditional = True

    def __init__(self) -> None:
        self.held: dict[str, tuple[Blob, bytes]] = {}
        self.versions = 0

    async def open(self) -> None: ...
    async def close(self) -> None: ...

    def age(self, seconds: float) -> None:
        """All that is there was written so much earlier."""
        for key, (blob, data) in self.held.items():
            self.held[key] = replace(blob, modified_ms=blob.modified_ms - int(seconds * 1000)), data

    async def head(self, key: str) -> Blob | None:
        return self.held[key][0] if key in self.held else None

    async def read(
        self, key: str, offset: int = 0, length: int | None = None, *, version: str = ""
    ) -> AsyncGenerator[bytes]:
        if key not in self.held:
            raise NotFoundError(f"no {key}")
        data = self.held[key][1][offset : None if length is None else offset + length]
        for at in range(0, len(data), PIECE):
            yield data[at : at + PIECE]

    def _check(self, key: str, when: str) -> None:
        there = self.held[key][0].version if key in self.held else ABSENT
        if when not in (ALWAYS, there):
            raise ConflictError(f"{key} is another")

    def _keep(self, key: str, data: bytes) -> Blob:
        self.versions += 1
        blob = Blob(key, len(data), str(self.versions), time.time_ns() // 1_000_000)
        self.held[key] = blob, data
        return blob

    async def write(self, key: str, chunks: AsyncIterator[bytes], size: int, *, when: str = ALWAYS) -> Blob:
        data = b"".join([chunk async for chunk in chunks])
        assert len(data) == size
        self._check(key, when)
        return self._keep(key, data)

    async def list(self, prefix: str, *, after: str = "", delimiter: str = "") -> AsyncGenerator[Blob]:
        for key in sorted(self.held):
            if key.startswith(prefix) and key > after:
                yield self.held[key][0]

    async def copy(self, source: Blob, key: str, *, when: str = ALWAYS) -> Blob:
        self._check(key, when)
        return self._keep(key, self.held[source.key][1])

    async def delete(self, key: str, *, version: str = "") -> bool:
        if version and key in self.held:
            self._check(key, version)
        return self.held.pop(key, None) is not None

    async def sweep(self, prefix: str, older_than_s: float) -> int:
        return 0
