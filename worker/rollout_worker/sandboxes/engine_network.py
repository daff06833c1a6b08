"""A container's network from outside: this host's root opens listeners in it, and its way out."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Self, TypeVar

from rollout_worker.sandboxes import kernel, uplink
from rollout_worker.sandboxes.programs import start_program

T = TypeVar("T")


def listen_in(pid: int, port: int) -> socket.socket:
    """Listen at 127.0.0.1 in the network namespace of a process of this host. Raises OSError if forbidden."""
    return _in_network_of(pid, lambda: socket.create_server(("127.0.0.1", port), backlog=128))


def can_lead_out(pid: int, nodes: Path) -> None:
    """Raise OSError with the reason if this process's network cannot have a way out."""
    device, listener = _in_network_of(pid, lambda: uplink.attach(str(nodes)))
    os.close(device)
    listener.close()


class WayOut:
    """The process that carries the packets of one container; see `uplink`. It ends with this process."""

    def __init__(self, process: asyncio.subprocess.Process, sock: socket.socket) -> None:
        self._process = process
        self._sock = sock

    @classmethod
    async def start(cls, nameservers: Sequence[str], listed: Sequence[str]) -> Self:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            with theirs:
                told = json.dumps(list(nameservers)), json.dumps(list(listed))
                process = await start_program("uplink", "run", theirs.fileno(), *told)
        except BaseException:
            ours.close()
            raise
        return cls(process, ours)

    def lead_from(self, pid: int, nodes: Path) -> None:
        """Open the way out of the network of this process. Blocks. Raises OSError."""
        device, listener = _in_network_of(pid, lambda: uplink.attach(str(nodes)))
        with listener:
            try:
                socket.send_fds(self._sock, [b"x"], [device, listener.fileno()])
            finally:
                os.close(device)

    async def stop(self) -> None:
        self._sock.close()
        await self._process.wait()


def _in_network_of(pid: int, work: Callable[[], T]) -> T:
    """Run `work` in a thread of its own, because a namespace belongs to a thread (setns(2)). Raises OSError."""
    found: list[T] = []
    faults: list[OSError] = []

    def enter() -> None:
        try:
            namespace = os.open(f"/proc/{pid}/ns/net", os.O_RDONLY | os.O_CLOEXEC)
            try:
                kernel.setns(namespace, kernel.NEWNET)
            finally:
                os.close(namespace)
            found.append(work())
        except OSError as error:
            faults.append(error)

    thread = threading.Thread(target=enter, name="in-network-of-container")
    thread.start()
    thread.join()
    if faults:
        raise faults[0]
    return found[0]
