"""The owner's end of its zygote and of its sandbox_inits: sockets, requests and answers."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import select
import socket
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rollout_worker.sandboxes.errors import SandboxCreateError, SandboxError, SandboxGoneError
from rollout_worker.sandboxes.programs import start_program
from rollout_worker.sandboxes.sandbox_init import MESSAGE_BYTES

_START_S = 30.0


def body_of(value: Mapping[str, Any]) -> int:
    """Return a descriptor from which the other side reads the value as JSON, of any size."""
    fd = os.memfd_create("request", os.MFD_CLOEXEC)
    try:
        with os.fdopen(fd, "wb", closefd=False) as file:
            file.write(json.dumps(value).encode(errors="surrogateescape"))
        os.lseek(fd, 0, os.SEEK_SET)
    except BaseException:
        os.close(fd)
        raise
    return fd


class Zygote:
    """The process `zygote.py`, which runs while this object is open."""

    def __init__(self, state: Path, owner: str) -> None:
        self._state = state
        self._owner = owner
        self._sock: socket.socket | None = None
        self._process: asyncio.subprocess.Process | None = None

    @property
    def pid(self) -> int:
        return self._process.pid if self._process else 0

    @property
    def alive(self) -> bool:
        """Whether it takes requests. A process that is killed closes its socket before its end is told."""
        if self._sock is None or self._process is None or self._process.returncode is not None:
            return False
        closed = select.poll()
        closed.register(self._sock, 0)
        return not closed.poll(0)

    async def start(self) -> None:
        """Start the process. Raises SandboxCreateError if it does not come up."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setblocking(False)
        with theirs:
            self._process = await start_program("zygote", "main", theirs.fileno(), str(self._state), self._owner)
        self._sock = ours
        try:
            said = await asyncio.wait_for(asyncio.get_running_loop().sock_recv(ours, 16), _START_S)
        except TimeoutError:
            said = b""
        if said != b"ready":
            raise SandboxCreateError(f"the process that makes sandboxes did not start ({sys.executable})")

    def make(self, config: Mapping[str, Any]) -> SandboxInit:
        """Request a sandbox; its sandbox_init reports when it is ready. Raises SandboxCreateError."""
        if self._sock is None:
            raise SandboxCreateError("the provider is not open")
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setblocking(False)
        body = body_of(config)
        try:
            with theirs:
                socket.send_fds(self._sock, [b"make"], [body, theirs.fileno()])
        except OSError as error:
            ours.close()
            raise SandboxCreateError(f"the process that makes sandboxes is gone: {error.strerror}") from error
        finally:
            os.close(body)
        return SandboxInit(ours)

    async def stop(self) -> None:
        """Stop the process, which first ends what is left."""
        if self._sock is not None:
            self._sock.close()
            self._sock = None
        if self._process is not None:
            await self._process.wait()


class SandboxInit:
    """The connection to one sandbox's sandbox_init."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._waiting: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._number = 0
        self.pid = 0  # once it is made
        self._loop = asyncio.get_running_loop()
        self.made: asyncio.Future[socket.socket | None] = self._loop.create_future()
        self.gone: asyncio.Future[None] = self._loop.create_future()
        self._loop.add_reader(sock.fileno(), self._receive)

    def _receive(self) -> None:
        try:
            data, fds, _, _ = socket.recv_fds(self._sock, MESSAGE_BYTES, 1)
        except BlockingIOError:
            return
        except OSError:
            data, fds = b"", []
        if not data:
            self._lose()
            return
        message: dict[str, Any] = json.loads(data)
        if "id" in message:
            waiting = self._waiting.pop(int(message["id"]), None)
            if waiting is not None and not waiting.done():
                waiting.set_result(message)
        elif self.made.done():
            for fd in fds:
                os.close(fd)
        elif "error" in message:
            self.made.set_exception(SandboxCreateError(f"the sandbox could not be made: {message['error']}"))
        else:
            self.pid = int(message["ready"])
            self.made.set_result(socket.socket(fileno=fds[0]) if fds else None)

    def _lose(self) -> None:
        self._loop.remove_reader(self._sock.fileno())
        self._sock.close()
        self.gone.set_result(None)
        if not self.made.done():
            self.made.set_exception(SandboxCreateError("the sandbox's process ended while it was made"))
            self.made.exception()  # whoever waited for it may have given up
        for waiting in self._waiting.values():
            if not waiting.done():
                waiting.set_exception(SandboxGoneError())
                waiting.exception()
        self._waiting.clear()

    def ask(self, op: str, fds: Sequence[int] = ()) -> asyncio.Future[dict[str, Any]]:
        """Send a request at once; the answer comes when what it started has ended. Raises SandboxGoneError."""
        answer: asyncio.Future[dict[str, Any]] = self._loop.create_future()
        self._number += 1
        try:
            if self.gone.done():
                raise SandboxGoneError
            message = json.dumps({"op": op, "id": self._number}).encode()
            if fds:
                socket.send_fds(self._sock, [message], list(fds))
            else:
                self._sock.send(message)
        except BlockingIOError as error:
            raise SandboxError("the sandbox's process takes no more requests") from error
        except OSError as error:
            raise SandboxGoneError from error
        self._waiting[self._number] = answer
        return answer

    async def end(self, patience_s: float) -> bool:
        """End the sandbox; return whether it ended in time."""
        if not self.gone.done():
            with contextlib.suppress(OSError):
                self._sock.send(b'{"op": "end"}')
            await asyncio.wait([self.gone], timeout=patience_s)
        return self.gone.done()
