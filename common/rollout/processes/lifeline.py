"""Child's side of ending with its parent, however the parent ends.

On Linux the kernel kills the child (`die_with_parent`). On every system a pipe whose writing end only the parent holds
closes with the parent (`hold`, `end_with_stdin`; `rollout.processes.parent` if the pipe is not stdin).

As a program, `lifeline.py PARENT_PID COMMAND...` becomes COMMAND on Linux; elsewhere it stays, and kills COMMAND's
process group when its stdin, a pipe from the parent, ends. It imports only a little of the standard library, because
processes that start often begin with it.
"""

from __future__ import annotations

import _thread
import ctypes
import os
import select
import signal
import sys
import time
from collections.abc import Callable

_PR_SET_PDEATHSIG = 1  # prctl(2)
_libc = ctypes.CDLL(None)  # before a fork: after it, another thread's lock on the loader would stay


def ask_kernel() -> None:
    """Ask for SIGKILL when the thread that started this process ends. Linux only; survives exec."""
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def die_with_parent(parent: int) -> bool:
    """End this process with its parent; return whether the kernel can do so (Linux)."""
    if sys.platform != "linux":
        return False
    ask_kernel()
    if os.getppid() != parent:  # it was faster
        os._exit(1)
    return True


def hold(parent: int) -> None:
    """End this process, the leader of its group, with `parent`: by the kernel, and by a thread that reads stdin.

    Stdin is empty for everything else afterwards.
    """
    die_with_parent(parent)
    line = os.dup(0)
    _empty_stdin()
    at_end(line, lambda: os.killpg(0, signal.SIGKILL))


def at_end(fd: int, act: Callable[[], None]) -> None:
    """Call `act` in a thread once the pipe `fd` has no writer any more, or broke."""

    def watch() -> None:
        try:
            while os.read(fd, 1):
                pass
        except OSError:
            pass
        act()

    _thread.start_new_thread(watch, ())


def end_with_stdin(grace_s: float) -> None:
    """Send this process SIGTERM once its stdin has no writer any more, and kill it `grace_s` seconds later.

    A clean exit can take long: a thread in a system call cannot be cancelled, and asyncio.run waits for it. Unread
    stdin is left unread.
    """
    poll = select.poll()
    poll.register(0, select.POLLHUP)

    def watch() -> None:
        while not any(event & ~select.POLLIN for _, event in poll.poll()):
            pass
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(grace_s)
        os._exit(0)

    _thread.start_new_thread(watch, ())


def _empty_stdin() -> None:
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)


def main() -> None:
    parent, command = int(sys.argv[1]), sys.argv[2:]
    try:
        if die_with_parent(parent):
            _empty_stdin()
            os.execvp(command[0], command)
        hold(parent)
        _, status = os.waitpid(os.posix_spawnp(command[0], command, os.environ), 0)
        sys.exit(os.waitstatus_to_exitcode(status))
    except OSError as e:
        sys.stderr.write(f"cannot run {command[0]}: {e.strerror}\n")
        sys.exit(127)


if __name__ == "__main__":
    main()
