"""Starts and supervises the live page: its own process, whose faults and load are no concern of the coordinator's."""

from __future__ import annotations

import asyncio
import contextlib
import json
from pathlib import Path
from typing import Any, cast

import structlog
from rollout.config.interpreter import python_module
from rollout.config.settings import CoordinatorSettings
from rollout.model.address import parse_address

from rollout_coordinator.clock import Clock

log = structlog.get_logger()

STOP_LIMIT_S = 5.0
BACKOFF_S = 0.5
BACKOFF_MAX_S = 60.0
STEADY_S = 60.0  # having run this long, the next death starts with a short pause again
_LINE_MAX = 1 << 20


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
        pause = BACKOFF_S
        while True:
            began = self._clock.now().mono
            try:
                reason = await self._run()
            except OSError as error:
                reason = f"it cannot be started: {error}"
            if self._clock.now().mono - began > STEADY_S:
                pause = BACKOFF_S
            log.warning("ui_ended", reason=reason, restart_in_s=pause)
            await asyncio.sleep(pause)
            pause = min(pause * 2, BACKOFF_MAX_S)

    async def _run(self) -> str:
        """Why it ended."""
        process = await asyncio.create_subprocess_exec(
            *python_module("rollout.ui.child"),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            limit=_LINE_MAX,
        )
        assert process.stdin is not None and process.stdout is not None
        try:
            process.stdin.write(json.dumps(self._start).encode() + b"\n")
            said = await _answer(process.stdout)
            if url := said.get("url"):
                log.info("ui_ready", url=url, pid=process.pid)
            code = await process.wait()
            return str(said.get("fault") or f"exit code {code}")
        finally:
            await _end(process)


async def _answer(stdout: asyncio.StreamReader) -> dict[str, Any]:
    """Empty: it died before, or within it."""
    with contextlib.suppress(ValueError):
        said: Any = json.loads(await stdout.readline())
        if isinstance(said, dict):
            return cast(dict[str, Any], said)
    return {}


async def _end(process: asyncio.subprocess.Process) -> None:
    if process.stdin is not None:
        process.stdin.close()
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(process.wait(), STOP_LIMIT_S)
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()


def _here(addr: str) -> str:
    return str(parse_address(addr).here)
