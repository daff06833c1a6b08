"""Opens each bucket once by URL, also for blocking code."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any, TypeVar

from rollout.cloud.bucket import Bucket
from rollout.cloud.open_bucket import open_bucket
from rollout.cloud.url import BucketUrl
from rollout.config.cloud import CloudSection

T = TypeVar("T")
_ASK_S = 0.2
SILENT_S = 10.0
"""After this time the user is told that a bucket does not respond; retries continue for minutes."""


class Buckets:
    """The open buckets of an event loop. Always call `close`."""

    def __init__(self, cloud: CloudSection) -> None:
        self._cloud = cloud
        self._opening: dict[tuple[str, str], asyncio.Task[Bucket]] = {}

    @property
    def silent(self) -> str:
        """Buckets that were requested and are not open yet, or ""."""
        return ", ".join(f"{scheme}://{name}/" for (scheme, name), task in self._opening.items() if not task.done())

    async def of(self, url: BucketUrl) -> Bucket:
        """Return the open bucket of `url`. Raises the errors of `Bucket.open`, and the same again for further calls."""
        name = (url.scheme, url.bucket)
        opening = self._opening.get(name)
        if opening is None:
            opening = self._opening[name] = asyncio.ensure_future(self._open(url))
        return await asyncio.shield(opening)

    async def _open(self, url: BucketUrl) -> Bucket:
        bucket = open_bucket(self._cloud, url.scheme, url.bucket)
        try:
            await bucket.open()
        except BaseException:
            await bucket.close()
            raise
        return bucket

    async def close(self) -> None:
        for opening in self._opening.values():
            opening.cancel()
        for bucket in await asyncio.gather(*self._opening.values(), return_exceptions=True):
            if not isinstance(bucket, BaseException):
                await bucket.close()
        self._opening.clear()


class BlockingBuckets:
    """Buckets for a thread without an event loop: it starts one at first use. Always call `close`, in the same thread
    or, if no call is running, in another."""

    def __init__(self, cloud: CloudSection) -> None:
        self._buckets = Buckets(cloud)
        self._runner: asyncio.Runner | None = None

    def run(self, work: Callable[[Buckets], Coroutine[Any, Any, T]], tell: Callable[[str], None]) -> T:
        """Run `work` and return its result. `tell("")` is called several times a second; an exception of it cancels the
        work, waits for it, and is raised here. `tell` also reports a bucket that does not respond."""
        if self._runner is None:
            self._runner = asyncio.Runner()
        return self._runner.run(_until_told(work(self._buckets), self._buckets, tell))

    def close(self) -> None:
        if self._runner is not None:
            with self._runner as runner, suppress(asyncio.CancelledError):
                runner.run(self._buckets.close())
            self._runner = None


async def _until_told(work: Coroutine[Any, Any, T], buckets: Buckets, tell: Callable[[str], None]) -> T:
    task = asyncio.ensure_future(work)
    clock = asyncio.get_running_loop().time
    until = clock() + SILENT_S
    try:
        while not (await asyncio.wait([task], timeout=_ASK_S))[0]:
            silent = buckets.silent if clock() > until else ""
            tell(f"waiting for {silent}: no answer yet, trying for up to three minutes" if silent else "")
            if silent:
                until = math.inf
        return task.result()
    finally:
        if not task.done():
            task.cancel()
            await asyncio.wait([task])
            if not task.cancelled():
                task.exception()  # of what is given up: it has been asked for
