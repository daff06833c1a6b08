"""Starts and supervises the live page, a process of its own whose faults and load do not affect the coordinator."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import structlog
from rollout.config.settings import CoordinatorSettings
from rollout.model.address import parse_address
from rollout.processes.backoff import Backoff
from rollout.processes.child import PIPE, Child
from rollout.processes.interpreter import python_module
from rollout.processes.supervised import Supervised

from rollout_coordinator.clock import Clock

log = structlog.get_logger()

BACKOFF_S = 0.5
BACKOFF_MAX_S = 60.0
STEADY_S = 60.0


class UiChild(Supervised):
    """`start` returns at once; the log says what happens to the page."""

    def __init__(self, settings: CoordinatorSettings, clock: Clock, addr: str, join_addr: str) -> None:
        """`addr` and `join_addr` are those that this coordinator has bound."""
        super().__init__(Backoff(BACKOFF_S, BACKOFF_MAX_S, STEADY_S), lambda: clock.now().mono)
        http, transport = settings.http, settings.transport
        self._fault = ""
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
        self.watch(launched=False)

    async def launch(self) -> None:
        self._child = await Child.start(python_module("rollout.ui.child"), stdin=PIPE, stdout=PIPE)
        self._child.say(self._start)
        said = await self._child.hear() or {}
        self._fault = str(said.get("fault") or "")
        if url := said.get("url"):
            log.info("ui_ready", url=url, pid=self.pid)

    def restarts(self, end: int | Exception, pause_s: float) -> bool:
        reason = self._fault or f"exit code {end}" if isinstance(end, int) else f"it cannot be started: {end}"
        log.warning("ui_ended", reason=reason, restart_in_s=pause_s)
        return True


def _here(addr: str) -> str:
    return str(parse_address(addr).here)
