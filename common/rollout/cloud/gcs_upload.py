"""Bodies to GCS: small ones in one request, large ones through a resumable session that is driven here.

gcloud-aio-storage's `upload` is not used: after one 503 it sends the whole body again, it closes its caller's stream,
and its time-outs are of the whole transfer. Protocol: https://cloud.google.com/storage/docs/performing-resumable-uploads.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
import re
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any
from uuid import uuid4

import structlog

from rollout.cloud.bucket import StartOverError
from rollout.cloud.gcp import Gcp, Response
from rollout.cloud.gcp_errors import Access, Refused
from rollout.cloud.shielded import shielded
from rollout.config.cloud import GCS_CHUNK_UNIT
from rollout.model.errors import InputError, RolloutError, StorageUnavailableError

log = structlog.get_logger()

STAMP = "rollout-write"
"""Custom metadata, another for each write: a condition that does not hold may be due to this very write, whose answer
was lost."""
CONTENT_TYPE = "application/octet-stream"
CANCELLED = (499, 200, 204, 404, 410)
_RANGE = re.compile(r"bytes=0-(\d+)")
THREAD_BYTES = 64 * 1024
"""Hashing more than this would hold up the event loop for longer than a thread takes to be asked."""
STEP_BUDGET_S = 60.0
CANCEL_S = 10.0
SESSIONS = 3
"""A session that is lost while its first chunk is sent is begun anew: https://cloud.google.com/storage/docs/
performing-resumable-uploads#handling_errors."""


class DamagedError(StorageUnavailableError):
    """What is at the key is not what was sent. `generation`: of it."""

    def __init__(self, message: str | None = None, generation: str = "") -> None:
        super().__init__(message)
        self.generation = generation


@dataclass(frozen=True, slots=True)
class Target:
    """`url`: of uploads to the bucket. `params`: the key and the condition. `what` begins messages."""

    url: str
    params: Mapping[str, str]
    stamp: str
    what: str
    access: Access


class Chunks:
    """The caller's stream in pieces of a fixed length. InputError: it has another number of bytes than it should."""

    def __init__(self, stream: AsyncIterator[bytes], size: int, what: str) -> None:
        self._stream = stream
        self._size = size
        self._what = what
        self._seen = 0
        self._rest = memoryview(b"")

    async def take(self, length: int) -> bytearray:
        """The next `length` bytes, copied."""
        held = bytearray(length)
        at = 0
        async for piece in self.pieces(length):
            held[at : at + len(piece)] = piece
            at += len(piece)
        return held

    async def pieces(self, length: int) -> AsyncGenerator[memoryview]:
        """Of the next `length` bytes. With the last of them the stream must end."""
        left = length
        while left:
            piece = self._rest or memoryview(await self._next())
            fits = min(len(piece), left)
            left, self._rest = left - fits, piece[fits:]
            yield piece[:fits]
        if self._seen - len(self._rest) == self._size:
            if not self._rest:
                await self._end()
            if self._rest:
                raise InputError(f"{self._what}: the body has more than the {self._size} bytes it was said to have")

    async def _next(self) -> bytes:
        piece = await anext(self._stream, None)
        if piece is None:
            raise InputError(f"{self._what}: the body ends after {self._seen} of {self._size} bytes")
        self._seen += len(piece)
        return piece

    async def _end(self) -> None:
        async for piece in self._stream:
            if piece:
                self._rest = memoryview(piece)
                return


async def upload_whole(gcp: Gcp, target: Target, pieces: Sequence[memoryview]) -> dict[str, Any]:
    """One request with the metadata, the hash among it, which the service compares."""
    boundary = uuid4().hex
    meta = json.dumps({**_meta(target), "md5Hash": await _hashed(pieces)})
    head = f"--{boundary}\r\nContent-Type: application/json; charset=UTF-8\r\n\r\n{meta}\r\n"
    head += f"--{boundary}\r\nContent-Type: {CONTENT_TYPE}\r\n\r\n"
    answer = await gcp.request(
        "POST",
        target.url,
        what=target.what,
        params={"uploadType": "multipart", **target.params},
        headers={"Content-Type": f"multipart/related; boundary={boundary}"},
        data=b"".join((head.encode(), *pieces, f"\r\n--{boundary}--\r\n".encode())),
        access=target.access,
    )
    return answer.json()


