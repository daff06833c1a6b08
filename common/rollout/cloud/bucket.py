"""A bucket as the rest of the product sees it: the object store, inputs and outputs by URL, and the doctor.

Keys are plain text; nothing here knows of content ids. Errors, of every call: StorageUnavailableError while the service
cannot be reached or throttles, after the budget for retries; ConfigError for what a person must mend (no such bucket,
another region, no permission, no credentials), with the permission and the key to look at; NotFoundError; ConflictError
where a condition does not hold.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from dataclasses import dataclass
from typing import Protocol

from rollout.model.errors import StorageUnavailableError

ALWAYS = "*always*"
ABSENT = "*absent*"
"""For `when`: only where there is no such key. Anything else is the `version` that must be there."""


@dataclass(frozen=True, slots=True)
class Blob:
    """`version`: opaque, another for other bytes (S3: the ETag; GCS: the generation)."""

    key: str
    size: int
    version: str
    modified_ms: int


@dataclass(frozen=True, slots=True)
class Digest:
    """MD5 of a body as the service tells it, hexadecimal. `part_bytes`: it is that of the MD5s of parts of this size;
    0: of the whole. Some stores tell a number of the same form that is no hash of the body."""

    md5: str
    part_bytes: int = 0


class StartOverError(StorageUnavailableError):
    """The service lost what it had of a body: it is to be written again, from its first byte."""


class Bucket(Protocol):
    @property
    def url(self) -> str:
        """`s3://name/` or `gs://name/`."""
        ...

    @property
    def part_bytes(self) -> int:
        """Of a part; larger bodies take several requests. A write holds three of them at most."""
        ...

    async def open(self) -> None:
        """Checks that the bucket is there and may be used, and what the store can do."""
        ...

    async def close(self) -> None: ...

    async def conditional(self, beside: str) -> bool:
        """Whether the store keeps to `when`. Where it does not, `ABSENT` and versions are looked at before the write:
        two writers at once are not kept apart. A store of which that is not known is asked, once, with an object next
        to the key `beside`."""
        ...

    async def head(self, key: str) -> Blob | None: ...

    async def digest(self, blob: Blob) -> Digest | None:
        """Where bodies come over plain HTTP, so that nothing else says whether a byte of one is another: what the
        service says of `blob`. None: over TLS, and where it does not tell."""
        ...

    def read(self, key: str, offset: int = 0, length: int | None = None, *, version: str = "") -> AsyncGenerator[bytes]:
        """Pieces of at most 512 KiB. A body that breaks is gone on with from where it broke, of the same version:
        ConflictError where the object has become another. `version`: only of that one."""
        ...

    async def write(self, key: str, chunks: AsyncIterator[bytes], size: int, *, when: str = ALWAYS) -> Blob:
        """Durable on return. `chunks` is read once. Nothing of it is left behind after an error, cancellation
        included: unfinished uploads are aborted. ConflictError: `when` does not hold. InputError: `chunks` had another
        number of bytes than `size`. StartOverError: whoever can read `chunks` again writes again."""
        ...

    def list(self, prefix: str, *, after: str = "", delimiter: str = "") -> AsyncGenerator[Blob]:
        """In order of keys. With a `delimiter`, keys that go on after it are given once, up to it, with size -1."""
        ...

    async def copy(self, source: Blob, key: str, *, when: str = ALWAYS) -> Blob:
        """Within the bucket, by the service."""
        ...

    async def delete(self, key: str, *, version: str = "") -> bool:
        """False: it was not there. ConflictError: it has another version."""
        ...

    async def sweep(self, prefix: str, older_than_s: float, *, exact: bool = False) -> int:
        """Aborts unfinished uploads to keys that begin with `prefix`, or with `exact` to that key alone; their number.
        `older_than_s`: only those that were begun so long ago; 0: all."""
        ...
