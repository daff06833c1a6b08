"""A lock on a place in a bucket, so that one run at a time writes there: an object that names the holder, and that the
holder renews.

It is created if there is none, and renewed on the condition that it is still the version written last: its body has a
counter, so that each renewal is another version. A holder that is gone no longer renews it, and after its lifetime
another takes it over. A store without conditional writes cannot separate two commands that start in the same moment;
`note` says so.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import time
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing, suppress
from typing import Any, cast

from rollout.cloud.bucket import ABSENT, Blob, Bucket
from rollout.model.errors import ConflictError, NotFoundError, RolloutError, StateError

NAME = ".rollout-lock"
LIFETIME_S = 60.0
_RENEW_S = 20.0
_WATCH_S = LIFETIME_S
"""How long another's seemingly expired lock is watched: its holder may still renew it in that time."""
_RELEASE_S = 10.0
_BODY_MAX = 64 << 10
_CLOCK: int = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)
"""On macOS the other clock counts sleep, too."""


class BucketLock:
    """Call `take`, `check` before each guarded write, and `release` always.

    `token` is that of the local directory that the caller has locked: a lock with the same token was left by a command
    that is gone. `command` is shown to the user of a refused command.
    """

    def __init__(self, bucket: Bucket, key: str, token: str, command: str) -> None:
        self._bucket = bucket
        self._key = key
        self._token = token
        self._command = command
        self._counter = 0
        self._blob: Blob | None = None
        self._renewed = 0.0
        self.lost = ""
        """Why the lock is lost for good, or "" as far as is known."""
        self._renewing: asyncio.Task[None] | None = None

    @property
    def url(self) -> str:
        return f"{self._bucket.url}{self._key}"

    @property
    def held(self) -> bool:
        return self._blob is not None

    async def take(self, tell: Callable[[str], None]) -> None:
        """Take the lock. Raises StateError if another command has it. `tell` reports what is waited for."""
        while True:
            there = await self._bucket.head(self._key)
            if there is not None:
                await self._outlive(there, tell)
            writing = asyncio.ensure_future(self._write(ABSENT if there is None else there.version))
            try:
                await asyncio.shield(writing)
            except ConflictError:
                continue  # somebody was faster: look who
            except asyncio.CancelledError:
                await asyncio.wait([writing], timeout=_RELEASE_S)  # or it would be left behind
                writing.cancel()
                await asyncio.gather(writing, return_exceptions=True)
                raise
            break
        self._renewing = asyncio.ensure_future(self._keep_renewing())

    def check(self) -> None:
        """Raise StateError if nothing may be written, because the lock is lost or its state is unknown."""
        if self.lost or self._blob is None:
            raise StateError(self.lost or f"{self.url} is not held")
        if _now() - self._renewed > LIFETIME_S:
            raise StateError(f"{self.url} could not be renewed for {LIFETIME_S:.0f} s")

    async def release(self) -> str:
        """Release the lock, and return a remark for the user, or ""."""
        if self._renewing is not None:
            self._renewing.cancel()
            await asyncio.gather(self._renewing, return_exceptions=True)
            self._renewing = None
        blob, self._blob = self._blob, None
        if blob is None or self.lost:
            return ""
        try:
            async with asyncio.timeout(_RELEASE_S):
                await self._bucket.delete(self._key, version=blob.version)
        except (ConflictError, NotFoundError):
            return ""  # another's by now
        except (RolloutError, TimeoutError):
            return f"{self.url} could not be deleted: it counts for {LIFETIME_S:.0f} s more, or delete it"
        return ""

    async def _outlive(self, there: Blob, tell: Callable[[str], None]) -> None:
        """Wait until the holder of the lock is gone. Raises StateError if it is not."""
        holder = await self._holder(there)
        if holder.get("token") == self._token:
            return
        age_s = time.time() - there.modified_ms / 1000
        if age_s >= LIFETIME_S:
            # Clocks differ: it is looked at for as long as a holder would leave it as it is.
            tell(f"waiting to see whether {_named(holder)} still writes to {self._bucket.url}{self._key}")
            until = time.monotonic() + _WATCH_S
            while (now := await self._bucket.head(self._key)) is not None and now.version == there.version:
                if time.monotonic() > until:
                    return
                await asyncio.sleep(_RENEW_S / 20)
            if now is None:
                return
        raise StateError(
            f"output.dir: {self.url.removesuffix(NAME)} is being written by another command, {_named(holder)}: wait "
            f"for it, stop it, or name another place. If it is gone, its lock {self.url} counts for "
            f"{LIFETIME_S:.0f} s after it was renewed last"
        )

    async def _holder(self, there: Blob) -> dict[str, Any]:
        body = b""
        with suppress(ConflictError, NotFoundError):
            length = min(there.size, _BODY_MAX)
            async with aclosing(self._bucket.read(self._key, 0, length, version=there.version)) as pieces:
                async for piece in pieces:
                    body += piece
        with suppress(ValueError):
            found: Any = json.loads(body)
            if isinstance(found, dict):
                return cast("dict[str, Any]", found)
        return {}

    async def _keep_renewing(self) -> None:
        while True:
            await asyncio.sleep(_RENEW_S)
            assert self._blob is not None
            try:
                await self._write(self._blob.version)
            except (ConflictError, NotFoundError):
                with suppress(RolloutError):
                    if not await self._is_ours():
                        self.lost = f"{self.url} was taken over or deleted by another command"
                        return
            except RolloutError:
                continue  # `check` says when it was too long

    async def _is_ours(self) -> bool:
        """Return whether the object is a renewal of ours whose answer was lost; renewals then continue from it."""
        there = await self._bucket.head(self._key)
        if there is None or (await self._holder(there)).get("token") != self._token:
            return False
        self._blob = there
        return True

    async def _write(self, when: str) -> None:
        self._counter += 1
        body = json.dumps(
            {
                "host": socket.gethostname(),
                "pid": os.getpid(),
                "command": self._command,
                "token": self._token,
                "lifetime_s": LIFETIME_S,
                "counter": self._counter,
            }
        ).encode()

        async def chunks() -> AsyncIterator[bytes]:
            yield body

        began = _now()
        self._blob = await self._bucket.write(self._key, chunks(), len(body), when=when)
        self._renewed = began


def _now() -> float:
    """Return seconds, including those in which the machine was asleep."""
    return time.clock_gettime(_CLOCK)


def _named(holder: dict[str, Any]) -> str:
    pid, host, command = (holder.get(key, "") for key in ("pid", "host", "command"))
    return f"pid {pid} on {host}{f' ({command})' if command else ''}" if host else "which left no name"
