"""A client of image registries: what is needed to fetch one, with its digests checked.

https://github.com/opencontainers/distribution-spec/blob/main/spec.md; tokens:
https://distribution.github.io/distribution/spec/auth/token/.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import hashlib
import ipaddress
import json
import os
import platform
import re
from collections.abc import AsyncGenerator, Mapping
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, cast
from urllib.parse import urlsplit

from tenacity import AsyncRetrying, retry_if_exception, stop_after_attempt
from tenacity.wait import wait_base, wait_exponential, wait_random

from rollout_worker.sandboxes.errors import ImageError, ImageNotFoundError, ImagePullError
from rollout_worker.sandboxes.images.reference import Reference

if TYPE_CHECKING:
    import aiohttp

_INDEXES = ("application/vnd.oci.image.index.v1+json", "application/vnd.docker.distribution.manifest.list.v2+json")
_MANIFESTS = ("application/vnd.oci.image.manifest.v1+json", "application/vnd.docker.distribution.manifest.v2+json")
_MACHINES = {"x86_64": "amd64", "aarch64": "arm64", "armv7l": "arm", "i686": "386"}
_CHALLENGE = re.compile(r'(\w+)="([^"]*)"')
_DOCUMENT_BYTES = 8 << 20
_CHUNK = 1 << 18
_TRIES = 4
_CONNECT_S, _SILENCE_S = 10.0, 60.0
_LONGEST_WAIT_S = 30.0


class RegistryUnreachableError(ImagePullError):
    """The registry does not answer."""

    code = "registry_unreachable"


class Registry:
    """One repository of a registry, for as long as it is open (`async with`)."""

    def __init__(self, reference: Reference) -> None:
        self._reference = reference
        host = "registry-1.docker.io" if reference.registry == "docker.io" else reference.registry
        self._base = f"{'http' if _is_here(host) else 'https'}://{host}/v2/{reference.repository}"
        self._token: str | None = None
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        try:
            import aiohttp
        except ImportError as error:
            raise RegistryUnreachableError(
                "images are fetched with aiohttp, which is not here: pip install 'rollout-engine[sandboxes]'"
            ) from error
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_S, sock_read=_SILENCE_S)
        self._session = aiohttp.ClientSession(timeout=timeout, trust_env=True, auto_decompress=False)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._session is not None:
            await self._session.close()

    async def manifest(self) -> tuple[str, dict[str, Any]]:
        """(digest, manifest) for this machine; of an index, the one that fits. ImagePullError."""
        version = self._reference.version
        for _ in range(3):  # an index may lead to an index
            digest, found = await self._document(f"/manifests/{version}", (*_MANIFESTS, *_INDEXES), version)
            if "manifests" not in found:
                if not isinstance(found.get("layers"), list) or "config" not in found:
                    raise ImagePullError(f"{self._reference} is not an image with layers, or of an old format")
                return digest, found
            version = self._fitting(found["manifests"])
        raise ImagePullError(f"{self._reference}: its indexes do not end")

    def _fitting(self, entries: list[dict[str, Any]]) -> str:
        machine = _MACHINES.get(platform.machine(), platform.machine())
        there: list[str] = []
        for entry in entries:
            where: dict[str, Any] = entry.get("platform") or {}
            there.append(f"{where.get('os')}/{where.get('architecture')}")
            if (where.get("os"), where.get("architecture")) == ("linux", machine):
                return str(entry["digest"])
        raise ImageNotFoundError(
            f"{self._reference} has no image for linux/{machine}, only for {', '.join(sorted(set(there)))}"
        )

    async def config(self, manifest: Mapping[str, Any]) -> dict[str, Any]:
        """The image's configuration: Env, WorkingDir, User."""
        digest = str(manifest["config"]["digest"])
        _, found = await self._document(f"/blobs/{digest}", ("*/*",), digest)
        return found.get("config") or {}

    async def _document(self, path: str, accepted: tuple[str, ...], version: str) -> tuple[str, dict[str, Any]]:
        async for attempt in self._tries():
            with attempt:
                async with self._get(path, {"Accept": ", ".join(accepted)}) as answer:
                    data = await answer.content.read(_DOCUMENT_BYTES)
                    while not answer.content.at_eof() and len(data) < _DOCUMENT_BYTES:
                        data += await answer.content.read(_DOCUMENT_BYTES - len(data))
                digest = f"sha256:{hashlib.sha256(data).hexdigest()}"
                if version.startswith("sha256:") and digest != version:
                    raise ImagePullError(f"{self._reference}: what came is not {version}: it was cut off or changed")
                try:
                    found: Any = json.loads(data)
                    return digest, dict(found)
                except (ValueError, TypeError) as error:
                    raise ImagePullError(f"{self._reference}: {path} is no JSON object: {error}") from error
        raise AssertionError

    async def blob(self, digest: str, size: int, target: Path) -> None:
        """Fetch a layer to `target`, whole and as its digest says. ImagePullError; ImageError: no room."""
        async for attempt in self._tries():
            with attempt:
                await self._blob_once(digest, size, target)

    async def _blob_once(self, digest: str, size: int, target: Path) -> None:
        total = hashlib.sha256()
        got = 0
        async with self._get(f"/blobs/{digest}", {}) as answer:
            with target.open("wb") as file:
                async for piece in answer.content.iter_chunked(_CHUNK):
                    got += len(piece)
                    if got > size:
                        break
                    total.update(piece)
                    try:
                        await asyncio.to_thread(file.write, piece)
                    except OSError as error:
                        raise _disk_fault(error, target) from error
        if got != size or f"sha256:{total.hexdigest()}" != digest:
            how = f"{got} of {size} bytes" if got != size else "its digest is another"
            raise ImagePullError(f"{self._reference}: layer {digest[:19]} came damaged: {how}")

    # Asking

    def _tries(self) -> AsyncRetrying:
        return AsyncRetrying(
            stop=stop_after_attempt(_TRIES),
            wait=_Asked(),
            retry=retry_if_exception(lambda e: isinstance(e, ImagePullError) and e.context.get("again", e.retryable)),
            reraise=True,
        )

    @contextlib.asynccontextmanager
    async def _get(self, path: str, headers: Mapping[str, str]) -> AsyncGenerator[aiohttp.ClientResponse]:
        import aiohttp

        assert self._session is not None
        try:
            for last in (False, True):
                sent = {**headers, **({"Authorization": self._token} if self._token else {})}
                async with self._session.get(self._base + path, headers=sent) as answer:
                    if answer.status == 401 and not last:
                        self._token = await self._authorize(answer.headers.get("WWW-Authenticate", ""))
                        continue
                    await self._check(answer)
                    yield answer
                    return
        except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as error:
            raise RegistryUnreachableError(
                f"the registry {self._reference.registry} cannot be reached: {error}", again=False
            ) from error
        except (aiohttp.ClientError, TimeoutError, ConnectionError) as error:
            raise ImagePullError(
                f"{self._reference}: the connection to {self._reference.registry} broke: {error or 'no answer'}"
            ) from error

    async def _check(self, answer: aiohttp.ClientResponse) -> None:
        status = answer.status
        if status == 200:
            return
        where = f"{self._reference.registry} answered {status}"
        if status in (401, 403, 404):
            said = "there is no such image" if status == 404 else "this machine may not have it, or it does not exist"
            raise ImageNotFoundError(
                f"{self._reference}: {said} ({where}): check its name, or log in with `docker login` or `podman login`"
            )
        after = answer.headers.get("Retry-After", "")
        asked = float(after) if after.isdigit() else None
        if status == 429:
            raise ImagePullError(
                f"{self._reference}: too many requests ({where}): log in, or use a registry of your own",
                retry_after_s=asked,
            )
        text = (await answer.content.read(300)).decode(errors="replace").strip()
        raise ImagePullError(f"{self._reference}: {where}: {text}", retry_after_s=asked, again=status >= 500)

    async def _authorize(self, challenge: str) -> str | None:
        """What to send as Authorization, for a challenge (RFC 9110, 11.6.1)."""
        kind, _, rest = challenge.partition(" ")
        found_login = login_of(self._reference.registry)
        login = f"Basic {found_login}" if found_login else None
        if kind.lower() == "basic":
            return login
        words = dict(_CHALLENGE.findall(rest))
        realm = words.get("realm", "")
        if kind.lower() != "bearer" or not _may_have_login(realm, self._base):
            raise ImagePullError(f"{self._reference}: it asks for a way to log in that is not known: {challenge[:200]}")
        parameters = {"scope": words.get("scope") or f"repository:{self._reference.repository}:pull"}
        if "service" in words:
            parameters["service"] = words["service"]
        assert self._session is not None
        headers = {"Authorization": login} if login else {}
        async with self._session.get(realm, params=parameters, headers=headers) as answer:
            await self._check(answer)
            try:
                found: Any = json.loads(await answer.content.read(_DOCUMENT_BYTES))
                return f"Bearer {found.get('token') or found['access_token']}"
            except (ValueError, KeyError, AttributeError) as error:
                raise ImagePullError(f"{self._reference}: {realm} gave no token") from error


