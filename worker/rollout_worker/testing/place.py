"""Where test processes are started: on this host, in the directory of the project."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Literal

import psutil

from rollout_worker.hosting.lifeline import ask_kernel
from rollout_worker.processes.child import exit_reason
from rollout_worker.sandboxes.kernel import adopt_orphans

Stream = Literal["stdout", "stderr"]
OnOutput = Callable[[Stream, bytes], None]
PIECE = 256 << 10
DRAIN_S = 0.3
"""A process that a test left behind may hold the streams open for ever."""


class TestProcess(ABC):
    """A started process. All that it prints is told before `wait` returns."""

    __test__ = False

    @abstractmethod
    async def send(self, data: bytes) -> None:
        """To its stdin; nothing happens where it has ended."""

    @abstractmethod
    def close_input(self) -> None: ...

    @abstractmethod
    async def wait(self) -> str:
        """How it ended, in words."""

    @abstractmethod
    async def show_stacks(self, pid: int) -> None:
        """Ask it to print on stderr where it is; `pid`: as it knows itself."""

    @abstractmethod
    async def kill(self) -> None:
        """End it, and all that it has started."""


class Place(ABC):
    runner: str
    """Path of pytest_runner.py, as processes here see it."""

    @abstractmethod
    async def start(self, words: Sequence[str], on_output: OnOutput) -> TestProcess:
        """OSError: it cannot be started."""

    async def close(self) -> None:
        return


class LocalPlace(Place):
    def __init__(self, runner: Path, directory: Path, env: Mapping[str, str]) -> None:
        self.runner = str(runner)
        self._directory = directory
        self._env = env
        if sys.platform == "linux":
            adopt_orphans()  # what leaves its parent and its session is found here when its test process has ended

    async def start(self, words: Sequence[str], on_output: OnOutput) -> TestProcess:
        global _starting
        _starting += 1
        try:
            process = await asyncio.create_subprocess_exec(
                *words,
                cwd=self._directory,
                env={**os.environ, **self._env},
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                start_new_session=True,  # a test may signal its group
                preexec_fn=partial(ask_kernel, os.getpid()),
            )
            _alive.add(process.pid)
        finally:
            _starting -= 1
        return LocalProcess(process, on_output)


class LocalProcess(TestProcess):
    def __init__(self, process: asyncio.subprocess.Process, on_output: OnOutput) -> None:
        self._process = process
        assert process.stdout is not None and process.stderr is not None
        self._reading = [
            asyncio.create_task(_read(process.stdout, partial(on_output, "stdout"))),
            asyncio.create_task(_read(process.stderr, partial(on_output, "stderr"))),
        ]

    async def send(self, data: bytes) -> None:
        stdin = self._process.stdin
        assert stdin is not None
        with contextlib.suppress(ConnectionError):
            stdin.write(data)
            await stdin.drain()

    def close_input(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()

    async def wait(self) -> str:
        code = await self._process.wait()
        await asyncio.wait(self._reading, timeout=DRAIN_S)
        for task in self._reading:
            task.cancel()
        _alive.discard(self._process.pid)
        await asyncio.to_thread(_end_left, self._process.pid)
        return exit_reason(code)

    async def show_stacks(self, pid: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(signal.SIGUSR2)

    async def kill(self) -> None:
        below: list[psutil.Process] = []
        with contextlib.suppress(psutil.Error):
            below = psutil.Process(self._process.pid).children(recursive=True)
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()
        _kill(below)
        await self._process.wait()


_alive: set[int] = set()
"""Test processes of this process: its other children are orphans that tests left behind."""
_starting = 0


def _end_left(session: int) -> None:
    """What a test process that has ended left: of its session, or adopted by this process."""
    left = [one for one in psutil.process_iter() if _session(one.pid) == session]
    if not _starting:
        for orphan in psutil.Process().children():
            if orphan.pid not in _alive:
                with contextlib.suppress(psutil.Error):
                    left += [orphan, *orphan.children(recursive=True)]
    _kill(left)
    psutil.wait_procs(left, timeout=1.0)


def _kill(processes: Sequence[psutil.Process]) -> None:
    for one in processes:
        with contextlib.suppress(psutil.Error):
            one.kill()


def _session(pid: int) -> int:
    try:
        return os.getsid(pid)
    except OSError:
        return 0


async def _read(stream: asyncio.StreamReader, tell: Callable[[bytes], None]) -> None:
    while data := await stream.read(PIECE):
        tell(data)
