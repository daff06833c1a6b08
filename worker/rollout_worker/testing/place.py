"""Place where test processes start: on this host, in the project's directory."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import sys
import tempfile
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any, Literal

import psutil
from rollout.processes.child import PIPE
from rollout.processes.command import Process, start
from rollout.processes.descendants import kill_each, kill_with_descendants
from rollout.processes.exits import exit_text
from rollout.processes.pipe import Printed

from rollout_worker.sandboxes.kernel import adopt_orphans

Stream = Literal["stdout", "stderr"]
OnOutput = Callable[[Stream, bytes], None]
DRAIN_S = 0.3
"""Seconds to read output after the end: a process that a test left behind may hold the streams open forever."""


class TestProcess(ABC):
    """A started process. All its output is passed on before `wait` returns."""

    __test__ = False
    code: int | None = None
    """Exit code; negative for a signal; None while it runs, or if it is unknown."""

    @abstractmethod
    async def send(self, data: bytes) -> None:
        """Write to its stdin; nothing happens if it has ended."""

    @abstractmethod
    def close_input(self) -> None: ...

    @abstractmethod
    async def wait(self) -> str:
        """Wait for its end; return how it ended, in words."""

    @abstractmethod
    async def show_stacks(self, pid: int) -> None:
        """Ask it to print its stacks on stderr; `pid` is its own view of its pid."""

    @abstractmethod
    async def kill(self) -> None:
        """Kill it and everything it started."""


class Directory(ABC):
    """Empty directory for files of a process; `name` is its path there."""

    name: str

    @abstractmethod
    async def bring(self) -> Path:
        """Return its present content on this machine."""


class Place(ABC):
    runner: str
    """Path of pytest_runner.py as processes there see it."""

    @abstractmethod
    async def start(self, words: Sequence[str], on_output: OnOutput) -> TestProcess:
        """Start a process. Raises OSError."""

    @abstractmethod
    def directory(self) -> AbstractAsyncContextManager[Directory]:
        """Yield a directory that is removed at the end, with its copy here."""

    @abstractmethod
    async def files(self) -> list[str]:
        """Return the files at and below the tests' directory, relative to it. Raises SandboxError and OSError."""

    @abstractmethod
    async def fetch(self, name: str, target: Path) -> None:
        """Copy one of `files` to `target`. Raises SandboxError and OSError."""

    async def close(self) -> None:
        return


class LocalPlace(Place):
    """This host. `alone` says that this process has no other children; orphans of its test processes are then ended
    too."""

    def __init__(self, runner: Path, directory: Path, env: Mapping[str, str], *, alone: bool = False) -> None:
        self.runner = str(runner)
        self._directory = directory
        self._env = env
        self._alone = alone and sys.platform == "linux"
        if self._alone:
            adopt_orphans()

    async def start(self, words: Sequence[str], on_output: OnOutput) -> TestProcess:
        env = {**os.environ, **self._env}
        # Of a group of its own: a test may signal its group.
        process = start(
            words, cwd=self._directory, env=env, stdin=PIPE, stdout=PIPE, stderr=PIPE, group=True, buffered=False,
            held=True,
        )  # fmt: skip
        started = LocalProcess(process, self._alone)
        await started.read(on_output)
        return started

    @asynccontextmanager
    async def directory(self) -> AsyncGenerator[Directory]:
        path = await asyncio.to_thread(tempfile.mkdtemp, prefix="rollout-test-")
        try:
            yield LocalDirectory(Path(path))
        finally:
            await asyncio.to_thread(shutil.rmtree, path, ignore_errors=True)

    async def files(self) -> list[str]:
        return await asyncio.to_thread(self._files)

    def _files(self) -> list[str]:
        found = (path for path in self._directory.rglob("*") if path.is_file() and not path.is_symlink())
        return [path.relative_to(self._directory).as_posix() for path in found]

    async def fetch(self, name: str, target: Path) -> None:
        await asyncio.to_thread(shutil.copyfile, self._directory / name, target)


class LocalDirectory(Directory):
    def __init__(self, path: Path) -> None:
        self.name = str(path)
        self._path = path

    async def bring(self) -> Path:
        return self._path


class LocalProcess(TestProcess):
    """Local test process; asyncio's own processes are waited for until nobody holds their streams open."""

    def __init__(self, process: Process, alone: bool) -> None:
        _alive.add(process.pid)
        self._alone = alone
        self._process = process
        self._streams: list[Printed] = []

    async def read(self, on_output: OnOutput) -> None:
        pipes: dict[Stream, Any] = {"stdout": self._process.stdout, "stderr": self._process.stderr}
        for stream, pipe in pipes.items():
            self._streams.append(await Printed(partial(on_output, stream)).over(pipe))

    async def send(self, data: bytes) -> None:
        await asyncio.to_thread(self._send, data)

    def _send(self, data: bytes) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(OSError, ValueError):
            while data:
                data = data[self._process.stdin.write(data) :]

    def close_input(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()

    async def wait(self) -> str:
        code = self.code = await asyncio.to_thread(self._process.wait)
        await asyncio.wait([stream.end for stream in self._streams], timeout=DRAIN_S)
        for stream in self._streams:
            stream.close()
        self.close_input()
        _alive.discard(self._process.pid)
        await asyncio.to_thread(_end_left, self._process.pid, self._alone)
        return exit_text(code)

    async def show_stacks(self, pid: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(signal.SIGUSR2)

    async def kill(self) -> None:
        kill_with_descendants(self._process.pid, self._process.kill)


_alive: set[int] = set()
"""Test processes of this process; its other children are orphans that tests left behind."""


def _end_left(session: int, alone: bool) -> None:
    """End what an ended test process left: members of its session, or processes that this one adopted."""
    left = [one for one in psutil.process_iter() if _session(one.pid) == session]
    for orphan in psutil.Process().children() if alone else ():
        if orphan.pid not in _alive:
            with contextlib.suppress(psutil.Error):
                left += [orphan, *orphan.children(recursive=True)]
    kill_each(left)
    psutil.wait_procs(left, timeout=1.0)


def _session(pid: int) -> int:
    try:
        return os.getsid(pid)
    except OSError:
        return 0
