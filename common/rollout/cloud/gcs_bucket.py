"""A bucket of Google Cloud Storage, through the JSON API: https://cloud.google.com/storage/docs/json_api/v1."""

from __future__ import annotations

import base64
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import AsyncExitStack, suppress
from functools import partial
from typing import Any
from urllib.parse import quote

from rollout.cloud.bucket import ABSENT, ALWAYS, Blob, Digest
from rollout.cloud.download import PIECE, Body, download, reached
from rollout.cloud.gcp import Gcp
from rollout.cloud.gcp_errors import Access, classify
from rollout.cloud.gcs_upload import DamagedError, GcsUpload, blob_of
from rollout.cloud.upload import upload
from rollout.config.cloud import GcsSection
from rollout.model.errors import ConfigError, ConflictError, NotFoundError, StorageError

PAGE = 1000
ROLE = "roles/storage.objectAdmin"
READER = "roles/storage.objectViewer"


class GcsBucket:
    """Bucket of Google Cloud Storage. It closes `gcp`."""

    def __init__(self, gcp: Gcp, name: str, section: GcsSection) -> None:
        self._gcp = gcp
        self._name = name
        self._chunk_bytes = section.resumable_chunk_bytes
        self._key = "[cloud.gcs] bucket" if section.bucket == name else self.url
        self._api = f"{gcp.endpoint('storage')}/storage/v1/b/{quote(name, safe='')}"
        self._uploads = f"{gcp.endpoint('storage')}/upload/storage/v1/b/{quote(name, safe='')}/o"

    @property
    def url(self) -> str:
        return f"gs://{self._name}/"

    @property
    def part_bytes(self) -> int:
        return self._chunk_bytes

    async def open(self) -> None:
        """Check the bucket by listing one object, because no role for objects includes `storage.buckets.get`."""
        await self._page({"maxResults": "1"})

    async def close(self) -> None:
        await self._gcp.close()

    async def conditional(self, beside: str) -> bool:
        return True

    async def head(self, key: str) -> Blob | None:
        found = await self._resource(key)
        return None if found is None else blob_of(found)

    async def digest(self, blob: Blob) -> Digest | None:
        """Return the digest; None also for a composite object."""
        if not self._api.startswith("http://"):
            return None
        found = await self._resource(blob.key)
        told = str(found.get("md5Hash", "")) if found and str(found["generation"]) == blob.version else ""
        return Digest(base64.b64decode(told).hex()) if told else None

    def read(self, key: str, offset: int = 0, length: int | None = None, *, version: str = "") -> AsyncGenerator[bytes]:
        return download(f"{self.url}{key}", partial(self._opened, key), classify, offset, length, version)

    async def _opened(self, key: str, at: int, end: int | None, version: str) -> Body | None:
        params = {"alt": "media"} | ({"generation": version} if version else {})
        # Stored gzip is sent as it is stored: unpacked, it has no ranges.
        headers = {"Accept-Encoding": "gzip"}
        if at or end is not None:
            headers["Range"] = f"bytes={at}-{'' if end is None else end - 1}"
        what = f"{self.url}{key} cannot be read"

        async def attempt() -> Body | None:
            stack = AsyncExitStack()
            answer = await stack.enter_async_context(
                self._gcp.stream("GET", self._object(key), params=params, headers=headers, expect=(200, 206, 416))
            )
            if answer.status == 416:
                await stack.aclose()
                return None
            told = answer.headers
            length = int(told.get("Content-Length", "-1"))
            if length < 0:
                await stack.aclose()
                raise StorageError(f"{what}: the answer does not say how long it is")
            body = Body(stack, partial(answer.content.read, PIECE), told.get("X-Goog-Generation", ""), length)
            return await reached(f"{self.url}{key}", body, at, told.get("Content-Range", ""))

        try:
            return await self._gcp.retried(attempt, what=what, access=self._access("get", READER))
        except NotFoundError as e:
            raise await self._not_there(key, changed=bool(version)) from e

    async def write(self, key: str, chunks: AsyncIterator[bytes], size: int, *, when: str = ALWAYS) -> Blob:
        what = f"{self.url}{key} cannot be written"
        params = {"name": key} | _condition(when, "ifGenerationMatch")
        access, look = self._bucket_access(_writing(when)), partial(self._resource, key)
        target = GcsUpload(self._gcp, self._uploads, params, size, self._chunk_bytes, what, access, look)
        try:
            blob = await upload(target, chunks, size)
        except DamagedError as e:
            with suppress(ConflictError):  # it has been written over
                await self.delete(key, version=e.generation)
            raise
        if blob.size != size:
            raise StorageError(f"{what}: {size} bytes were sent, but it has {blob.size}")
        return blob

    async def list(self, prefix: str, *, after: str = "", delimiter: str = "") -> AsyncGenerator[Blob]:
        params = {"prefix": prefix, "startOffset": after, "delimiter": delimiter, "maxResults": str(PAGE)}
        params = {name: value for name, value in params.items() if value}
        while True:
            page = await self._page(params)
            found = [blob_of(item) for item in page.get("items", ())]
            found += [Blob(name, -1, "", 0) for name in page.get("prefixes", ())]
            for blob in sorted(found, key=lambda blob: blob.key.encode()):
                if blob.key != after:  # startOffset is the first that is given
                    yield blob
            if not page.get("nextPageToken"):
                return
            params["pageToken"] = page["nextPageToken"]

    async def copy(self, source: Blob, key: str, *, when: str = ALWAYS) -> Blob:
        """Copy an object. A large one between storage classes takes several calls, each with its own budget."""
        url = f"{self._object(source.key)}/rewriteTo/b/{quote(self._name, safe='')}/o/{quote(key, safe='')}"
        params = {"sourceGeneration": source.version} | _condition(when, "ifGenerationMatch")
        what = f"{self.url}{source.key} cannot be copied to {self.url}{key}"
        while True:
            try:
                answer = await self._gcp.request(
                    "POST", url, what=what, params=params, data=b"", access=self._access("create")
                )
            except NotFoundError as e:
                raise await self._not_there(source.key, changed=True) from e
            found = answer.json()
            if found.get("done", True):
                return blob_of(found["resource"])
            params["rewriteToken"] = found["rewriteToken"]

    async def delete(self, key: str, *, version: str = "") -> bool:
        answer = await self._gcp.request(
            "DELETE",
            self._object(key),
            what=f"{self.url}{key} cannot be deleted",
            params=_condition(version or ALWAYS, "ifGenerationMatch"),
            expect=(200, 204, 404),
            access=self._access("delete"),
        )
        return answer.status != 404

    async def sweep(self, prefix: str, older_than_s: float, *, exact: bool = False) -> int:
        """Do nothing: GCS ends sessions after a week by itself and cannot list them."""
        return 0

    def _object(self, key: str) -> str:
        return f"{self._api}/o/{quote(key, safe='')}"

    async def _page(self, params: dict[str, str]) -> dict[str, Any]:
        answer = await self._gcp.request(
            "GET",
            f"{self._api}/o",
            what=f"{self.url} cannot be listed",
            params=params,
            access=self._bucket_access("list", READER),
        )
        return answer.json()

    async def _resource(self, key: str) -> dict[str, Any] | None:
        answer = await self._gcp.request(
            "GET",
            self._object(key),
            what=f"{self.url}{key} cannot be looked up",
            expect=(200, 404),
            access=self._access("get", READER),
        )
        if answer.status == 200:
            return answer.json()
        if b"bucket does not exist" in answer.body:
            raise ConfigError(f"{self.url}{key} cannot be looked up: {self._no_bucket}")
        return None

    async def _not_there(self, key: str, *, changed: bool) -> Exception:
        """Return the error for a missing object; `changed` says that the requested version may have been replaced."""
        if await self._resource(key) is None or not changed:
            return NotFoundError(f"{self.url}{key} is not there")
        return ConflictError(f"{self.url}{key} has become another object")

    def _access(self, verb: str, role: str = ROLE) -> Access:
        return Access(f"storage.objects.{verb}", role, self._key)

    def _bucket_access(self, verb: str, role: str = ROLE) -> Access:
        """Return the access of a call without an object; a 404 then concerns the bucket."""
        return Access(f"storage.objects.{verb}", role, self._key, missing=self._no_bucket)

    @property
    def _no_bucket(self) -> str:
        return f"there is no bucket {self._name}, or these credentials may not see it: check {self._key}"


def _writing(when: str) -> str:
    """Return the permission to write; replacing an object takes the permission to delete it."""
    return "create" if when == ABSENT else "create, and to write over one storage.objects.delete"


def _condition(when: str, name: str) -> dict[str, str]:
    return {} if when == ALWAYS else {name: "0" if when == ABSENT else when}
