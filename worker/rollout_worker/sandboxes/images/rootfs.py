"""Images of registries, fetched and unpacked: one directory for each digest."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import time
from pathlib import Path
from typing import Any

import structlog

from rollout_worker.sandboxes.errors import ImagePullError
from rollout_worker.sandboxes.images import layers, reference
from rollout_worker.sandboxes.images.builder import made_with
from rollout_worker.sandboxes.images.registry import Registry, RegistryUnreachableError
from rollout_worker.sandboxes.images.store import Made, Store

log = structlog.get_logger()

_FORGET_S = 600.0
_unreachable: dict[str, tuple[float, str]] = {}
"""Registries of late, and why: each trial would wait for them again."""
_TAG_S = 3600.0
"""So long, a tag is taken to be what it was: registries count how often they are asked."""


async def fetch(name: str, store: Store, timeout_s: float, *, anew: bool) -> tuple[Made, str]:
    """The image's directory, with its files in `root`, and a key that is equal for equal images.

    ImagePullError, ImageNotFoundError, RegistryUnreachableError, ImageError (no room).
    """
    ref = reference.parse(name)
    try:
        async with asyncio.timeout(timeout_s):
            remembered = await asyncio.to_thread(_remembered, store, str(ref))
            if remembered and not anew and time.time() - remembered[1] < _TAG_S:
                key = f"image-{remembered[0]}"
                if (made := await asyncio.to_thread(store.find, key)) is not None:
                    return made, key
            try:
                return await _fetch(ref, store, anew)
            except RegistryUnreachableError:
                key = f"image-{remembered[0]}" if remembered else ""
                made = await asyncio.to_thread(store.find, key) if key else None
                if made is None:
                    raise
                log.warning("image_not_refreshed", image=str(ref), reason="the registry cannot be reached")
                return made, key
    except TimeoutError as error:
        raise ImagePullError(
            f"{ref} did not come within {timeout_s:g} s; raise build_timeout_sec of the task's [environment]"
        ) from error


async def _fetch(ref: reference.Reference, store: Store, anew: bool) -> tuple[Made, str]:
    async with Registry(ref) as registry:
        digest, manifest = await _manifest(registry, ref)
        key = f"image-{digest.removeprefix('sha256:')[:32]}"

        async def make(path: Path) -> Made:
            return await _unpack(registry, manifest, path)

        made = await store.get(key, make, anew=anew)
    await asyncio.to_thread(_remember, store, str(ref), key.removeprefix("image-"))
    return made, key


async def is_reachable(name: str) -> bool:
    """Whether the registry of this image answers, whatever it says."""
    ref = reference.parse(name)
    try:
        async with Registry(ref) as registry:
            await _manifest(registry, ref)
    except RegistryUnreachableError:
        return False
    except ImagePullError:
        return True
    return True


async def _manifest(registry: Registry, ref: reference.Reference) -> tuple[str, dict[str, Any]]:
    last, why = _unreachable.get(ref.registry, (-_FORGET_S, ""))
    if time.monotonic() - last < _FORGET_S:
        raise RegistryUnreachableError(why, again=False)
    try:
        return await registry.manifest()
    except RegistryUnreachableError as error:
        _unreachable[ref.registry] = time.monotonic(), error.message
        raise


async def _unpack(registry: Registry, manifest: dict[str, Any], path: Path) -> Made:
    config = await registry.config(manifest)
    archive = path / "layer"
    root = path / "root"
    root.mkdir(mode=0o755)
    for layer in manifest["layers"]:
        await registry.blob(str(layer["digest"]), int(layer["size"]), archive)
        try:
            await asyncio.to_thread(layers.unpack_file, archive, root)
        except layers.LayerError as error:
            raise ImagePullError(f"layer {layer['digest'][:19]} cannot be unpacked: {error}", again=False) from error
        archive.unlink()
    return made_with(path, config)


def _tag_path(store: Store, name: str) -> Path:
    return store.directory / f".tag-{hashlib.sha256(name.encode()).hexdigest()[:32]}"


def _remembered(store: Store, name: str) -> tuple[str, float] | None:
    """What the tag was, and when."""
    with contextlib.suppress(OSError, ValueError, KeyError):
        found = json.loads(_tag_path(store, name).read_bytes())
        return str(found["digest"]), float(found["time"])
    return None


def _remember(store: Store, name: str, digest: str) -> None:
    path = _tag_path(store, name)
    temporary = path.with_name(f"{path.name}-{time.time_ns()}")
    temporary.write_text(json.dumps({"digest": digest, "time": time.time()}), encoding="utf-8")
    temporary.replace(path)