async def upload_chunked(gcp: Gcp, target: Target, chunks: Chunks, size: int, chunk_bytes: int) -> dict[str, Any]:
    """The session is deleted unless it ends, also where this is cancelled. StartOverError: it was lost when part of the
    body had gone."""
    assert size and chunk_bytes % GCS_CHUNK_UNIT == 0
    sessions = _Sessions(gcp, target, size)
    try:
        await sessions.begin()
        return await _fill(sessions, chunks, size, chunk_bytes)
    except BaseException:
        await shielded(sessions.end(), CANCEL_S)
        raise


async def _fill(sessions: _Sessions, chunks: Chunks, size: int, chunk_bytes: int) -> dict[str, Any]:
    """One chunk is sent while the next is read."""
    ahead: asyncio.Task[bytearray] | None = None
    try:
        chunk = await chunks.take(min(chunk_bytes, size))
        at = 0
        while at + len(chunk) < size:
            ahead = asyncio.create_task(chunks.take(min(chunk_bytes, size - at - len(chunk))))
            await sessions.send(chunk, at)
            at += len(chunk)
            chunk = await ahead
        await sessions.send(chunk, at)
        return sessions.current.checked()
    finally:
        if ahead is not None:
            ahead.cancel()
            await asyncio.gather(ahead, return_exceptions=True)


class _Sessions:
    """Of one upload: a second one takes the place of one that was lost while nothing of the body had gone."""

    def __init__(self, gcp: Gcp, target: Target, size: int) -> None:
        self._gcp = gcp
        self._target = target
        self._size = size
        self._beginning: asyncio.Future[_Session] | None = None

    @property
    def current(self) -> _Session:
        assert self._beginning is not None
        return self._beginning.result()

    async def begin(self) -> None:
        self._beginning = asyncio.ensure_future(_Session.begin(self._gcp, self._target, self._size))
        await asyncio.shield(self._beginning)  # cancelled in between, nobody would know where it is

    async def send(self, chunk: bytearray, begin: int) -> None:
        """`chunk`: the bytes of the whole body from `begin` on. It is held by the service on return."""
        for left in reversed(range(SESSIONS)):
            try:
                await self.current.send(chunk, begin)
            except LostError as e:
                if begin or not left:
                    what = self._target.what
                    raise StartOverError(f"{what}: the upload session is gone ({e}); write it again") from e
                await self.current.cancel()
                log.debug("cloud_upload_again", key=self._target.params["name"], said=str(e))
                await self.begin()
            else:
                return

    async def end(self) -> None:
        with suppress(RolloutError):
            if self._beginning is not None and not (session := await self._beginning).finished:
                await session.cancel()


class LostError(Exception):
    """The service does not know the session any more, or answers what cannot be of it."""


