"""Programs that make images on this host: skopeo fetches, umoci unpacks, and podman, buildah or docker builds."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import secrets
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rollout.processes.command import run_async

from rollout_worker.sandboxes import trees
from rollout_worker.sandboxes.errors import (
    ImageBuildError,
    ImageBuildTimeoutError,
    ImageError,
    ImageToolsMissingError,
)
from rollout_worker.sandboxes.images.context import DOCKERFILE
from rollout_worker.sandboxes.images.registry import is_here, registry_of
from rollout_worker.sandboxes.images.store import Made

BUILDERS = ("podman", "buildah", "docker")
_ASK_S = 15.0
_SHOWN = 4000
_ID, _SAVED, _LAYOUT = "id", "saved.tar", "oci"
_IMAGE = f"{_LAYOUT}:image"
"""Relative to the programs' working directory, because a colon in a path would split it."""
_GZIP = ("--dest-compress-format", "gzip", "--dest-compress-level", "1")  # umoci reads no zstd


class ProgramError(Exception):
    """A program failed. The message is the end of its output."""


def lacking(*, build: bool = False) -> str:
    """Return which programs for images this host lacks, and the remedy, or "" if none is missing."""
    words = [name for name in ("skopeo", "umoci") if shutil.which(name) is None]
    if build and not any(map(shutil.which, BUILDERS)):
        words.append("podman, buildah or docker")
    if not words:
        return ""
    packages = "skopeo umoci buildah" if build else "skopeo umoci"
    return (
        f"images need {' and '.join(words)}, not found here: install them (apt-get install {packages}), use the "
        "provider docker or podman, or image: host under provider_config"
    )


async def run(*command: str, cwd: Path | None = None) -> str:
    """Run a program; return its output. Raises ProgramError, ImageError if the disk is full, or
    ImageToolsMissingError."""
    try:
        done = await run_async(command, cwd=cwd, group=True)
    except FileNotFoundError as error:
        raise ImageToolsMissingError(lacking() or f"there is no {command[0]}") from error
    if done.code == 0:
        return done.stdout
    printed = (done.stdout + done.stderr).strip()[-_SHOWN:]
    if "no space left on device" in printed.lower():
        raise ImageError(f"the disk of {cwd or 'its storage'} is full: make room there ({command[0]}: {printed})")
    raise ProgramError(printed)


async def copy(source: str, path: Path, *options: str) -> None:
    """Copy `source`, a skopeo name, to a layout below `path`; a retry resumes. Raises ProgramError or ImageError."""
    await run("skopeo", "copy", "--quiet", *_GZIP, *options, source, f"oci:{_IMAGE}", cwd=path)


async def unpack(path: Path) -> Made:
    """Unpack what was copied: the image's files go to `path`/root. Raises ProgramError or ImageError."""
    found: dict[str, Any] = json.loads(await run("skopeo", "inspect", "--config", f"oci:{_IMAGE}", cwd=path))
    rootless = () if os.geteuid() == 0 else ("--rootless",)
    await run("umoci", "raw", "unpack", *rootless, "--image", _IMAGE, "root", cwd=path)
    await asyncio.to_thread(trees.remove, str(path / _LAYOUT))
    return made_with(path, found.get("config") or {})


def made_with(path: Path, config: Mapping[str, Any]) -> Made:
    """Return an image with `config`, its configuration as OCI and Docker define it."""
    words: list[str] = config.get("Env") or []
    pairs = [word.partition("=") for word in words]
    user = str(config.get("User") or "").partition(":")[0]
    env = {name: value for name, _, value in pairs}
    entrypoint = tuple(config.get("Entrypoint") or ())
    return Made(path, env, config.get("WorkingDir") or None, user or None, entrypoint=entrypoint)


@dataclass(frozen=True, slots=True)
class Builder:
    """A program that builds images: one of BUILDERS."""

    name: str

    async def has(self, image: str) -> bool:
        """Return whether the builder has the image already; asked once per process."""
        if image not in _there:
            _there[image] = await _answers(self.name, "inspect", "--type", "image", image)
        return _there[image]

    async def build(self, directory: Path, path: Path, timeout_s: float, *, base: str, anew: bool) -> Made:
        """Build the Dockerfile in `directory`, which starts with `base`; the image's files go to `path`/root.

        Raises ImageError.
        """
        tag = f"rollout-build-{secrets.token_hex(8)}"
        named = ["--layers"] if self.name == "buildah" else ["-t", tag]  # it cannot remove a tag and keep layers
        options = [*named, "--iidfile", str(path / _ID), *(["--no-cache", "--pull"] if anew else [])]
        if self.name != "docker" and is_here(registry_of(base)):  # docker knows by itself that they speak HTTP
            options.append("--tls-verify=false")
        try:
            async with asyncio.timeout(timeout_s):
                await run(self.name, "build", *options, "-f", str(directory / DOCKERFILE), str(directory))
                await self._copy(tag, path)
                return await unpack(path)
        except TimeoutError as error:
            raise ImageBuildTimeoutError(
                f"{self.name} build did not end in {timeout_s:g} s; raise build_timeout_sec of the task's [environment]"
            ) from error
        except ProgramError as error:
            raise ImageBuildError(f"{self.name} build failed: {error}") from error
        finally:
            if self.name != "buildah":  # layers stay in the engine's cache
                await asyncio.shield(_answers(self.name, "rmi", "--no-prune", tag))

    async def _copy(self, tag: str, path: Path) -> None:
        if self.name == "docker":  # skopeo of before 2024 is too old for its daemon
            await run(self.name, "save", "-o", _SAVED, tag, cwd=path)
            source = f"docker-archive:{_SAVED}"
        else:
            source = f"containers-storage:@{(path / _ID).read_text().strip().removeprefix('sha256:')}"
        await copy(source, path)
        (path / _SAVED).unlink(missing_ok=True)


async def _answers(*command: str) -> bool:
    with contextlib.suppress(ProgramError, ImageError, OSError, TimeoutError):
        async with asyncio.timeout(_ASK_S):
            await run(*command)
            return True
    return False


_found: list[Builder] = []
_there: dict[str, bool] = {}


async def find_builder() -> Builder | None:
    """Return the first builder that is installed and answers, or None; a found one is not asked again."""
    for name in BUILDERS:
        if not _found and shutil.which(name) is not None and await _answers(name, "info"):
            _found.append(Builder(name))
    return _found[0] if _found else None
