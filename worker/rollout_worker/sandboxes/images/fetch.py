"""Images of registries, fetched and unpacked into one directory for each digest."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import re
import time
from collections.abc import Generator
from pathlib import Path

import structlog
from tenacity import retry, retry_if_exception, stop_after_attempt, wait_exponential

from rollout_worker.sandboxes.errors import (
    ImageNotFoundError,
    ImagePullError,
    ImageToolsMissingError,
    RegistryUnreachableError,
)
from rollout_worker.sandboxes.images import programs
from rollout_worker.sandboxes.images.registry import is_here, registry_of
from rollout_worker.sandboxes.images.store import Made, Store

log = structlog.get_logger()

_FORGET_S = 600.0
_unreachable: dict[str, tuple[float, str]] = {}
"""Registries that recently did not answer, and why: each trial would wait for them again."""
_TAG_S = 3600.0
"""Time for which a tag is assumed not to change, because registries limit how often they are asked."""
_CONNECT_S = 20
_TRIES = 3
_NOT_FOUND = re.compile(
    r"status ?code:? (from registry )?40[134]\b|(manifest|name) unknown|denied|unauthorized|invalid reference|"
    "no image found",
    re.IGNORECASE,
)
_UNREACHABLE = re.compile(r"dial tcp|no such host|deadline exceeded|TLS handshake|x509|tls:")
_MESSAGE = re.compile(r'level=fatal msg="(.*)"')


async def fetch(name: str, store: Store, timeout_s: float, *, anew: bool) -> tuple[Made, str]:
    """Return the image's directory, with its files in `root`, and a key that is equal for equal images.

    Raises ImagePullError, ImageNotFoundError, RegistryUnreachableError, ImageToolsMissingError, or ImageError if there
    is no room.
    """
    tag = store.directory / f".tag-{hashlib.sha256(name.encode()).hexdigest()[:32]}"
    key, since = await asyncio.to_thread(_remembered, tag)
    made = await asyncio.to_thread(store.find, key) if key else None
    if made is not None and not anew and time.time() - since < _TAG_S:
        return made, key
    try:
        async with asyncio.timeout(timeout_s):
            return await _fetch(name, store, tag, anew)
    except RegistryUnreachableError:
        if made is None:
            raise
        log.warning("image_not_refreshed", image=name, reason="the registry cannot be reached")
        return made, key
    except TimeoutError as error:
        raise ImagePullError(
            f"{name} did not come within {timeout_s:g} s; raise build_timeout_sec of the task's [environment]"
        ) from error


async def _fetch(name: str, store: Store, tag: Path, anew: bool) -> tuple[Made, str]:
    key = f"image-{(await _digest(name)).removeprefix('sha256:')[:32]}"

    async def make(path: Path) -> Made:
        await _copy(name, path)
        with _told(name):
            return await programs.unpack(path)

    made = await store.get(key, make, anew=anew)
    await asyncio.to_thread(_remember, tag, key)
    return made, key


async def is_reachable(name: str) -> bool:
    """Return whether the registry of this image answers, with any result. Raises ImageToolsMissingError."""
    try:
        await _digest(name)
    except ImagePullError as error:
        return not isinstance(error, RegistryUnreachableError)
    return True


async def _digest(name: str) -> str:
    registry = registry_of(name)
    last, why = _unreachable.get(registry, (-_FORGET_S, ""))
    if time.monotonic() - last < _FORGET_S:
        raise RegistryUnreachableError(why)
    if why := programs.lacking():
        raise ImageToolsMissingError(why)
    try:
        return await _asked(name)
    except RegistryUnreachableError as error:
        _unreachable[registry] = time.monotonic(), error.message
        raise


_again = retry(
    retry=retry_if_exception(
        lambda error: (
            isinstance(error, ImagePullError) and error.retryable and not isinstance(error, RegistryUnreachableError)
        )
    ),
    wait=wait_exponential(multiplier=0.5, max=10.0),
    stop=stop_after_attempt(_TRIES),
    reraise=True,
)


@_again
async def _asked(name: str) -> str:
    with _told(name):
        words = ["--no-tags", "--format", "{{.Digest}}", *_tls(name), _source(name)]
        return (await programs.run("skopeo", "--command-timeout", f"{_CONNECT_S}s", "inspect", *words)).strip()


@_again
async def _copy(name: str, path: Path) -> None:
    with _told(name):
        await programs.copy(_source(name), path, *_tls(name, "src-"))


def _source(name: str) -> str:
    """Return skopeo's name of an image, which has a tag or a digest, but not both."""
    path, at, digest = name.partition("@")
    above, slash, last = path.rpartition("/")
    return f"docker://{above}{slash}{last.partition(':')[0]}@{digest}" if at else f"docker://{name}"


def _tls(name: str, of: str = "") -> list[str]:
    return [f"--{of}tls-verify=false"] if is_here(registry_of(name)) else []


@contextlib.contextmanager
def _told(name: str) -> Generator[None]:
    """Convert a program's message about a registry or an image to an error that says what can be done about it."""
    try:
        yield
    except programs.ProgramError as error:
        said = "; ".join(_MESSAGE.findall(str(error))) or str(error)
        said = said.replace('\\"', '"')
        if _UNREACHABLE.search(said):
            raise RegistryUnreachableError(f"the registry {registry_of(name)} cannot be reached: {said}") from error
        if _NOT_FOUND.search(said):
            raise ImageNotFoundError(
                f"{name}: {said}: check its name, or log in with `docker login` or `podman login`"
            ) from error
        raise ImagePullError(f"{name}: {said}") from error


def _remembered(tag: Path) -> tuple[str, float]:
    """Return the key that the tag referred to, and when."""
    try:
        return str(tag.readlink()), tag.lstat().st_mtime
    except OSError:
        return "", 0.0


def _remember(tag: Path, key: str) -> None:
    temporary = tag.with_name(f"{tag.name}-{time.time_ns()}")
    temporary.symlink_to(key)
    temporary.replace(tag)
