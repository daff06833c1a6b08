"""A child ends with the process that holds the other end of its pipe, cleanly, or hard when it hangs."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading

from rollout.processes.parent import PARENT_FD, watch_parent

CHILD = """
import sys, threading
from rollout.processes.parent import watch_parent
gone = threading.Event()
assert watch_parent(gone.set if sys.argv[1] == "clean" else (lambda: None), grace_s=0.2)
print("up", flush=True)
gone.wait()
print("clean", flush=True)
"""


def start(kind: str) -> tuple[subprocess.Popen[str], int]:
    read, write = os.pipe()
    process = subprocess.Popen(
        [sys.executable, "-c", CHILD, kind],
        env=os.environ | {PARENT_FD: str(read)},
        pass_fds=(read,),
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    os.close(read)
    assert process.stdout is not None
    assert process.stdout.readline() == "up\n"
    return process, write


def test_a_child_ends_cleanly() -> None:
    process, write = start("clean")
    os.close(write)
    out, _ = process.communicate(timeout=60)
    assert out == "clean\n"
    assert process.returncode == 0


def test_a_child_that_hangs_is_ended() -> None:
    process, write = start("hangs")
    os.close(write)
    process.communicate(timeout=60)
    assert process.returncode == -signal.SIGKILL


def test_nothing_is_watched_unless_asked() -> None:
    assert not watch_parent(lambda: None, environ={})
    assert not watch_parent(lambda: None, environ={PARENT_FD: "x"})
    assert not watch_parent(lambda: None, environ={PARENT_FD: "987654"})
    assert not [t for t in threading.enumerate() if t.name == "parent-watch"]
