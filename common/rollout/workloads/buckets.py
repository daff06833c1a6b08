"""Buckets that are named by URL, each opened once; also for code that blocks."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any, TypeVar

from rollout.cloud.bucket import Bucket
from rollout.cloud.open_bucket import open_bucket
from rollout.cloud.url import BucketUrl
from rollout.config.cloud import CloudSection

T = TypeVar("T")
_ASK_S = 0.2


class Buckets:
    """Of one event loop. `close` always."""

    def __init__(self, cloud: CloudSection) -> None:
        self._cloud = cloud
        self._opening: dict[tuple[str, str], asyncio.Task[Bucket]] = {}

    async def of(self, url: BucketUrl) -> Bucket:
        """The bucket of `url`, open. As `Bucket.open`; asked again, the same error."""
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
    """For a thread without an event loop: it brings its own, at first use. `close` always, in the same thread or, when
    no call is under way, in another."""

    def __init__(self, cloud: CloudSection) -> None:
        self._buckets = Buckets(cloud)
        self._runner: asyncio.Runner | None = None

    def run(self, work: Callable[[Buckets], Coroutine[Any, Any, T]], tell: Callable[[str], None]) -> T:
        """What `work` returns. `tell("")` is called several times a second: what it raises cancels the work, has
        waited for it, and is raised here."""
        if self._runner is None:
            self._runner = asyncio.Runner()
        return self._runner.run(_until_told(work(self._buckets), tell))

    def close(self) -> None:
        if self._runner is not None:
            with self._runner as runner, suppress(asyncio.CancelledError):
                runner.run(self._buckets.close())
            self._runner = None


async def _until_told(work: Coroutine[Any, Any, T], tell: Callable[[str], None]) -> T:
    task = asyncio.ensure_future(work)
    try:
        while not (await asyncio.wait([task], timeout=_ASK_S))[0]:
            tell("")
        return task.result()
    finally:
        if not task.done():
            task.cancel()
            await asyncio.wait([task])
            if not task.cancelled():
                task.exception()  # of what is given up: it has been asked for
