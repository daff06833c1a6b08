"""Content-addressed bytes.

Adapters register under the entry point group `rollout.objects`, as a function
`open_store(ObjectsSection, StorageSection, CloudSection) -> ObjectStore`.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable


@dataclass(frozen=True, slots=True)
class ObjectMeta:
    object_id: bytes  # blake3, 32 bytes
    size: int
    created_ms: int


class ObjectStore(Protocol):
    """StorageUnavailableError where the store itself cannot be reached: what it holds is not missing then."""

    async def open(self) -> None: ...
    async def close(self) -> None: ...

    async def put(self, object_id: bytes, chunks: AsyncIterator[bytes], size: int) -> bool:
        """Durable on return. False: it was there. ObjectCorruptError if the bytes hash to something else."""
        ...

    def get(self, object_id: bytes, offset: int = 0, length: int | None = None) -> AsyncGenerator[bytes]:
        """Chunks of at most 512 KiB. NotFoundError."""
        ...

    async def parts(self, object_id: bytes, parts: Sequence[tuple[int, int]]) -> list[bytes]:
        """The bytes of each (offset, length), fewer where the object ends before; unverified. NotFoundError."""
        ...

    async def head(self, object_id: bytes) -> ObjectMeta | None: ...
    async def has(self, object_ids: list[bytes]) -> list[bool]: ...
    def list(self) -> AsyncGenerator[ObjectMeta]: ...

    async def delete(self, object_id: bytes) -> bool:
        """False: it was not there, or somebody has pinned it; no pin can come between the look and the deletion."""
        ...

    # Pins keep an object from deletion while nothing in the ledger refers to it yet.
    async def pin(self, object_ids: list[bytes], holder: str, ttl_s: float) -> None: ...
    async def unpin(self, holder: str, object_ids: list[bytes] | None = None) -> None:
        """What `holder` has pinned, or of that only these."""
        ...

    async def pinned(self, object_ids: list[bytes]) -> set[bytes]: ...


@runtime_checkable
class OwnedStore(Protocol):
    """A store that several ledgers could reach by mistake: it names the one whose objects it has."""

    async def owner(self) -> str:
        """The id of that ledger; empty: none is named."""
        ...

    async def take(self, ledger: str) -> str:
        """Names `ledger` where none is named; which one is named then."""
        ...
