"""A plugin's process: its own group, bounded output, ended with everything it started."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import structlog
from rollout.model.errors import PluginError
from rollout.processes.child import PIPE, STDOUT, Child
from rollout.processes.exits import how_ended

from rollout_worker.environment import child_environment

log = structlog.get_logger()

_LINES_PER_S = 50
_LINE_BYTES = 2000
_TAIL = 20


class PluginProcess:
    """Started with `start`. Its stdout and stderr become log lines, at most 50 a second; the rest is counted."""

    def __init__(self, plugin: str, child: Child) -> None:
        self.plugin = plugin
        self._child = child
        self._tail: deque[str] = deque(maxlen=_TAIL)
        self._window = 0.0
        self._in_window = 0
        self.dropped_lines = 0
        self._drain = asyncio.create_task(self._read_output(child.stdout))

    @classmethod
    async def start(
        cls,
        plugin: str,
        command: Sequence[str],
        *,
        cwd: Path,
        environment: Mapping[str, str] = {},
        pass_fds: Sequence[int] = (),
    ) -> PluginProcess:
        """PluginError with reason "start" if the program cannot be run."""
        try:
            child = await Child.start(
                command,
                cwd=cwd,
                env=child_environment(environment),
                stdin=PIPE,  # the lifeline: never written, closes with this process
                stdout=PIPE,
                stderr=STDOUT,
                group=True,
                pass_fds=pass_fds,
            )
        except (OSError, ValueError) as e:
            raise PluginError(f"plugin {plugin} cannot be started: {command[0]}: {e}", reason="start") from e
        return cls(plugin, child)

    @property
    def pid(self) -> int:
        return self._child.pid

    @property
    def ended(self) -> bool:
        return self._child.code is not None

    def kill(self) -> None:
        self._child.kill()

    async def stop(self, grace_s: float) -> None:
        """SIGTERM, `grace_s` seconds later SIGKILL, each to the whole group; returns when it has ended."""
        await self._child.terminate(grace_s)
        await asyncio.wait([self._drain], timeout=1.0)
        self._drain.cancel()
        await asyncio.gather(self._drain, return_exceptions=True)
        self._child.close_pipes()

    async def describe_end(self) -> str:
        """How it ended and what it said last, for a person."""
        with suppress(TimeoutError):
            await asyncio.wait_for(self._child.wait(), 1.0)
        await asyncio.wait([self._drain], timeout=0.2)
        code = self._child.code
        how = "closed its connection" if code is None else how_ended(code)
        said = " | ".join(list(self._tail)[-3:])
        return f"{how}; it said: {said}" if said else how

    async def _read_output(self, stream: asyncio.StreamReader) -> None:
        while True:
            piece = await stream.read(4096)
            if not piece:
                return
            for line in piece.decode(errors="replace").splitlines():
                if text := line.strip()[:_LINE_BYTES]:
                    self._line(text)

    def _line(self, text: str) -> None:
        self._tail.append(text)
        now = time.monotonic()
        if now - self._window >= 1.0:
            self._window, self._in_window = now, 0
        self._in_window += 1
        if self._in_window <= _LINES_PER_S:
            log.info("plugin_output", plugin=self.plugin, line=text)
            return
        self.dropped_lines += 1
        if self._in_window == _LINES_PER_S + 1:
            log.warning("plugin_output_dropped", plugin=self.plugin, lines_per_s=_LINES_PER_S)
