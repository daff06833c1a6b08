"""The single process of a provider that makes sandboxes, and cleans up when their owner ends for whatever reason.

`main` takes the arguments FD STATE OWNER.

It imports only the standard library and has one thread: the first process of a sandbox (`sandbox_init`) is its fork,
made within a millisecond, and may make system calls that a process with threads may not. FD is a socket whose other end
only the owner holds.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import select
import signal
import socket
import sys
from pathlib import Path
from typing import Any

from rollout_worker.sandboxes import kernel, sandbox_init
from rollout_worker.sandboxes.claims import Journal


def main() -> None:
    fd, state, owner = sys.argv[1:4]
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # a terminal's Ctrl-C: the owner decides
        signal.signal(number, signal.SIG_IGN)
    os.umask(0o022)
    journal = Journal(Path(state))
    lock = journal.hold_owner(owner)
    kernel.adopt_orphans()  # the children of sandbox_inits, so that all can be waited for
    with socket.socket(fileno=int(fd)) as sock:
        gc.collect()
        gc.freeze()  # forks need not copy these objects for reference counts
        gc.disable()
        sock.send(b"ready")
        sandbox_inits = serve(sock, lock)
    clear(journal, owner, sandbox_inits)


def serve(sock: socket.socket, lock: int) -> set[int]:
    """Serve until the owner's end is closed, and return the pids of sandbox_inits that have not ended."""
    wake, waker = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
    signal.set_wakeup_fd(waker, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, sandbox_init.wake_up)
    sandbox_inits: set[int] = set()
    while True:
        readable, _, _ = select.select([sock, wake], [], [])
        if wake in readable:
            with contextlib.suppress(BlockingIOError):
                os.read(wake, 4096)
            with contextlib.suppress(ChildProcessError):
                while pid := os.waitpid(-1, os.WNOHANG)[0]:
                    sandbox_inits.discard(pid)
        if sock in readable:
            data, fds, _, _ = socket.recv_fds(sock, 16, 2)
            if not data:
                return sandbox_inits
            body, end = fds
            pid = os.fork()
            if pid == 0:
                signal.set_wakeup_fd(-1)
                for fd in (sock.detach(), lock, wake, waker):  # the lock must live only as long as the zygote
                    os.close(fd)
                config: dict[str, Any] = json.loads(sandbox_init.read_all(body))
                os.close(body)
                sandbox_init.main(socket.socket(fileno=end), config)
            sandbox_inits.add(pid)
            for fd in fds:
                os.close(fd)


def clear(journal: Journal, owner: str, sandbox_inits: set[int]) -> None:
    """End sandbox_inits, and with them their sandboxes' processes; then remove their files and control groups."""
    signal.set_wakeup_fd(-1)
    for pid in sandbox_inits:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    claims = journal.of(owner)
    for claim in claims:  # processes without a namespace are our children now
        with contextlib.suppress(OSError):
            journal.end_processes(claim)
    with contextlib.suppress(ChildProcessError):
        while True:
            os.waitpid(-1, 0)
    for claim in claims:
        with contextlib.suppress(OSError):  # the claim stays: the next owner retries and reports why it fails
            journal.clear(claim)
    journal.drop_owner(owner)
