"""Parent's side of a child process: starts it, talks to it, ends it and leaves no zombie.

The child's side, which ends it when its parent is killed, is in `lifeline` and `parent`.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, cast

DEVNULL, PIPE, STDOUT = asyncio.subprocess.DEVNULL, asyncio.subprocess.PIPE, asyncio.subprocess.STDOUT
LINE_MAX = 1 << 20


class Child:
    """Child process, started with `start`, and ended with `end` or `terminate`, or killed and waited for."""

    def __init__(self, process: asyncio.subprocess.Process, *, group: bool) -> None:
        self._process = process
        self._group = group

    @classmethod
    async def start(
        cls,
        command: Sequence[str],
        *,
        stdin: int = DEVNULL,
        stdout: int | IO[bytes] | None = None,
        stderr: int | IO[bytes] | None = None,
        cwd: Path | None = None,
        env: Mapping[str, str] | None = None,
        pass_fds: Sequence[int] = (),
        group: bool = False,
    ) -> Child:
        """Start a child. With `group`, it leads its own session and process group, to which signals are sent.

        Raises OSError, or ValueError for a NUL in an argument or a variable.
        """
        process = await asyncio.create_subprocess_exec(
            *command,
            stdin=stdin,
            stdout=stdout,
            stderr=stderr,
            cwd=cwd,
            env=env,
            pass_fds=tuple(pass_fds),
            start_new_session=group,
            limit=LINE_MAX,
        )
        return cls(process, group=group)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def code(self) -> int | None:
        """Exit code, or the negative number of the signal that killed it; None while it runs."""
        return self._process.returncode

    @property
    def stdout(self) -> asyncio.StreamReader:
        assert self._process.stdout is not None
        return self._process.stdout

    @property
    def stderr(self) -> asyncio.StreamReader:
        assert self._process.stderr is not None
        return self._process.stderr

    # ---- talking: one JSON object a line, on its stdin and stdout

    def say(self, message: Mapping[str, Any]) -> None:
        """Send a message without waiting; nothing is sent if its stdin is closed."""
        stdin = self._process.stdin
        if stdin is not None and not stdin.is_closing():
            stdin.write(json.dumps(message).encode() + b"\n")

    async def hear(self) -> dict[str, Any] | None:
        """Return its next line, empty if it is no JSON object, or None at the end."""
        try:
            line = await self.stdout.readline()
            value: Any = json.loads(line) if line else None
        except ValueError:  # or over LINE_MAX
            return {}
        if not line:
            return None
        return cast("dict[str, Any]", value) if isinstance(value, dict) else {}

    def close_stdin(self, last: bytes = b"") -> None:
        """Send `last` and close its stdin."""
        if self._process.stdin is not None:
            self._process.stdin.write(last)
            self._process.stdin.close()

    # ---- its end

    def signal(self, number: int) -> None:
        """Signal its group, if it leads one, even after it has ended: what it started must not outlive it."""
        with suppress(ProcessLookupError, PermissionError):
            if self._group:
                os.killpg(self.pid, number)
            else:
                self.signal_alone(number)

    def signal_alone(self, number: int) -> None:
        """Signal the child but not what it started."""
        if self.code is None:
            with suppress(ProcessLookupError):
                self._process.send_signal(number)

    def kill(self) -> None:
        self.signal(signal.SIGKILL)

    async def wait(self) -> int:
        return await self._process.wait()

    async def end(self, grace_s: float) -> None:
        """Close its stdin, on which it should end; kill it `grace_s` seconds later."""
        self.close_stdin()
        await self._kill_after(grace_s)

    async def terminate(self, grace_s: float) -> None:
        """Send SIGTERM, and SIGKILL `grace_s` seconds later."""
        self.signal(signal.SIGTERM)
        await self._kill_after(grace_s)
        self.close_stdin()

    async def _kill_after(self, grace_s: float) -> None:
        with suppress(TimeoutError):
            await asyncio.wait_for(self.wait(), grace_s)
        self.kill()
        await self.wait()

    async def group_gone(self, limit_s: float) -> None:
        """Wait until its group is empty, for at most `limit_s`; if nobody reaps orphans, it never is."""
        until = asyncio.get_running_loop().time() + limit_s
        with suppress(ProcessLookupError, PermissionError):
            while asyncio.get_running_loop().time() < until:
                os.killpg(self.pid, 0)
                await asyncio.sleep(0.05)

    def close_pipes(self) -> None:
        """Close the pipes of an ended child: a grandchild outside the group may hold one open, and its transport would
        outlive the event loop."""
        self._process._transport.close()  # type: ignore[attr-defined]  # pyright: ignore
