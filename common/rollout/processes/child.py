"""The parent's side of a child process: start it, talk to it, end it and leave no zombie.

How the child ends when its parent is killed is the child's side: `lifeline`, `parent`.
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
    """Started with `start`; ended with `end` or `terminate`, or killed and waited for."""

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
        """`group`: it leads a session and a process group of its own, to which signals go. OSError; ValueError: a NUL
        in an argument or a variable."""
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
        """Its exit code, or the negative number of the signal that killed it; None: it runs."""
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
        """Never waits; nothing is said to one whose stdin is closed."""
        stdin = self._process.stdin
        if stdin is not None and not stdin.is_closing():
            stdin.write(json.dumps(message).encode() + b"\n")

    async def hear(self) -> dict[str, Any] | None:
        """Its next line, empty for one that is no JSON object; None: it says no more."""
        try:
            line = await self.stdout.readline()
            value: Any = json.loads(line) if line else None
        except ValueError:  # or over LINE_MAX
            return {}
        if not line:
            return None
        return cast("dict[str, Any]", value) if isinstance(value, dict) else {}

    def close_stdin(self, last: bytes = b"") -> None:
        """After `last`, the end."""
        if self._process.stdin is not None:
            self._process.stdin.write(last)
            self._process.stdin.close()

    # ---- its end

    def signal(self, number: int) -> None:
        """To its group where it leads one, also when it has ended itself: what it started must not outlive it."""
        with suppress(ProcessLookupError, PermissionError):
            if self._group:
                os.killpg(self.pid, number)
            else:
                self.signal_alone(number)

    def signal_alone(self, number: int) -> None:
        """Not to what it started."""
        if self.code is None:
            with suppress(ProcessLookupError):
                self._process.send_signal(number)

    def kill(self) -> None:
        self.signal(signal.SIGKILL)

    async def wait(self) -> int:
        return await self._process.wait()

    async def end(self, grace_s: float) -> None:
        """Close its stdin, whereupon it is to end; kill it `grace_s` seconds later."""
        self.close_stdin()
        await self._kill_after(grace_s)

    async def terminate(self, grace_s: float) -> None:
        """SIGTERM; SIGKILL `grace_s` seconds later."""
        self.signal(signal.SIGTERM)
        await self._kill_after(grace_s)
        self.close_stdin()

    async def _kill_after(self, grace_s: float) -> None:
        with suppress(TimeoutError):
            await asyncio.wait_for(self.wait(), grace_s)
        self.kill()
        await self.wait()

    async def group_gone(self, limit_s: float) -> None:
        """Returns when none of its group is left, or after `limit_s`: where nobody reaps orphans, it never ends."""
        until = asyncio.get_running_loop().time() + limit_s
        with suppress(ProcessLookupError, PermissionError):
            while asyncio.get_running_loop().time() < until:
                os.killpg(self.pid, 0)
                await asyncio.sleep(0.05)

    def close_pipes(self) -> None:
        """Of one that has ended: a grandchild that left the group may hold a pipe open, and its transport would outlive
        the event loop."""
        self._process._transport.close()  # type: ignore[attr-defined]  # pyright: ignore
