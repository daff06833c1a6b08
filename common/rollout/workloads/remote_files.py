"""Objects of buckets as input: found by patterns, copied to this machine once, and then known by their version.

A copy can be read repeatedly, so what is submitted is what was checked, whatever happens to the object. The copies of a
run are recorded in `objects.json` next to them, so that the same command, given again, copies only what changed.
"""

from __future__ import annotations

import asyncio
import difflib
import hashlib
import json
import os
import sys
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from blake3 import blake3

from rollout.cloud.bucket import Blob, Bucket
from rollout.cloud.parallel import gathered
from rollout.cloud.url import BucketUrl, has_wildcard, parse_url
from rollout.config.cloud import CloudSection
from rollout.model.errors import (
    ConfigError,
    ConflictError,
    InputChangedError,
    InputError,
    NotFoundError,
    StorageError,
)
from rollout.workloads.buckets import BlockingBuckets, Buckets
from rollout.workloads.output import disk_errors, write_atomically
from rollout.workloads.remote_glob import matching
from rollout.workloads.spool import Tell

_RECORD = "objects.json"
AT_ONCE = 8
_RANGE = 64 << 20
_PIECE = 1 << 20
_TELL_S = 0.5
_BESIDE = 1000
_LIKE = 0.75


@dataclass(frozen=True, slots=True)
class RemoteFile:
    url: BucketUrl
    blob: Blob

    @property
    def name(self) -> str:
        return str(self.url)

    @property
    def directory(self) -> BucketUrl:
        """The directory that contains it."""
        return self.url.at(self.url.key[: self.url.key.rfind("/") + 1])


@dataclass(slots=True)
class Matches:
    """The matches of a pattern. `wild` means that it may match several objects, so those that runs write are left out.
    `fault` is what is wrong with it, or "". `runs` are directories of `files` with a run-id. `hidden` were left out
    because their name begins with a dot; one that ends with a slash includes everything below."""

    files: list[RemoteFile] = field(default_factory=list[RemoteFile])
    wild: bool = False
    fault: str = ""
    runs: set[BucketUrl] = field(default_factory=set[BucketUrl])
    hidden: list[str] = field(default_factory=list[str])


def hidden_text(hidden: Sequence[str]) -> str:
    """Return part of a sentence about what was left out, or ""."""
    if not hidden:
        return ""
    more = f" and {len(hidden) - 1:,} more" if len(hidden) > 1 else ""
    return f": hidden names are left out, {hidden[0]}{more} (a pattern takes them where it has the dot too)"


