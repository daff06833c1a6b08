"""Images built with the program `docker` or `podman`, for providers of this host: built, exported, unpacked."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import secrets
import shutil
import signal
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from rollout_worker.sandboxes.errors import ImageBuildError, ImageBuildTimeoutError, ImageError
from rollout_worker.sandboxes.images import layers
from rollout_worker.sandboxes.images.context import DOCKERFILE
from rollout_worker.sandboxes.images.store import Made

PROGRAMS = ("podman", "docker")
_ASK_S = 15.0
_SHOWN = 4000
_KEPT = 1 << 16


@dataclass(frozen=True, slots=True)
class ImageProgram:
    """`docker` or `podman`."""

    path: str

    async def info(self) -> None:
        """ImageError: it does not work here, as where its daemon does not run."""
        await self._run(["info"], time.monotonic() + _ASK_S, _ASK_S)

    async def has(self, image: str) -> bool:
        """Whether it is there already; asked once a process."""
        if image not in _there:
            try:
                await self._run(["image", "inspect", image], time.monotonic() + _ASK_S, _ASK_S)
                _there[image] = True
            except ImageError:
                _there[image] = False
        return _there[image]

    async def build(self, directory: Path, root: Path, timeout_s: float, *, anew: bool) -> Made:
        """Build what is in `directory` and unpack it at `root`, a new directory. ImageBuildError."""
        until = time.monotonic() + timeout_s
        tag = f"rollout-build-{secrets.token_hex(8)}"
        dockerfile = str(directory / DOCKERFILE)
        options = ["--no-cache", "--pull"] if anew else []
        try:
            await self._run(["build", *options, "-t", tag, "-f", dockerfile, str(directory)], until, timeout_s)
            inspected: Any = json.loads(await self._run(["image", "inspect", tag], until, timeout_s))
            await self._run(["create", "--name", tag, tag, "/bin/true"], until, timeout_s)
            archive = root.with_name("export.tar")
            await self._run(["export", "-o", str(archive), tag], until, timeout_s)
        finally:  # the layers stay in the engine's cache
            await asyncio.shield(self._forget(tag))
        try:
            await asyncio.to_thread(layers.unpack_file, archive, root)
        except layers.LayerError as error:
            raise ImageBuildError(f"the built image cannot be unpacked: {error}") from error
        archive.unlink()
        return made_with(root.parent, cast("list[dict[str, Any]]", inspected)[0].get("Config") or {})

    async def _forget(self, tag: str) -> None:
        for arguments in (["rm", "-f", tag], ["rmi", "--no-prune", tag]):
            with contextlib.suppress(ImageError):
                await self._run(arguments, time.monotonic() + _ASK_S, _ASK_S)

    async def _run(self, arguments: list[str], until: float, timeout_s: float) -> bytes:
        process = await asyncio.create_subprocess_exec(
            self.path,
            *arguments,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            start_new_session=True,
        )
        printed = bytearray()
        try:
            async with asyncio.timeout_at(asyncio.get_running_loop().time() + until - time.monotonic()):
                assert process.stdout is not None
                while piece := await process.stdout.read(1 << 16):
                    printed += piece
                    del printed[:-_KEPT]
                code = await process.wait()
        except TimeoutError as error:
            raise ImageBuildTimeoutError(
                f"{self.path} {arguments[0]} did not end: the build has {timeout_s:g} s; raise build_timeout_sec of "
                f"the task's [environment]{_ending(printed)}"
            ) from error
        finally:
            if process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                await process.wait()
        if code != 0:
            raise ImageBuildError(f"{self.path} {arguments[0]} ended with {code}{_ending(printed)}")
        return bytes(printed)


def _ending(printed: bytearray) -> str:
    text = printed.decode(errors="replace").strip()[-_SHOWN:]
    return f": {text}" if text else ""


def made_with(path: Path, config: Mapping[str, Any]) -> Made:
    """`config`: of the image, as the OCI and Docker have it."""
    words: list[str] = config.get("Env") or []
    pairs = [word.partition("=") for word in words]
    user = str(config.get("User") or "").partition(":")[0]
    env = {name: value for name, _, value in pairs}
    entrypoint = tuple(config.get("Entrypoint") or ())
    return Made(path, env, config.get("WorkingDir") or None, user or None, entrypoint=entrypoint)


_found: list[ImageProgram] = []
_there: dict[str, bool] = {}


async def find_program() -> ImageProgram | None:
    """The first that is there and answers; it is asked once a process."""
    if _found:
        return _found[0]
    for name in PROGRAMS:
        path = shutil.which(name)
        if path is None:
            continue
        program = ImageProgram(path)
        with contextlib.suppress(ImageError, OSError):
            await program.info()
            _found.append(program)
            return program
    return None
