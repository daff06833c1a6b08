"""The plugins of a worker, by name."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import structlog
from rollout.model.errors import ConfigError, NotFoundError, PluginError, StateError
from rollout.plugins.manifest import Manifest, load_manifest

from rollout_worker.hosting.channel import Limits
from rollout_worker.hosting.instance import Instance

log = structlog.get_logger()


class PluginHost:
    """Loads plugins and calls them; each of their faults is a PluginError and never harms the worker.

    A plugin runs in its own process in every mode. `hot_reload` is `[worker] dev_hot_reload`. `clock` returns monotonic
    seconds, for the backoff between restarts.
    """

    def __init__(
        self, *, hot_reload: bool = False, limits: Limits | None = None, clock: Callable[[], float] | None = None
    ) -> None:
        self._hot_reload = hot_reload
        self._limits = limits or Limits()
        self._clock = clock
        self._plugins: dict[str, Instance] = {}
        self._changing = asyncio.Lock()

    async def load(self, manifest_path: str | Path) -> Manifest:
        """Check the manifest, the pinned hash and the allowlist, start the plugin and ask whether it is ready.

        Loading the same name from the same manifest again does nothing; from another manifest it raises StateError.
        Raises ConfigError for the manifest, a wrong hash, or an allowlist that cannot be enforced here, and PluginError
        if the plugin did not start.
        """
        manifest = await asyncio.to_thread(_checked, manifest_path)
        async with self._changing:
            loaded = self._plugins.get(manifest.name)
            if loaded is not None:
                if loaded.manifest.path == manifest.path:
                    return loaded.manifest
                raise StateError(
                    f"a plugin {manifest.name!r} is loaded from {loaded.manifest.path}; rename that of {manifest.path}"
                )
            instance = Instance(manifest, self._limits, self._clock)
            try:
                await instance.start()
            except PluginError as e:
                log.error("plugin_load_error", plugin=manifest.name, mode=manifest.mode, error=e.message)
                raise
            self._plugins[manifest.name] = instance
        log.info("plugin_loaded", plugin=manifest.name, mode=manifest.mode, path=str(manifest.path), pid=instance.pid)
        return manifest

    def names(self) -> tuple[str, ...]:
        return tuple(sorted(self._plugins))

    def manifest(self, name: str) -> Manifest:
        return self._get(name).manifest

    async def call(self, name: str, method: str, payload: dict[str, Any] | bytes, timeout_s: float) -> Any:
        """Return what `method` returns: a JSON value, or bytes if the plugin returns bytes.

        `payload` is keyword arguments, or bytes that are passed unchanged. Raises NotFoundError if there is no such
        plugin, and PluginError with `context["reason"]`: timeout, crashed, flood, bad_frame (its process is replaced);
        plugin_error, unknown_method, bad_payload, wrong_type, too_large, backoff (it is not).
        """
        return await self._get(name).call(method, payload, timeout_s)

    async def reload(self, name: str, reason: str = "") -> None:
        """Reload the plugin from disk. Needs hot reload; a cdylib refuses (PluginError)."""
        instance = self._get(name)
        if not self._hot_reload:
            raise StateError("hot reload is off; set [worker] dev_hot_reload = true, on a development machine only")
        if instance.manifest.mode == "cdylib":
            raise PluginError(
                f"plugin {name}: a cdylib cannot be reloaded, since C has no safe unload; restart the worker",
                reason="reload_unsupported",
            )
        manifest = await asyncio.to_thread(_checked, instance.manifest.path)
        if manifest.name != name or manifest.mode != instance.manifest.mode:
            raise ConfigError(f"{manifest.path}: name and mode cannot change on reload; restart the worker")
        async with self._changing:
            await instance.replace(manifest)
        log.info("plugin_reloaded", plugin=name, reason=reason, pid=instance.pid)

    async def unload(self, name: str) -> None:
        async with self._changing:
            instance = self._get(name)
            del self._plugins[name]
            await instance.close()

    async def close(self) -> None:
        """End every plugin's process and everything it started."""
        async with self._changing:
            plugins, self._plugins = list(self._plugins.values()), {}
            await asyncio.gather(*[p.close() for p in plugins])

    def _get(self, name: str) -> Instance:
        try:
            return self._plugins[name]
        except KeyError:
            raise NotFoundError(f"no plugin {name!r} is loaded; loaded: {', '.join(self.names()) or 'none'}") from None


def _checked(path: str | Path) -> Manifest:
    manifest = load_manifest(path)
    if manifest.network_allowlist:
        raise ConfigError(
            f"{manifest.path}: network_allowlist = {list(manifest.network_allowlist)}: this worker cannot confine a "
            "plugin's network, and an allowlist that is not enforced protects nobody. Remove it to run the plugin with "
            "the worker's network, or run it in a container whose network is restricted"
        )
    return manifest
