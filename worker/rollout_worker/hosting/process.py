"""Process of a plugin: its own group, bounded output, ended with everything it started."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import structlog
from rollout.model.errors import PluginError
from rollout.processes.child import PIPE, STDOUT, Child
from rollout.processes.exits import how_ended

from rollout_worker.bounded_lines import LINE_MAX, BoundedLines, lines_of
from rollout_worker.environment import child_environment
from rollout_worker.left_out import MARK

log = structlog.get_logger()

_LINES_PER_S = 50


class _Output(BoundedLines):
    def __init__(self, plugin: str) -> None:
        most = _LINES_PER_S * LINE_MAX
        super().__init__(time.monotonic(), bytes_a_second=most, lines_a_second=_LINES_PER_S, burst_s=1.0)
        self._plugin = plugin

    def feed(self, stream: str, data: bytes, now: float) -> None:
        super().feed(stream, data.replace(MARK, b""), now)  # it knows nothing of marks

    def shown(self, stream: str, text: str, name: bytes) -> None:
        log.info("plugin_output", plugin=self._plugin, line=text)

    def dropped(self, taken: list[tuple[int, int, int]]) -> None:
        lines = sum(lines for _, lines, _ in taken)
        log.warning("plugin_output_dropped", plugin=self._plugin, lines_per_s=_LINES_PER_S, lines=lines)


class PluginProcess:
    """Plugin process, started with `start`. Its stdout and stderr become log lines, at most 50 per second; the rest is
    counted."""

    def __init__(self, plugin: str, child: Child) -> None:
        self._child = child
        self._output = _Output(plugin)
        self._drain = asyncio.create_task(self._output.capture("", child.stdout))

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
        """Start the process. Raises PluginError with reason "start" if the program cannot run."""
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
        """Send SIGTERM, and SIGKILL `grace_s` seconds later, to the whole group; wait for its end."""
        await self._child.terminate(grace_s)
        await asyncio.wait([self._drain], timeout=1.0)
        self._drain.cancel()
        await asyncio.gather(self._drain, return_exceptions=True)
        self._output.close()
        self._child.close_pipes()

    async def describe_end(self) -> str:
        """Return how it ended and its last output, for people."""
        with suppress(TimeoutError):
            await asyncio.wait_for(self._child.wait(), 1.0)
        await asyncio.wait([self._drain], timeout=0.2)
        code = self._child.code
        how = "closed its connection" if code is None else how_ended(code)
        said = " | ".join(lines_of(self._output.last_words)[-3:])
        return f"{how}; it said: {said}" if said else how
