"""Write to GCS: one request, or a resumable session.

gcloud-aio-storage's `upload` is not used: after one 503 it sends the whole body again, it closes its caller's stream,
and its timeouts apply to the whole transfer. Protocol:
https://cloud.google.com/storage/docs/performing-resumable-uploads.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from functools import partial
from typing import Any, Unpack
from uuid import uuid4

import structlog

from rollout.cloud.bucket import Blob
from rollout.cloud.gcp import Gcp, Response, Sent
from rollout.cloud.gcp_errors import Access, Refused
from rollout.cloud.parts import Part
from rollout.cloud.shielded import uninterrupted
from rollout.cloud.upload import STAMP, GoneError
from rollout.config.cloud import MIB
from rollout.model.errors import RolloutError, StorageUnavailableError

log = structlog.get_logger()

WHOLE_BYTES = 8 * MIB
"""Maximum bytes of a body that is sent in one request; a session costs a further request."""
CONTENT_TYPE = "application/octet-stream"
CANCELLED = (499, 200, 204, 404, 410)
_RANGE = re.compile(r"bytes=0-(\d+)")
THREAD_BYTES = 64 * 1024
"""Bytes above which a thread hashes, because the event loop would be blocked for longer than a thread takes to
start."""
STEP_BUDGET_S = 60.0
CANCEL_S = 10.0
SESSIONS = 3
"""Number of sessions to try if one is lost while its first part is sent:
https://cloud.google.com/storage/docs/performing-resumable-uploads#handling_errors."""


class DamagedError(StorageUnavailableError):
    """The object at the key is not what was sent. `generation` is the object's."""

    def __init__(self, message: str | None = None, generation: str = "") -> None:
        super().__init__(message)
        self.generation = generation