class RemoteFiles:
    """Call `find`, then `take` for what is wanted, then `close` always, and afterwards `verify`. Blocking, and not in
    the thread of an event loop.

    `directory` is that of the copies, created when needed. `tell` is that of `Buckets`.
    """

    def __init__(self, cloud: CloudSection, directory: Path, tell: Tell) -> None:
        self._cloud = cloud
        self._buckets = BlockingBuckets(cloud)
        self._directory = directory
        self._tell = tell
        self._taken: list[RemoteFile] = []
        self._told = 0.0

    def close(self) -> None:
        self._buckets.close()

    def find(self, patterns: Sequence[str], run_id: str) -> dict[str, Matches]:
        """Return matches by pattern. Faults are in `fault`, except StorageUnavailableError. `run_id` is the name of the
        object that marks the directory of a run."""

        async def all_of_them(buckets: Buckets) -> dict[str, Matches]:
            return {pattern: await self._find(buckets, pattern, run_id) for pattern in dict.fromkeys(patterns)}

        return self._buckets.run(all_of_them, self._tell)

    def take(self, files: Sequence[RemoteFile]) -> list[Path]:
        """Return a copy of each. Raises InputChangedError if it changed since it was found, StorageError or
        StorageFullError."""
        if not files:
            return []
        self._taken = list(files)
        return self._buckets.run(lambda buckets: self._take(buckets, files), self._tell)

    def verify(self, quiet: Tell = lambda _: None) -> None:
        """Check that the URLs still name what was taken. Raises InputChangedError."""
        if not self._taken:
            return
        buckets = BlockingBuckets(self._cloud)  # perhaps in another thread than before
        try:
            buckets.run(self._verify, quiet)
        finally:
            buckets.close()

    # ---- finding

    async def _find(self, buckets: Buckets, pattern: str, run_id: str) -> Matches:
        found = Matches()
        try:
            url = parse_url(pattern)
            assert url is not None
            if not url.key or url.key.endswith("/"):
                found.fault = f"{url} names no object: name its files, such as {url}*.jsonl"
                return found
            bucket = await buckets.of(url)
            found.wild = has_wildcard(url.key) and await bucket.head(url.key) is None
            if found.wild:
                hidden = set[str]()
                async with aclosing(matching(bucket, url.key, self._listed(url), hidden.add)) as blobs:
                    keys = {blob.key: blob async for blob in blobs}
                found.hidden = [str(url.at(key)) for key in sorted(hidden)]
                found.files = [RemoteFile(url.at(key), keys[key]) for key in sorted(keys)]
                for place in {file.directory for file in found.files}:
                    if await bucket.head(place.key + run_id) is not None:
                        found.runs.add(place)
            elif (blob := await bucket.head(url.key)) is not None:
                found.files = [RemoteFile(url, blob)]
            if not found.files:
                found.fault = f"no object matches {pattern!r}{hidden_text(found.hidden) or await _near(bucket, url)}"
        except (ConfigError, NotFoundError) as error:
            found.fault = error.message if pattern in error.message else f"{pattern}: {error.message}"
        return found

    def _listed(self, url: BucketUrl) -> Callable[[int], None]:
        return lambda count: self._say(f"listing {url}: {count:,} objects looked at")

    def _say(self, text: str) -> None:
        now = time.monotonic()
        if now - self._told >= _TELL_S:
            self._told = now
            self._tell(text)

    # ---- copying

    async def _take(self, buckets: Buckets, files: Sequence[RemoteFile]) -> list[Path]:
        with disk_errors(self._directory):
            self._directory.mkdir(parents=True, exist_ok=True)
        copies = _Copies(self._directory)
        wanted: list[RemoteFile] = []
        for file in files:
            if not await asyncio.to_thread(copies.has, file):
                wanted.append(file)
        progress = _Progress(len(wanted), sum(file.blob.size for file in wanted), self._say)

        async def one(file: RemoteFile) -> None:
            await self._copy(await buckets.of(file.url), file, copies, progress)

        await gathered(one, wanted, AT_ONCE)
        copies.save(files)
        return [copies.path(file) for file in files]

    async def _copy(self, bucket: Bucket, file: RemoteFile, copies: _Copies, progress: _Progress) -> None:
        part = copies.path(file).with_suffix(".part")
        try:
            await download(bucket, file.blob, part, progress.add)
        except (ConflictError, NotFoundError) as error:
            part.unlink(missing_ok=True)
            raise InputChangedError(
                f"{file.url} changed while it was copied ({error.message}): run the same command again"
            ) from error
        except BaseException:
            with suppress(OSError):
                part.unlink(missing_ok=True)
            raise
        await asyncio.to_thread(copies.keep, file, part)

    async def _verify(self, buckets: Buckets) -> None:
        async def one(file: RemoteFile) -> None:
            there = await (await buckets.of(file.url)).head(file.url.key)
            if there is None or (there.version, there.size) != (file.blob.version, file.blob.size):
                what = "was deleted" if there is None else "is another object than"
                raise InputChangedError(
                    f"{file.url} {what}{' since' if there is None else ' when'} it was checked: put it back as it was "
                    "and give the same command again, or name another output directory to start a new run"
                )

        await gathered(one, self._taken, AT_ONCE)


async def download(bucket: Bucket, blob: Blob, path: Path, came: Callable[[int], object]) -> None:
    """Download `blob` to the file `path`, durably. `came` is called with bytes as they arrive. Raises ConflictError or
    NotFoundError if it has changed, InputError if it is shorter than the service said, StorageFullError, or
    StorageError, also if it arrives damaged: its hash differs from the service's, and from that of a second read."""
    told = await bucket.digest(blob)
    await _fetch(bucket, blob, path, came)
    if told is None or (found := await asyncio.to_thread(md5_of, path, told.part_bytes)) == told.md5:
        return
    await _fetch(bucket, blob, path, lambda _: None)
    if await asyncio.to_thread(md5_of, path, told.part_bytes) not in (told.md5, found):
        raise StorageError(
            f"{bucket.url}{blob.key} comes damaged: two reads of it differ. It is read over plain HTTP: look at what "
            "is between here and the store, or use https"
        )


def md5_of(path: Path, part_bytes: int) -> str:
    """Return the hash as `Digest` does. Two equal reads are trusted, because the service's number may not be a hash."""
    parts: list[bytes] = []
    with disk_errors(path), path.open("rb") as file:
        while True:
            digest, left = hashlib.md5(usedforsecurity=False), part_bytes or sys.maxsize
            start = file.tell()
            while left and (piece := file.read(min(_PIECE, left))):
                digest.update(piece)
                left -= len(piece)
            if not part_bytes:
                return digest.hexdigest()
            if file.tell() == start:
                return hashlib.md5(b"".join(parts), usedforsecurity=False).hexdigest()
            parts.append(digest.digest())


