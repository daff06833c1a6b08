"""Inputs and outputs of attempts: moves objects to and from this host, and answers child processes."""

from __future__ import annotations

import base64
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import grpc.aio
from rollout.config.settings import ObjectsSection
from rollout.model.errors import NotFoundError, RolloutError
from rollout.objects.cache import ObjectCache
from rollout.objects.pack import Packer
from rollout.objects.remote import RemoteObjects
from rollout.objects.slices import SliceReader
from rollout.wire.epoch import EpochGuard

from rollout_worker import session_events as ev
from rollout_worker.transfer import Transfer

CallPlugin = Callable[[str, str, dict[str, Any] | bytes, float], Coroutine[Any, Any, Any]]


class Supply:
    """Supply of one incarnation, which pins what it uploads. `fetch` and `store` are answered through `event`."""

    def __init__(
        self,
        section: ObjectsSection,
        channel: Callable[[], Coroutine[Any, Any, grpc.aio.Channel]],
        incarnation: str,
        guard: EpochGuard,
        call_plugin: CallPlugin,
        event: Callable[[ev.Event], None],
        spawn: Callable[[Coroutine[Any, Any, None]], Any],
    ) -> None:
        self._objects = RemoteObjects(channel, pin=incarnation, guard=guard)
        self.cache_dir = Path(section.cache_dir).absolute()
        self._cache = ObjectCache(self.cache_dir, section.cache_max_mib << 20, self._objects.fetch)
        self._packer = Packer(self._objects.add_pieces)
        self._transfer = Transfer(SliceReader(self._cache, self._objects.read), self._packer, event, spawn)
        self.fetch, self.store = self._transfer.fetch, self._transfer.store
        self._call_plugin = call_plugin

    async def close(self) -> None:
        await self._packer.close()
        await self._cache.close()
        await self._objects.close()

    async def answer(self, question: dict[str, Any]) -> dict[str, Any]:
        """Answer a child's question about objects, or for a plugin."""
        try:
            if question["op"] == "put":
                return {"value": (await self._objects.put_path(Path(question["path"]))).hex()}
            if question["op"] == "path":
                return {"value": str(await self._cache.path(bytes.fromhex(question["object_id"])))}
            if question["op"] == "plugin":
                return {"value": await self._plugin(question)}
        except (RolloutError, OSError, ValueError, KeyError, TypeError) as error:
            code = error.code if isinstance(error, RolloutError) else "object_store"
            retryable = not isinstance(error, NotFoundError)
            return {"error": {"code": code, "message": str(error), "retryable": retryable}}
        return {"error": {"code": "protocol", "message": f"unknown request {question['op']!r}", "retryable": False}}

    async def _plugin(self, question: dict[str, Any]) -> dict[str, Any]:
        body = question["payload"]
        payload = base64.b64decode(body["b64"]) if "b64" in body else body["json"]
        value = await self._call_plugin(question["name"], question["method"], payload, float(question["timeout_s"]))
        return {"b64": base64.b64encode(value).decode()} if isinstance(value, bytes) else {"json": value}
