"""Where coordinators run in tests: processes of their own, and this one."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cluster import free_port
from rollout.config.load import load_settings
from rollout.config.settings import CoordinatorSettings
from rollout_coordinator.lifecycle import Coordinator, started
from rollout_coordinator.wiring import Parts, build


@dataclass
class Node:
    """A coordinator process and the lines it logged."""

    directory: Path
    listen: str
    process: asyncio.subprocess.Process
    lines: list[dict[str, Any]] = field(default_factory=list)
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    reader: asyncio.Task[None] | None = None
    text: list[str] = field(default_factory=list)

    async def event(self, name: str, timeout: float = 60.0) -> dict[str, Any]:
        async with asyncio.timeout(timeout):
            while True:
                for line in self.lines:
                    if line.get("event") == name:
                        return line
                if self.reader is not None and self.reader.done():
                    raise AssertionError(f"the coordinator ended before {name}:\n" + "\n".join(self.text[-30:]))
                self.changed.clear()
                await self.changed.wait()

    async def _read(self) -> None:
        assert self.process.stdout is not None
        while line := await self.process.stdout.readline():
            self.text.append(line.decode(errors="replace").rstrip())
            with contextlib.suppress(ValueError):
                self.lines.append(json.loads(line))
            self.changed.set()
        self.changed.set()

    async def kill(self, sig: signal.Signals = signal.SIGKILL, timeout: float = 20.0) -> int:
        if self.process.returncode is None:
            self.process.send_signal(sig)
        async with asyncio.timeout(timeout):
            code = await self.process.wait()
            if self.reader is not None:
                await self.reader
        return code


TIMINGS = """
heartbeat_interval_ms = 100
worker_self_fence_timeout_ms = 800
coordinator_failure_timeout_ms = 1500
clock_skew_budget_ms = 50
"""


def config(directory: Path, listen: str, *, storage: str = "", transport: str = "", extra: str = "") -> Path:
    path = directory / "coordinator.toml"
    storage = storage or f'[storage.embedded]\npath = "{directory / "rollout.db"}"\n'
    path.write_text(
        f'{storage}\n[transport]\nlisten_addr = "{listen}"\ntls_dir = "{directory / "tls"}"\n{TIMINGS}{transport}\n'
        f'[objects]\npath = "{directory / "objects"}"\n[logging]\nformat = "json"\n{extra}\n'
    )
    return path


async def spawn(path: Path, env: dict[str, str] | None = None) -> Node:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "rollout_coordinator",
        "run",
        "--config",
        str(path),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        limit=1 << 20,
        env=os.environ | (env or {}),
    )
    node = Node(path.parent, "", process)
    node.reader = asyncio.create_task(node._read())
    return node


def free_addr() -> str:
    return f"127.0.0.1:{free_port()}"


@asynccontextmanager
async def inprocess(
    directory: Path, *, listen: str = "127.0.0.1:0", storage: str = "", extra: str = "", **seams: Any
) -> AsyncIterator[tuple[Coordinator, Parts]]:
    settings = load_settings(CoordinatorSettings, config(directory, listen, storage=storage, extra=extra))
    parts = build(settings, **seams)
    exits: list[int] = []
    node = await started(parts, exit_hard=exits.append)
    running = node.ended = asyncio.create_task(node.run())
    try:
        serving = asyncio.create_task(node.serving.wait())
        await asyncio.wait({running, serving}, return_when=asyncio.FIRST_COMPLETED)
        serving.cancel()
        if running.done():
            raise AssertionError(f"ended with {running.result()}")
        yield node, parts
    finally:
        node.stop()
        await running