class _Session:
    def __init__(self, gcp: Gcp, target: Target, uri: str, size: int) -> None:
        self._gcp = gcp
        self._target = target
        self._uri = uri
        self._size = size
        self._held = 0
        """Bytes that the service says it has."""
        self._doubt = False
        """An answer is missing: the service is asked what it has."""
        self._hash = hashlib.md5(usedforsecurity=False)
        self.finished: dict[str, Any] = {}

    @classmethod
    async def begin(cls, gcp: Gcp, target: Target, size: int) -> _Session:
        answer = await gcp.request(
            "POST",
            target.url,
            what=target.what,
            params={"uploadType": "resumable", **target.params},
            headers={"X-Upload-Content-Type": CONTENT_TYPE, "X-Upload-Content-Length": str(size)},
            json=_meta(target),
            access=target.access,
        )
        return cls(gcp, target, answer.headers["Location"], size)

    async def send(self, chunk: bytearray, begin: int) -> None:
        """`chunk`: the bytes of the whole body from `begin` on. It is held by the service on return."""
        hashed = asyncio.to_thread(self._hash_of, [chunk])
        await asyncio.gather(self._until_held(memoryview(chunk), begin), hashed)

    def _hash_of(self, chunk: list[bytearray]) -> None:
        """Emptied: a thread holds on to its arguments for a moment longer, which would be one more chunk in memory."""
        self._hash.update(chunk.pop())

    def checked(self) -> dict[str, Any]:
        """The object, once all is sent. DamagedError."""
        told = self.finished.get("md5Hash")
        if told and told != _base64(self._hash):
            raise DamagedError(
                f"{self._target.what}: the service has other bytes than those sent; try again",
                str(self.finished["generation"]),
            )
        return self.finished

    async def _until_held(self, chunk: memoryview, begin: int) -> None:
        async def step() -> None:
            await self._step(chunk, begin)

        end = begin + len(chunk)
        while self._held < end or (end == self._size and not self.finished):
            # Each step that gets on has a budget of its own.
            await self._gcp.retried(step, what=self._target.what, budget_s=STEP_BUDGET_S, access=self._target.access)

    async def _step(self, chunk: memoryview, begin: int) -> None:
        before, end = self._held, begin + len(chunk)
        try:
            if self._doubt:
                self._take(await self._put(f"bytes */{self._size}", None), end)
                self._doubt = False
            if not self.finished and self._held < end:
                if self._held < begin:
                    raise LostError(f"it has only {self._held} of {begin} bytes it had taken")
                self._doubt = True
                content_range = f"bytes {self._held}-{end - 1}/{self._size}"
                self._take(await self._put(content_range, chunk[self._held - begin :]), end)
                self._doubt = False
        except Refused as e:
            if e.status not in (404, 410):
                raise
            raise LostError(str(e)) from e
        if not self.finished and (self._held == before or self._held == self._size):
            self._doubt = True
            raise Refused(503, "", f"the upload session stays at {self._held} of {self._size} bytes")

    async def _put(self, content_range: str, data: memoryview | None) -> Response:
        headers = {"Content-Range": content_range}
        return await self._gcp.once("PUT", self._uri, headers=headers, data=data or b"", expect=(200, 201, 308))

    def _take(self, answer: Response, sent: int) -> None:
        """`sent`: no more than so many bytes of the body can have come."""
        if answer.status == 308:
            # No Range: nothing has come.
            told = answer.headers.get("Range", "")
            found = _RANGE.fullmatch(told)
            self._held = int(found[1]) + 1 if found else 0
            if (told and not found) or self._held > sent:
                raise LostError(f"it says that it has {told}, and {sent} of {self._size} bytes were sent at most")
        else:
            self.finished, self._held = answer.json(), self._size

    async def cancel(self) -> None:
        """Left alone it would end after a week."""
        what = f"{self._target.what}: the unfinished upload is not deleted"
        try:
            await self._gcp.request(
                "DELETE",
                self._uri,
                what=what,
                budget_s=CANCEL_S,
                data=b"",
                expect=CANCELLED,
                access=self._target.access,
            )
        except RolloutError as e:
            log.warning("cloud_upload_left", key=self._target.params["name"], error=str(e))


def _meta(target: Target) -> dict[str, Any]:
    return {"contentType": CONTENT_TYPE, "metadata": {STAMP: target.stamp}}


async def _hashed(pieces: Sequence[memoryview]) -> str:
    if sum(map(len, pieces)) <= THREAD_BYTES:
        return _hash_of(pieces)
    return await asyncio.to_thread(_hash_of, pieces)


def _hash_of(pieces: Sequence[memoryview]) -> str:
    digest = hashlib.md5(usedforsecurity=False)
    for piece in pieces:
        digest.update(piece)
    return _base64(digest)


def _base64(digest: Any) -> str:
    return base64.b64encode(digest.digest()).decode()
