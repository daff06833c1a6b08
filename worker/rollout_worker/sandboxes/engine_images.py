"""Images of a container engine: built from a directory, or pulled, unless they exist."""

from __future__ import annotations

import asyncio
import io
from pathlib import Path
from typing import Any

from rollout_worker.sandboxes.engine_api import Engine, EngineError, EngineUnreachableError
from rollout_worker.sandboxes.errors import (
    ImageBuildError,
    ImageBuildTimeoutError,
    ImageError,
    ImageNotFoundError,
    ImagePullError,
)
from rollout_worker.sandboxes.images import context
from rollout_worker.sandboxes.images.programs import made_with
from rollout_worker.sandboxes.images.registry import login_of, registry_of
from rollout_worker.sandboxes.port import BuiltImage

LABEL = "rollout.content"
_REPOSITORY = "rollout-task"
_SHOWN = 4000


class EngineImages:
    """Builds and pulls images, each by one caller at a time."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._alone: dict[str, asyncio.Lock] = {}
        self._fresh: set[str] = set()
        self.last: str | None = None  # the last requested image that exists

    async def inspect(self, reference: str) -> dict[str, Any] | None:
        """Return the image's description, or None if the engine does not have it."""
        try:
            async with self._engine.asking() as docker:
                return await docker.images.inspect(reference)
        except EngineError as error:
            if error.status != 404:
                raise ImageError(f"{reference}: the engine answered {error.status}: {error.message}") from error
            return None
        except EngineUnreachableError as error:
            raise ImageError(f"the engine cannot be reached: {error}") from error

    async def build(self, directory: Path, timeout_s: float, *, anew: bool) -> BuiltImage:
        content = (await asyncio.to_thread(context.content_id, directory))[:32]
        name = f"{_REPOSITORY}:{content}"
        async with self._alone.setdefault(name, asyncio.Lock()):
            there = await self.inspect(name)
            if there is None or (anew and name not in self._fresh):
                await asyncio.to_thread(context.read_dockerfile, directory)
                await self._build(directory, name, content, timeout_s, anew)
                self._fresh.add(name)
                there = await self.inspect(name)
        if there is None:
            raise ImageBuildError(f"the image {name} is gone as soon as it was built: does something prune images?")
        self.last = name
        return _built(name, there)

    async def _build(self, directory: Path, name: str, content: str, timeout_s: float, anew: bool) -> None:
        data = await asyncio.to_thread(context.pack, directory)
        printed: list[str] = []
        try:
            async with asyncio.timeout(timeout_s), self._engine.asking(None) as docker:
                stream = docker.images.build(
                    fileobj=io.BytesIO(data),
                    encoding="identity",
                    tag=name,
                    labels={LABEL: content},
                    nocache=anew,
                    pull=anew,
                    rm=True,
                    forcerm=True,
                    path_dockerfile=context.DOCKERFILE,
                    stream=True,
                )
                async for piece in stream:
                    printed.append(str(piece.get("stream") or piece.get("status") or ""))
                    del printed[:-500]
                    if "error" in piece:
                        raise EngineError(500, str(piece["error"]))
        except TimeoutError as error:
            raise ImageBuildTimeoutError(
                f"the build did not end in {timeout_s:g} s; raise build_timeout_sec of the task's [environment]"
                f"{_ending(printed)}"
            ) from error
        except EngineError as error:
            raise ImageBuildError(f"the build failed: {error.message}{_ending(printed)}") from error
        except EngineUnreachableError as error:
            raise ImageBuildError(f"the engine was lost while it built: {error}") from error

    async def pull(self, reference: str, timeout_s: float, *, anew: bool) -> BuiltImage:
        async with self._alone.setdefault(reference, asyncio.Lock()):
            there = await self.inspect(reference)
            if there is None or (anew and reference not in self._fresh):
                await self._pull(reference, timeout_s)
                self._fresh.add(reference)
                there = await self.inspect(reference)
        if there is None:
            raise ImagePullError(f"the engine pulled {reference}, but does not have it")
        self.last = reference
        return _built(reference, there)

    async def _pull(self, reference: str, timeout_s: float) -> None:
        try:
            async with asyncio.timeout(timeout_s), self._engine.asking(None) as docker:
                name, tag = _with_tag(reference)
                # aiodocker takes a login only for names with a registry or owner.
                auth = login_of(registry_of(reference)) if "/" in name else None
                async for piece in docker.images.pull(name, auth=auth, tag=tag, stream=True):
                    if "error" in piece:
                        raise EngineError(500, str(piece["error"]))
        except TimeoutError as error:
            raise ImagePullError(f"{reference} did not come in {timeout_s:g} s") from error
        except EngineError as error:
            kind = ImageNotFoundError if error.status in (400, 401, 403, 404) else ImagePullError
            raise kind(
                f"{reference} cannot be pulled: {error.message}: check its name, and that the engine reaches the "
                "registry and is logged in"
            ) from error
        except EngineUnreachableError as error:
            raise ImagePullError(f"the engine was lost while it pulled {reference}: {error}") from error


def _with_tag(reference: str) -> tuple[str, str | None]:
    """Return name and tag, because without a tag an engine would pull all tags."""
    last = reference.rpartition("/")[2]
    return reference, None if "@" in reference or ":" in last else "latest"


def _built(reference: str, there: dict[str, Any]) -> BuiltImage:
    config: dict[str, Any] = there.get("Config") or {}
    found = made_with(Path(), config)
    key = f"image:{there['Id']}"
    return BuiltImage(reference, key, found.env, found.workdir, found.user, has_entrypoint=bool(found.entrypoint))


def _ending(printed: list[str]) -> str:
    text = "".join(printed).strip()[-_SHOWN:]
    return f": {text}" if text else ""
