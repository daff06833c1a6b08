"""One loaded plugin: calls it, and replaces its process when it hangs, crashes or floods."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import structlog
from rollout.model.errors import PluginError, RolloutError
from rollout.plugins import api
from rollout.plugins.manifest import Manifest, verify_pin
from rollout.processes.backoff import Backoff

from rollout_worker.hosting import cdylib, python_mode, sidecar
from rollout_worker.hosting.channel import FATAL, Limits
from rollout_worker.hosting.running import Running, handshake

log = structlog.get_logger()

_MODES = {"python": python_mode.start, "sidecar": sidecar.start, "cdylib": cdylib.start}


async def start(manifest: Manifest, limits: Limits) -> Running:
    """Return a process that has answered init and preflight. Raises PluginError or ConfigError, leaving nothing
    behind."""
    await asyncio.to_thread(verify_pin, manifest)  # at each start: the file may have changed since the last
    running = await _MODES[manifest.mode](manifest, limits)
    try:
        await handshake(running, manifest, limits)
    except PluginError as e:
        text = e.message
        if e.context.get("reason") == "crashed":
            text = f"the process {await running.process.describe_end()}"
        await running.stop(0.0, politely=False)
        raise PluginError(f"plugin {manifest.name} did not start: {text}", reason=e.context.get("reason")) from e
    except BaseException:
        await running.stop(0.0, politely=False)
        raise
    return running


class Instance:
    """Plugin with at most `runtime.concurrency` concurrent calls.

    After a fatal fault the next call starts a new process, after a backoff that doubles until a call succeeds.
    """

    def __init__(self, manifest: Manifest, limits: Limits, clock: Callable[[], float] | None = None) -> None:
        self.manifest = manifest
        self._limits = limits
        self._clock = clock or asyncio.get_running_loop().time
        self._running: Running | None = None
        self._calls = asyncio.Semaphore(manifest.runtime.concurrency)
        self._starting = asyncio.Lock()
        self._backoff = Backoff(limits.first_backoff_s, limits.max_backoff_s)
        self._stops: set[asyncio.Task[None]] = set()
        self._open_calls: set[asyncio.Task[Any]] = set()
        self._closed = False

    async def start(self) -> None:
        """Start the first process; a fault is raised and not retried."""
        async with self._starting:
            self._running = await start(self.manifest, self._limits)

    @property
    def pid(self) -> int | None:
        return None if self._running is None else self._running.process.pid

    async def call(self, method: str, payload: dict[str, Any] | bytes, timeout_s: float) -> Any:
        """Call a method. Raises PluginError with a `reason`. The timeout starts when the plugin is free."""
        task = asyncio.create_task(self._call(method, payload, timeout_s))
        self._open_calls.add(task)
        task.add_done_callback(self._open_calls.discard)
        # A caller that gives up leaves the plugin at work: the call keeps its place until it ends or times out.
        return await asyncio.shield(task)

    async def _call(self, method: str, payload: Any, timeout_s: float) -> Any:
        async with self._calls:
            try:
                running = await self._ready(timeout_s)
            except RolloutError as e:
                log.warning("plugin_call_error", plugin=self.manifest.name, method=method, error=e.message)
                raise
            try:
                value = await running.channel.call(method, payload, timeout_s)
                value = api.check_result(self.manifest.kind, method, value)
            except PluginError as e:
                raise await self._faulted(running, method, e) from e
            self._backoff.reset()
            return value

    async def _faulted(self, running: Running, method: str, e: PluginError) -> PluginError:
        reason = e.context.get("reason", "plugin_error")
        text = e.message
        if reason == "crashed":
            text = f"its process {await running.process.describe_end()}"
        if reason in FATAL:
            text += "; the plugin is restarted"
            self._discard(running)
        log.warning("plugin_call_error", plugin=self.manifest.name, method=method, reason=reason, error=text)
        return PluginError(f"plugin {self.manifest.name}, {method}: {text}", reason=reason)

    async def _ready(self, timeout_s: float) -> Running:
        async with self._starting:
            running = self._running
            if running is not None and not running.process.ended and running.channel.broken is None:
                return running
            if running is not None:  # between two calls
                why = running.channel.broken
                text = "its process ended" if why is None else why.message
                log.warning("plugin_call_error", plugin=self.manifest.name, method="", reason="idle", error=text)
                self._discard(running)
            if self._closed:
                raise PluginError(f"plugin {self.manifest.name} is unloaded", reason="unloaded")
            wait = self._backoff.until - self._clock()
            if wait > timeout_s:
                failed = f"plugin {self.manifest.name} failed {self._backoff.failures} times in a row"
                raise PluginError(f"{failed}; next try in {wait:.1f} s", reason="backoff")
            if wait > 0:
                await asyncio.sleep(wait)
            try:
                self._running = await start(self.manifest, self._limits)
            except RolloutError:
                self._backoff.failed(self._clock())
                raise
            log.info("plugin_restarted", plugin=self.manifest.name, faults=self._backoff.failures)
            return self._running

    def _discard(self, running: Running) -> None:
        """Kill the process now, so that a hanging call takes no more time; the rest of the stop continues in the
        background."""
        if self._running is not running:
            return
        self._running = None
        running.process.kill()
        self._backoff.failed(self._clock())
        self._stop_later(running, politely=False)

    def _stop_later(self, running: Running, *, politely: bool, after: list[asyncio.Task[Any]] | None = None) -> None:
        async def stop() -> None:
            if after:
                await asyncio.wait(after)
            await running.stop(self._limits.stop_grace_s, politely=politely)

        task = asyncio.create_task(stop())
        self._stops.add(task)
        task.add_done_callback(self._stops.discard)

    async def replace(self, manifest: Manifest) -> None:
        """Start a new process of `manifest`; running calls end on the old one. After an error the old one stays."""
        async with self._starting:
            fresh = await start(manifest, self._limits)
            old, self._running = self._running, fresh
            if manifest.runtime.concurrency != self.manifest.runtime.concurrency:
                self._calls = asyncio.Semaphore(manifest.runtime.concurrency)
            self.manifest = manifest
            self._backoff.reset()
            self._backoff.until = 0.0
            if old is not None:
                self._stop_later(old, politely=True, after=list(self._open_calls))

    async def close(self) -> None:
        self._closed = True
        async with self._starting:
            running, self._running = self._running, None
        if running is not None:
            if self._open_calls:
                running.process.kill()
            await running.stop(self._limits.stop_grace_s, politely=not self._open_calls)
        if self._open_calls:
            await asyncio.wait(list(self._open_calls))
        if self._stops:
            await asyncio.wait(list(self._stops))
