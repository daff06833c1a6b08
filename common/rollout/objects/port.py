"""Port of content-addressed stores.

Adapters register under the entry point group `rollout.objects`, as a function `open_store(ObjectsSection,
StorageSection, CloudSection) -> ObjectStore`.
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
    """Content-addressed store. Every method raises StorageUnavailableError, and not NotFoundError, if the store is
    unreachable."""

    async def open(self) -> None: ...
    async def close(self) -> None: ...

    async def put(self, object_id: bytes, chunks: AsyncIterator[bytes], size: int) -> bool:
        """Store the object, durably on return. Returns False if it existed. Raises ObjectCorruptError for a wrong
        hash."""
        ...

    def get(self, object_id: bytes, offset: int = 0, length: int | None = None) -> AsyncGenerator[bytes]:
        """Yield chunks of at most 512 KiB. Raises NotFoundError."""
        ...

    async def parts(self, object_id: bytes, parts: Sequence[tuple[int, int]]) -> list[bytes]:
        """Return the unverified bytes of each (offset, length), fewer at the object's end. Raises NotFoundError."""
        ...

    async def head(self, object_id: bytes) -> ObjectMeta | None: ...
    async def has(self, object_ids: list[bytes]) -> list[bool]: ...
    def list(self) -> AsyncGenerator[ObjectMeta]: ...

    async def delete(self, object_id: bytes) -> bool:
        """Delete the object. Returns False if it was absent or is pinned; no pin can come between the check and the
        deletion."""
        ...

    # Pins keep an object from deletion while nothing in the ledger refers to it yet.
    async def pin(self, object_ids: list[bytes], holder: str, ttl_s: float) -> None: ...
    async def unpin(self, holder: str, object_ids: list[bytes] | None = None) -> None:
        """Remove the pins of `holder`, or only those of `object_ids`."""
        ...

    async def pinned(self, object_ids: list[bytes]) -> set[bytes]: ...


@runtime_checkable
class OwnedStore(Protocol):
    """Store that several ledgers could reach by mistake, and that names the one whose objects it has."""

    async def owner(self) -> str:
        """Return the id of the owning ledger, or an empty string."""
        ...

    async def take(self, ledger: str) -> str:
        """Make `ledger` the owner if there is none; return the owner."""
        ...
