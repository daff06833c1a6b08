"""Copies a directory in a bucket, such as a model, to this machine, once, and again only if one of its objects changes.

The copy stays in the account's cache, by URL and by the versions of its content; it may be deleted when nothing runs.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Generator
from contextlib import aclosing, contextmanager
from pathlib import Path

from blake3 import blake3

from rollout.cloud.bucket import Blob
from rollout.cloud.parallel import gathered
from rollout.cloud.url import BucketUrl, has_wildcard, parse_url
from rollout.config.cloud import CloudSection
from rollout.files import try_lock
from rollout.model.errors import ConfigError, ConflictError, InputChangedError, NotFoundError
from rollout.workloads.buckets import BlockingBuckets, Buckets
from rollout.workloads.output import disk_errors
from rollout.workloads.remote_files import AT_ONCE, download
from rollout.workloads.spool import Tell
from rollout.workloads.staging import cache_home

_TELL_S = 0.5
_LOOK_S = 0.2


def bring_directory(text: str, what: str, cloud: CloudSection, tell: Tell) -> Path | None:
    """Return the local copy of a URL, or None if `text` is not a URL. `what` is its key in messages. Blocking, and not
    in the thread of an event loop.

    Raises ConfigError if there is no such bucket, content or permission, InputChangedError if it changed meanwhile, or
    StorageUnavailableError, StorageError or StorageFullError.
    """
    try:
        url = parse_url(text)
        if url is None:
            return None
        if has_wildcard(url.key) or not url.key.strip("/"):
            raise ConfigError(f"{text}: name one directory of the bucket, such as {url.at('models/mine')}")
        buckets = BlockingBuckets(cloud)
        try:
            return buckets.run(lambda opened: _bring(opened, url.directory, tell), tell)
        finally:
            buckets.close()
    except (ConfigError, NotFoundError) as error:
        raise ConfigError(f"{what}: {error.message}") from error


async def _bring(buckets: Buckets, url: BucketUrl, tell: Tell) -> Path:
    bucket = await buckets.of(url)
    files: list[tuple[str, Blob]] = []
    no_files: list[str] = []
    async with aclosing(bucket.list(url.key)) as blobs:
        async for blob in blobs:
            name = blob.key[len(url.key) :]
            parts = name.split("/")
            if blob.size == 0 and blob.key.endswith("/"):
                continue  # how some tools show a directory
            if any(part in ("", ".", "..") for part in parts):
                no_files.append(str(url.at(blob.key)))
            elif not any(part.startswith(".") for part in parts):  # hidden files are no part of it
                files.append((name, blob))
    if no_files:
        more = f" and {len(no_files) - 1:,} more" if len(no_files) > 1 else ""
        raise ConfigError(
            f"{no_files[0]}{more} cannot be a file of a directory: rename what has an empty name, . or .. in its key"
        )
    if not files:
        raise ConfigError(f"there is nothing below {url}: name the directory that holds the files")
    about = "".join(f"{name}\0{blob.version}\0{blob.size}\n" for name, blob in files)
    place = cache_home() / "buckets" / blake3(str(url).encode()).hexdigest(8) / blake3(about.encode()).hexdigest(8)
    directory = place / url.name
    if directory.is_dir():
        return directory
    with disk_errors(place):
        place.mkdir(parents=True, exist_ok=True)
    with (place / ".lock").open("w") as lock:
        with disk_errors(place):
            await _locked(lock.fileno(), url, tell)
        if not directory.is_dir():
            part = place / f".{url.name}.part"
            await _download(buckets, url, files, part, tell)
            with disk_errors(directory):
                part.rename(directory)
    return directory


async def _locked(fd: int, url: BucketUrl, tell: Tell) -> None:
    """Lock the copy, so that two commands do not both download it."""
    while not try_lock(fd):
        tell(f"waiting for another command, which brings {url}")
        await asyncio.sleep(_LOOK_S)


async def _download(buckets: Buckets, url: BucketUrl, files: list[tuple[str, Blob]], part: Path, tell: Tell) -> None:
    """Download the files. Complete files of a command that was stopped are kept."""
    bucket = await buckets.of(url)
    size, done, told = sum(blob.size for _, blob in files), 0, 0.0

    def came(count: int) -> None:
        nonlocal done, told
        done += count
        if time.monotonic() - told >= _TELL_S:
            told = time.monotonic()
            tell(f"copying {url}: {done / (1 << 20):,.1f} of {size / (1 << 20):,.1f} MiB")

    async def one(file: tuple[str, Blob]) -> None:
        name, blob = file
        path = part / name
        if path.is_file() and path.stat().st_size == blob.size:
            came(blob.size)
            return
        with disk_errors(path):
            path.parent.mkdir(parents=True, exist_ok=True)
        scratch = path.with_name(f".{path.name}.part")
        with _gone_unless_whole(scratch, url):
            await download(bucket, blob, scratch, came)
            with disk_errors(path):
                scratch.replace(path)

    await gathered(one, files, AT_ONCE)


@contextmanager
def _gone_unless_whole(scratch: Path, url: BucketUrl) -> Generator[None]:
    try:
        yield
    except (ConflictError, NotFoundError) as error:
        raise InputChangedError(
            f"{url} changed while it was copied ({error.message}): run the same command again"
        ) from error
    finally:
        if os.path.lexists(scratch):
            scratch.unlink()
