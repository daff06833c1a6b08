"""Becomes a program of the product whenever it is asked to: it has imported them all, and forks.

Reads a line of JSON on the socket whose descriptor is its argument: `{"program", "args", "cwd", "env", "session"}`,
with four descriptors: the program's standard streams, and a pipe that gets its wait status once it has ended. Answers
with the process id.
"""

from __future__ import annotations

import atexit
import gc
import json
import os
import select
import signal
import socket
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any, NoReturn

MAINS = {
    "rollout": "rollout.cli.__main__",
    "rollout-coordinator": "rollout_coordinator.__main__",
    "rollout-worker": "rollout_worker.__main__",
}
LATER = (
    "aiosqlite",
    "cryptography.hazmat.backends.openssl.backend",
    "rollout.cli.session",
    "rollout.client",
    "rollout.storage.kv_sqlite",
    "rollout.workloads.infer.workload",
    "rollout.workloads.job.workload",
    "rollout.workloads.map.workload",
    "rollout.workloads.train.workload",
    "rollout_coordinator.ledger.postgres",
    "rollout_coordinator.ledger.sqlite",
    "rollout_coordinator.wiring",
    "rollout_worker.executors.infer",
    "rollout_worker.executors.job",
    "rollout_worker.executors.map",
    "rollout_worker.executors.train",
)
"""What the programs import when they have begun. Nothing here may start a thread or gRPC's own machinery."""


def next_program(control: socket.socket) -> tuple[dict[str, Any], list[int]]:
    """What this process is to be: returns in children only."""
    ends: dict[int, int] = {}
    ended, wakeup = socket.socketpair()  # readable when children have ended: they are counted outside of the handler
    ended.setblocking(False)
    wakeup.setblocking(False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wakeup.fileno(), warn_on_full_buffer=False)
    poll = select.poll()
    for one in (control, ended):
        poll.register(one, select.POLLIN)
    while True:
        ready = {fd for fd, _ in poll.poll()}
        if ended.fileno() in ready:
            ended.recv(1 << 16)
            reap(ends)
        if control.fileno() not in ready:
            continue
        line, fds, _, _ = socket.recv_fds(control, 1 << 16, 4)
        while line and not line.endswith(b"\n"):
            line += control.recv(1 << 16)
        if not line:
            os._exit(0)
        pid = os.fork()
        if pid == 0:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            signal.signal(signal.SIGINT, signal.default_int_handler)
            return json.loads(line), fds[:3]
        ends[pid] = fds[3]
        for fd in fds[:3]:
            os.close(fd)
        control.sendall(b"%d\n" % pid)


def reap(ends: dict[int, int]) -> None:
    while ends:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if not pid:
            return
        end = ends.pop(pid)
        with suppress(BrokenPipeError):  # nobody asks any more
            os.write(end, b"%d" % status)
        os.close(end)


def become(asked: dict[str, Any], streams: list[int], added: dict[str, str]) -> None:
    if asked["session"]:
        os.setsid()
    for standard, fd in enumerate(streams):
        os.dup2(fd, standard)
    os.closerange(3, os.sysconf("SC_OPEN_MAX"))
    for name, mode, buffering in (("stdin", "r", -1), ("stdout", "w", -1), ("stderr", "w", 1)):
        old = getattr(sys, name)
        new = open(old.fileno(), mode, buffering, old.encoding, old.errors, closefd=False)  # noqa: SIM115
        setattr(sys, name, new)  # the old one knows what its file was, a terminal perhaps
    os.chdir(asked["cwd"])
    os.environ.clear()
    os.environ.update(added | asked["env"])
    sys.argv = [str(Path(sys.executable).with_name(asked["program"])), *asked["args"]]


def run(main: Callable[[], Any]) -> NoReturn:
    """To its end, but without taking the interpreter apart, which takes longer than most commands."""
    code = 0
    try:
        main()
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    finally:
        threading._shutdown()  # pyright: ignore[reportAttributeAccessIssue]
        atexit._run_exitfuncs()
        sys.stdout.flush()
    os._exit(code)


def start(control: socket.socket) -> Callable[[], Any]:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the tests; programs have it back
    before = dict(os.environ)
    mains = {program: import_module(module).main for program, module in MAINS.items()}
    for module in LATER:
        import_module(module)
    added = {key: value for key, value in os.environ.items() if key not in before}
    gc.freeze()
    asked, streams = next_program(control)
    become(asked, streams, added)
    return mains[asked["program"]]


if __name__ == "__main__":
    run(start(socket.socket(fileno=int(sys.argv[1]))))
