"""A container's network from outside: a socket that listens in it, for the proxy of an allowlist."""

from __future__ import annotations

import os
import socket
import threading

from rollout_worker.sandboxes import kernel


def listen_in(pid: int, port: int) -> socket.socket:
    """A socket at 127.0.0.1 of the network namespace of a process of this host. OSError: we may not.

    A thread of its own goes there and ends: a namespace belongs to a thread (setns(2)).
    """
    found: list[socket.socket] = []
    faults: list[OSError] = []

    def work() -> None:
        try:
            namespace = os.open(f"/proc/{pid}/ns/net", os.O_RDONLY | os.O_CLOEXEC)
            try:
                kernel.setns(namespace, kernel.NEWNET)
            finally:
                os.close(namespace)
            found.append(socket.create_server(("127.0.0.1", port), backlog=128))
        except OSError as error:
            faults.append(error)

    thread = threading.Thread(target=work, name="listen-in-container")
    thread.start()
    thread.join()
    if faults:
        raise faults[0]
    return found[0]
