"""Starts programs of the product in a tenth of the time: by forks of a process that has imported them.

They are processes of their own, with all that belongs to one, but they share the start of the interpreter and the
imports. What is told of that (variables of Python or of the locale, other programs) is started as ever.
"""

from __future__ import annotations

import atexit
import inspect
import json
import os
import select
import socket
import subprocess
import sys
import threading
from functools import cache
from pathlib import Path
from typing import Any

PROGRAMS = ("rollout", "rollout-coordinator", "rollout-worker")
READ_AT_START = ("GLIBC_", "LANG", "LC_", "MALLOC_", "PYTHON")
ENVIRONMENT = dict(os.environ)
"""Of the server."""


class Server:
    def __init__(self) -> None:
        self._control, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, str(Path(__file__).with_name("prefork_server.py")), str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                env=ENVIRONMENT,
            )
        self._lock = threading.Lock()
        atexit.register(self.close)

    def fork(self, asked: dict[str, Any], fds: list[int]) -> int:
        """The process id."""
        line = json.dumps(asked).encode() + b"\n"
        with self._lock:
            sent = socket.send_fds(self._control, [line], fds)
            self._control.sendall(line[sent:])
            return int(self._control.recv(32))

    def close(self) -> None:
        self._control.close()
        self._process.wait()


server = cache(Server)


Standard: Any = subprocess.Popen  # with what its stubs do not know, and every version that is supported has


class Popen(Standard):
    """As subprocess.Popen. The process is no child of this one: the server tells how it ended."""

    _ended = -1

    def _execute_child(self, *args: Any) -> None:
        asked = inspect.signature(super()._execute_child).bind(*args).arguments
        env = dict(os.environ) if asked["env"] is None else dict(asked["env"])
        command = [os.fspath(word) for word in asked["args"]] if not isinstance(asked["args"], str) else [asked["args"]]
        if not _can_be_forked(command, env) or asked["pass_fds"] or asked["preexec_fn"]:
            super()._execute_child(*args)
            return
        streams = [asked[name] for name in ("p2cread", "c2pwrite", "errwrite")]
        self._ended, theirs = os.pipe()
        self.pid = server().fork(
            {
                "program": Path(command[0]).name,
                "args": command[1:],
                "cwd": os.fspath(asked["cwd"] or Path.cwd()),
                "env": env,
                "session": asked["start_new_session"],
            },
            [*(fd if fd >= 0 else standard for standard, fd in enumerate(streams)), theirs],
        )
        self._child_created = True
        os.close(theirs)
        ends = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")
        self._close_pipe_fds(*(asked[name] for name in ends))

    def _internal_poll(self, *args: Any, **options: Any) -> int | None:
        if self._ended < 0:
            return super()._internal_poll(*args, **options)
        if self.returncode is None and self._waitpid_lock.acquire(blocking=False):
            try:
                pid, status = self._try_wait(os.WNOHANG)
                if pid:
                    self._handle_exitstatus(status)
            finally:
                self._waitpid_lock.release()
        return self.returncode

    def _try_wait(self, wait_flags: int) -> tuple[int, int]:
        if self._ended < 0:
            return super()._try_wait(wait_flags)
        poll = select.poll()
        poll.register(self._ended, select.POLLIN)
        if not poll.poll(0 if wait_flags & os.WNOHANG else None):
            return 0, 0
        status = int(os.read(self._ended, 16))
        os.close(self._ended)
        return self.pid, status


def _can_be_forked(command: list[str], env: dict[str, str]) -> bool:
    program = Path(command[0])
    ours = program.parent == Path(sys.executable).parent and program.name in PROGRAMS
    return ours and _read_at_start(env) == _read_at_start(ENVIRONMENT)


def _read_at_start(env: dict[str, str]) -> dict[str, str]:
    return {key: value for key, value in env.items() if key.startswith(READ_AT_START)}


def run(command: list[str], *, input: Any = None, timeout: float | None = None, **options: Any) -> Any:
    """As subprocess.run with `capture_output`."""
    stdin = subprocess.PIPE if input is not None else subprocess.DEVNULL
    options = {"stdin": stdin, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE} | options
    with Popen(command, **options) as process:
        try:
            out, err = process.communicate(input, timeout)
        except BaseException:
            process.kill()
            raise
        return subprocess.CompletedProcess(command, process.returncode, out, err)
