"""Bucket as the rest of the product sees it: for the object store, inputs and outputs by URL, and the doctor.

Keys are plain text; content ids are unknown here. Every call raises StorageUnavailableError if the service is
unreachable or throttles beyond the retry budget; ConfigError for what a user must mend (no such bucket, another region,
no permission, no credentials), with the permission and the configuration key; NotFoundError; ConflictError if a
condition does not hold.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from dataclasses import dataclass
from typing import Protocol

from rollout.model.errors import StorageUnavailableError

ALWAYS = "*always*"
ABSENT = "*absent*"
"""Value of `when` for a key that must not exist. Any other value is the `version` that must exist."""


@dataclass(frozen=True, slots=True)
class Blob:
    """Object of a bucket. `version` is opaque and differs for other bytes (S3: the ETag; GCS: the generation)."""

    key: str
    size: int
    version: str
    modified_ms: int


@dataclass(frozen=True, slots=True)
class Digest:
    """MD5 of a body as the service reports it, in hex.

    `part_bytes` is the part size if it is the MD5 of the parts' MD5s, or 0 for that of the whole. Some stores report a
    number of the same form that is no hash of the body.
    """

    md5: str
    part_bytes: int = 0


class StartOverError(StorageUnavailableError):
    """The service lost what it had of a body, which must be written again from its first byte."""


class Bucket(Protocol):
    @property
    def url(self) -> str:
        """URL of the bucket: `s3://name/` or `gs://name/`."""
        ...

    @property
    def part_bytes(self) -> int:
        """Bytes of a part; larger bodies take several requests. A write holds at most three parts in memory."""
        ...

    async def open(self) -> None:
        """Check that the bucket exists and may be used, and what the store supports."""
        ...

    async def close(self) -> None: ...

    async def conditional(self, beside: str) -> bool:
        """Return whether the store honors `when`.

        If it does not, `ABSENT` and versions are checked before the write, which does not protect against concurrent
        writers. If it is not known, the store is asked once, with an object next to the key `beside`.
        """
        ...

    async def head(self, key: str) -> Blob | None: ...

    async def digest(self, blob: Blob) -> Digest | None:
        """Return the digest of `blob` that the service reports, for bodies over plain HTTP, which nothing else
        protects.

        Returns None over TLS, and if the service reports none.
        """
        ...

    def read(self, key: str, offset: int = 0, length: int | None = None, *, version: str = "") -> AsyncGenerator[bytes]:
        """Yield pieces of at most 512 KiB. A broken body resumes where it broke, in the same version.

        `version` restricts the read to that version. Raises ConflictError if the object has changed.
        """
        ...

    async def write(self, key: str, chunks: AsyncIterator[bytes], size: int, *, when: str = ALWAYS) -> Blob:
        """Write a body, durably on return. `chunks` is read once.

        An error or cancellation leaves nothing behind: unfinished uploads are aborted. Raises ConflictError if `when`
        does not hold, InputError if the number of bytes differs from `size`, and StartOverError, after which a caller
        that can read `chunks` again writes again.
        """
        ...

    def list(self, prefix: str, *, after: str = "", delimiter: str = "") -> AsyncGenerator[Blob]:
        """Yield objects in order of keys. With a `delimiter`, keys that continue after it are yielded once, up to it,
        with size -1."""
        ...

    async def copy(self, source: Blob, key: str, *, when: str = ALWAYS) -> Blob:
        """Copy an object within the bucket, by the service."""
        ...

    async def delete(self, key: str, *, version: str = "") -> bool:
        """Delete a key. Returns False if it was absent. Raises ConflictError if it has another version."""
        ...

    async def sweep(self, prefix: str, older_than_s: float, *, exact: bool = False) -> int:
        """Abort unfinished uploads to keys that begin with `prefix`, or with `exact` to that key alone; return their
        number.

        `older_than_s` restricts it to uploads begun so long ago; 0 means all.
        """
        ...
