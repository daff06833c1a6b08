"""One run at a time writes to a place in a bucket: an object that says who, renewed for as long as that goes on.

It is made where there is none, and renewed on the condition that it is still the one that was written last: its body
holds a counter, so that each renewal is another version. A holder that is gone renews it no more, and after its
lifetime another takes it over. A store without conditional writes cannot keep two commands apart that begin in the same
moment; `note` says so.
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
"""So long another's lock that looks old is looked at: its holder may still renew it in that time."""
_RELEASE_S = 10.0
_BODY_MAX = 64 << 10
_CLOCK: int = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)
"""On macOS the other one goes on as well."""


class BucketLock:
    """`take`, `check` before each write that it guards, `release` always.

    `token`: of the directory on this machine that the caller has locked for itself: a lock with the same one was left
    by a command that is gone. `command`: for the person whose other command is refused.
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
        """Why it is another's by now, for good; empty: it is not, as far as is known."""
        self._renewing: asyncio.Task[None] | None = None

    @property
    def url(self) -> str:
        return f"{self._bucket.url}{self._key}"

    @property
    def held(self) -> bool:
        return self._blob is not None

    async def take(self, tell: Callable[[str], None]) -> None:
        """StateError: another command has it. `tell` hears what is waited for."""
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
        """StateError: nothing may be written: it is not held any more, or for now nobody knows whether it is."""
        if self.lost or self._blob is None:
            raise StateError(self.lost or f"{self.url} is not held")
        if _now() - self._renewed > LIFETIME_S:
            raise StateError(f"{self.url} could not be renewed for {LIFETIME_S:.0f} s")

    async def release(self) -> str:
        """What is left to be told; empty: nothing."""
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
        """Returns when the holder of the lock is gone. StateError: it is not."""
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
        """Whether what is there is a renewal of ours whose answer was lost: it is renewed from there on."""
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
    """Seconds, those included in which the machine was asleep: others go on meanwhile."""
    return time.clock_gettime(_CLOCK)


def _named(holder: dict[str, Any]) -> str:
    pid, host, command = (holder.get(key, "") for key in ("pid", "host", "command"))
    return f"pid {pid} on {host}{f' ({command})' if command else ''}" if host else "which left no name"
