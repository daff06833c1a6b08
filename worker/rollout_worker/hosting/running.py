"""Running plugin process with its channel, in any mode."""

from __future__ import annotations

import shutil
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import anyio.to_thread
from rollout.model.errors import PluginError
from rollout.plugins import api
from rollout.plugins.manifest import Manifest
from rollout.processes.interpreter import python_module
from rollout.processes.pipe import inherited_socket

from rollout_worker.hosting.channel import Channel, JsonChannel, Limits, fault
from rollout_worker.hosting.process import PluginProcess


@dataclass
class Running:
    process: PluginProcess
    channel: Channel
    init: dict[str, Any]
    """Payload of its first call."""
    scratch: Path | None = None

    async def stop(self, grace_s: float, *, politely: bool) -> None:
        if politely and not self.process.ended:
            with suppress(PluginError):  # not every plugin cares; the signal follows
                await self.channel.call(api.SHUTDOWN, {}, grace_s)
        await self.channel.close()
        await self.process.stop(grace_s if politely else 0.0)
        if self.scratch is not None:
            await anyio.to_thread.run_sync(lambda: shutil.rmtree(self.scratch or "", ignore_errors=True))


async def start_child(manifest: Manifest, limits: Limits, module: str, init: dict[str, Any]) -> Running:
    """Start one of our child modules on a socket pair that it inherits; never in the daemon's process."""
    with inherited_socket() as (ours, fd):
        process = await PluginProcess.start(
            manifest.name, python_module(module, str(fd)), cwd=manifest.directory, pass_fds=[fd]
        )
    return Running(process, await JsonChannel.over(ours, limits), init)


async def handshake(running: Running, manifest: Manifest, limits: Limits) -> None:
    """Call init, then preflight. Raises PluginError; the caller then stops the process."""
    said = await running.channel.call(api.INIT, running.init, limits.start_timeout_s)
    if not isinstance(said, dict):
        raise fault("wrong_type", f"its init must answer an object with name and version, not {type(said).__name__}")
    for key, wanted in (("name", manifest.name), ("version", manifest.version)):
        found = cast("dict[str, Any]", said).get(key, wanted)
        if found != wanted:
            raise fault("wrong_plugin", f"the manifest says {key} {wanted!r}, the plugin says {found!r}")
    try:
        ready = await running.channel.call(api.PREFLIGHT, {}, limits.start_timeout_s)
    except PluginError as e:
        if e.context.get("reason") == "unknown_method":
            return
        raise
    if isinstance(ready, dict) and ready.get("ok") is False:  # pyright: ignore[reportUnknownMemberType]
        raise fault("not_ready", f"its preflight says: {ready.get('message', '')}")  # pyright: ignore