class _Asked(wait_base):
    """As long as the registry asked for, if it did."""

    _usual = wait_exponential(multiplier=0.5, max=10.0) + wait_random(0, 1)

    def __call__(self, retry_state: Any) -> float:
        error = retry_state.outcome.exception()
        asked = error.context.get("retry_after_s") if isinstance(error, ImagePullError) else None
        return min(asked, _LONGEST_WAIT_S) if asked is not None else self._usual(retry_state)


def _disk_fault(error: OSError, target: Path) -> ImageError:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return ImageError(f"the disk is full, and the image cannot be kept in {target.parent}: make room there")
    return ImageError(f"{target} cannot be written: {error.strerror}")


def _is_here(host: str) -> bool:
    """Registries of this machine speak HTTP, as for docker."""
    name = host.rpartition(":")[0] if ":" in host else host
    if name == "localhost":
        return True
    try:
        return ipaddress.ip_address(name.strip("[]")).is_loopback
    except ValueError:
        return False


def _may_have_login(realm: str, base: str) -> bool:
    """Logins go over TLS, or not at all; but for registries of this machine."""
    return urlsplit(realm).scheme == "https" or (base.startswith("http:") and _is_here(urlsplit(realm).netloc))


def login_of(registry: str) -> str | None:
    """Of `docker login` and `podman login`, where it is in the file itself: `user:password`, as base64."""
    names = {"docker.io": ("https://index.docker.io/v1/", "docker.io")}.get(registry, (registry, f"https://{registry}"))
    places = [
        Path(os.environ["REGISTRY_AUTH_FILE"]) if "REGISTRY_AUTH_FILE" in os.environ else None,
        Path(os.environ.get("DOCKER_CONFIG") or Path.home() / ".docker") / "config.json",
        Path(os.environ.get("XDG_RUNTIME_DIR") or "/run") / "containers" / "auth.json",
    ]
    for path in places:
        if path is None:
            continue
        try:
            found = cast("dict[str, Any]", json.loads(path.read_bytes()))
        except (OSError, ValueError):
            continue
        for name in names:
            auths: dict[str, Any] = found.get("auths") or {}
            entry: dict[str, Any] = auths.get(name) or {}
            if entry.get("auth"):
                return str(entry["auth"])
    return None