@dataclass
class GcsUpload:
    """Upload to a bucket.

    `url` is the bucket's upload URL. `params` are the key and the condition. `what` begins messages. `look` returns
    what is at the key.
    """

    gcp: Gcp
    url: str
    params: Mapping[str, str]
    size: int
    part_bytes: int
    what: str
    access: Access
    look: Callable[[], Awaitable[dict[str, Any] | None]]
    stamp: str = field(default_factory=lambda: uuid4().hex)
    _uri: str = ""
    _held: int = 0
    """Bytes that the service says it has."""
    _doubt: bool = False
    """Whether an answer is missing, so that the service must be asked what it has."""
    _hash: Any = field(default_factory=partial(hashlib.md5, usedforsecurity=False))
    _finished: dict[str, Any] = field(default_factory=dict[str, Any])

    @property
    def whole_bytes(self) -> int:
        return min(WHOLE_BYTES, self.part_bytes)

    @property
    def parallel(self) -> int:
        return 1

    async def whole(self, pieces: list[bytes]) -> Blob:
        """Send the body with its metadata, which includes the hash that the service compares."""
        boundary = uuid4().hex
        meta = json.dumps({**self._meta(), "md5Hash": await _hashed(pieces)})
        head = f"--{boundary}\r\nContent-Type: application/json; charset=UTF-8\r\n\r\n{meta}\r\n"
        head += f"--{boundary}\r\nContent-Type: {CONTENT_TYPE}\r\n\r\n"
        body = b"".join((head.encode(), *pieces, f"\r\n--{boundary}--\r\n".encode()))
        headers = {"Content-Type": f"multipart/related; boundary={boundary}"}
        answer = await self._post("multipart", headers=headers, data=body)
        return blob_of(answer.json())

    async def begin(self) -> None:
        headers = {"X-Upload-Content-Type": CONTENT_TYPE, "X-Upload-Content-Length": str(self.size)}
        answer = await self._post("resumable", headers=headers, json=self._meta())
        self._uri, self._held, self._doubt = answer.headers["Location"], 0, False

    async def _post(self, kind: str, json: Any = None, **sent: Unpack[Sent]) -> Response:
        sent["params"] = {"uploadType": kind, **self.params}
        return await self.gcp.request("POST", self.url, what=self.what, json=json, access=self.access, **sent)

    async def send(self, part: Part) -> None:
        await asyncio.gather(self._until_held(part), asyncio.to_thread(self._hash.update, part.data))

    async def _until_held(self, part: Part) -> None:
        end, sessions = part.offset + part.length, 1
        while self._held < end or (end == self.size and not self._finished):
            try:
                # Each step that gets on has a budget of its own.
                step = partial(self._step, part.data, part.offset)
                await self.gcp.retried(step, what=self.what, budget_s=STEP_BUDGET_S, access=self.access)
            except GoneError as e:
                if part.offset or sessions == SESSIONS:
                    raise
                log.debug("cloud_upload_again", key=self.params["name"], said=str(e))
                await self.abort()
                await uninterrupted(self.begin(), CANCEL_S)
                sessions += 1

    async def _step(self, chunk: memoryview, begin: int) -> None:
        before, end = self._held, begin + len(chunk)
        try:
            if self._doubt:
                self._take(await self._put(f"bytes */{self.size}", None), end)
                self._doubt = False
            if not self._finished and self._held < end:
                if self._held < begin:
                    raise GoneError(f"{self.what}: it has only {self._held} of {begin} bytes it had taken")
                self._doubt = True
                content_range = f"bytes {self._held}-{end - 1}/{self.size}"
                self._take(await self._put(content_range, chunk[self._held - begin :]), end)
                self._doubt = False
        except Refused as e:
            if e.status not in (404, 410):
                raise
            raise GoneError(f"{self.what}: {e}") from e
        if not self._finished and (self._held == before or self._held == self.size):
            self._doubt = True
            raise Refused(503, "", f"the upload session stays at {self._held} of {self.size} bytes")

    async def _put(self, content_range: str, data: memoryview | None) -> Response:
        headers = {"Content-Range": content_range}
        return await self.gcp.once("PUT", self._uri, headers=headers, data=data or b"", expect=(200, 201, 308))

    def _take(self, answer: Response, sent: int) -> None:
        """Record an answer; at most `sent` bytes of the body can have arrived."""
        if answer.status == 308:
            # No Range: nothing has come.
            told = answer.headers.get("Range", "")
            found = _RANGE.fullmatch(told)
            self._held = int(found[1]) + 1 if found else 0
            if (told and not found) or self._held > sent:
                raise GoneError(f"{self.what}: it says that it has {told}, and {sent} bytes were sent at most")
        else:
            self._finished, self._held = answer.json(), self.size

    async def complete(self) -> Blob:
        """Complete the upload. Raises DamagedError."""
        told = self._finished.get("md5Hash")
        if told and told != _base64(self._hash):
            said = f"{self.what}: the service has other bytes than those sent; try again"
            raise DamagedError(said, str(self._finished["generation"]))
        return blob_of(self._finished)

    async def abort(self) -> None:
        """Abort the session, which would otherwise end after a week."""
        if not self._uri or self._finished:
            return
        what = f"{self.what}: the unfinished upload is not deleted"
        try:
            await self.gcp.request(
                "DELETE", self._uri, what=what, budget_s=CANCEL_S, data=b"", expect=CANCELLED, access=self.access
            )
        except RolloutError as e:
            log.warning("cloud_upload_left", key=self.params["name"], error=str(e))

    async def written(self) -> Blob | None:
        found = await self.look()
        ours = found is not None and found.get("metadata", {}).get(STAMP) == self.stamp
        return blob_of(found) if found is not None and ours else None

    def _meta(self) -> dict[str, Any]:
        return {"contentType": CONTENT_TYPE, "metadata": {STAMP: self.stamp}}


def blob_of(found: dict[str, Any]) -> Blob:
    """Return the blob of an object's resource."""
    made = datetime.fromisoformat(found["timeCreated"]).timestamp()
    return Blob(found["name"], int(found["size"]), str(found["generation"]), int(made * 1000))


async def _hashed(pieces: Sequence[bytes]) -> str:
    if sum(map(len, pieces)) <= THREAD_BYTES:
        return _hash_of(pieces)
    return await asyncio.to_thread(_hash_of, pieces)


def _hash_of(pieces: Sequence[bytes]) -> str:
    digest = hashlib.md5(usedforsecurity=False)
    for piece in pieces:
        digest.update(piece)
    return _base64(digest)


def _base64(digest: Any) -> str:
    return base64.b64encode(digest.digest()).decode()