async def _fetch(bucket: Bucket, blob: Blob, path: Path, came: Callable[[int], object]) -> None:
    with disk_errors(path):
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
    try:

        async def one(start: int) -> None:
            length, at = min(_RANGE, blob.size - start), start
            async with aclosing(bucket.read(blob.key, start, length, version=blob.version)) as pieces:
                async for piece in pieces:
                    with disk_errors(path):
                        _write(fd, piece, at)
                    at += len(piece)
                    came(len(piece))
            if at != start + length:
                raise InputError(f"{bucket.url}{blob.key} gave {at - start} of {length} bytes: run the command again")

        await gathered(one, range(0, blob.size, _RANGE), AT_ONCE // 2)
        with disk_errors(path):
            await asyncio.to_thread(os.fsync, fd)
    finally:
        os.close(fd)


def _write(fd: int, piece: bytes, at: int) -> None:
    done = 0
    while done < len(piece):
        done += os.pwrite(fd, piece[done:], at + done)


class _Progress:
    def __init__(self, files: int, size: int, say: Callable[[str], None]) -> None:
        self._text = f"copying {files} {'files' if files > 1 else 'file'} from buckets"
        self._size = size
        self._done = 0
        self._say = say

    def add(self, count: int) -> None:
        self._done += count
        self._say(f"{self._text}: {self._done / (1 << 20):,.1f} of {self._size / (1 << 20):,.1f} MiB")


class _Copies:
    """The record of copies in a directory: version, size and hash of the object, by URL."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._known = _recorded(directory / _RECORD)

    def path(self, file: RemoteFile) -> Path:
        identity = f"{file.url} {file.blob.version}"
        return self._directory / f"{blake3(identity.encode()).hexdigest(16)}.object"

    def has(self, file: RemoteFile) -> bool:
        """Return whether there is a complete copy of this version."""
        entry = self._known.get(file.name)
        if not isinstance(entry, list) or cast("list[Any]", entry)[:2] != [file.blob.version, file.blob.size]:
            return False
        with suppress(OSError):
            return content_hash(self.path(file)) == cast("list[Any]", entry)[2]
        return False

    def keep(self, file: RemoteFile, part: Path) -> None:
        with disk_errors(part):
            digest = content_hash(part)
            part.replace(self.path(file))
        self._known[file.name] = [file.blob.version, file.blob.size, digest]

    def save(self, files: Sequence[RemoteFile]) -> None:
        """Save the record of `files`, dropping all others."""
        names = {file.name for file in files}
        self._known = {name: entry for name, entry in self._known.items() if name in names}
        write_atomically(self._directory / _RECORD, json.dumps(self._known).encode())
        wanted = {self.path(file).name for file in files}
        for path in self._directory.glob("*.object"):
            if path.name not in wanted:
                with suppress(OSError):
                    path.unlink()


def content_hash(path: Path, size: int | None = None) -> str:
    """Hash a file, or its first `size` bytes. Raises OSError."""
    digest, left = blake3(), size
    with path.open("rb") as file:
        while piece := file.read(_PIECE if left is None else min(_PIECE, left)):
            digest.update(piece)
            left = None if left is None else left - len(piece)
    return digest.hexdigest()


def _recorded(path: Path) -> dict[str, Any]:
    try:
        known = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError):
        return {}
    return known if isinstance(known, dict) else {}  # pyright: ignore[reportUnknownVariableType]


async def _near(bucket: Bucket, url: BucketUrl) -> str:
    """Return the object that was probably meant."""
    if has_wildcard(url.key):
        return ": check the path"
    async for blob in _first(bucket, f"{url.key}/", 1):
        return f": it is a directory; name its files, such as {url}/*{Path(blob.key).suffix or '.jsonl'}"
    base = url.key[: url.key.rfind("/") + 1]
    names = [blob.key[len(base) :] async for blob in _first(bucket, base, _BESIDE)]
    if not names:
        return f": there is nothing below {url.at(base)}"
    near = difflib.get_close_matches(url.key[len(base) :], names, n=1, cutoff=_LIKE)
    return f"; did you mean {url.at(base + near[0])}?" if near else ": check the path"


async def _first(bucket: Bucket, prefix: str, count: int) -> AsyncIterator[Blob]:
    async with aclosing(bucket.list(prefix, delimiter="/")) as blobs:
        async for blob in blobs:
            yield blob
            count -= 1
            if not count:
                return
