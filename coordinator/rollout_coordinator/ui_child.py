"""Starts and supervises the live page: its own process, whose faults and load are no concern of the coordinator's."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import structlog
from rollout.config.settings import CoordinatorSettings
from rollout.model.address import parse_address
from rollout.processes.backoff import Backoff
from rollout.processes.child import PIPE, Child
from rollout.processes.interpreter import python_module

from rollout_coordinator.clock import Clock

log = structlog.get_logger()

STOP_LIMIT_S = 5.0
BACKOFF_S = 0.5
BACKOFF_MAX_S = 60.0
STEADY_S = 60.0


class UiChild:
    """`start` returns at once; whatever becomes of the page is in the log."""

    def __init__(self, settings: CoordinatorSettings, clock: Clock, addr: str, join_addr: str) -> None:
        """`addr`, `join_addr`: as this coordinator has bound them."""
        http, transport = settings.http, settings.transport
        self._clock = clock
        self._supervisor: asyncio.Task[None] | None = None
        self._start: dict[str, Any] = {
            "addresses": list(dict.fromkeys([_here(addr), *transport.coordinator_addrs])),
            "tls_dir": str(Path(transport.tls_dir).expanduser()),
            "cluster": transport.cluster,
            "place": {
                "listen": http.ui_listen_addr,
                "prefix": http.ui_prefix,
                "join_address": _here(join_addr) if join_addr else "",
                "certificate": http.ui_certificate or None,
                "key": http.ui_key or None,
            },
            "logging": settings.logging.model_dump(),
        }

    def start(self) -> None:
        self._supervisor = asyncio.create_task(self._supervise())

    async def stop(self) -> None:
        if self._supervisor is not None:
            self._supervisor.cancel()
            await asyncio.gather(self._supervisor, return_exceptions=True)

    async def _supervise(self) -> None:
        backoff = Backoff(BACKOFF_S, BACKOFF_MAX_S, STEADY_S)
        while True:
            began = self._clock.now().mono
            try:
                reason = await self._run()
            except OSError as error:
                reason = f"it cannot be started: {error}"
            pause = backoff.pause_s(self._clock.now().mono - began)
            log.warning("ui_ended", reason=reason, restart_in_s=pause)
            await asyncio.sleep(pause)

    async def _run(self) -> str:
        """Why it ended."""
        child = await Child.start(python_module("rollout.ui.child"), stdin=PIPE, stdout=PIPE)
        try:
            child.say(self._start)
            said = await child.hear() or {}
            if url := said.get("url"):
                log.info("ui_ready", url=url, pid=child.pid)
            code = await child.wait()
            return str(said.get("fault") or f"exit code {code}")
        finally:
            await child.end(STOP_LIMIT_S)


def _here(addr: str) -> str:
    return str(parse_address(addr).here)
