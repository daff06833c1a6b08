"""Children that end with the worker, however it ends. Standard library only: sidecars are started through this file.

As a program, `lifeline.py PARENT_PID COMMAND...` becomes COMMAND on Linux, where the kernel kills it with its parent;
elsewhere it stays and kills COMMAND's process group when its stdin, a pipe from the parent, ends.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import threading

_PR_SET_PDEATHSIG = 1


def ask_kernel(parent: int) -> bool:
    """SIGKILL for this process when `parent` dies, if the kernel can (Linux). Survives exec."""
    if sys.platform != "linux":
        return False
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # it was faster
        os._exit(1)
    return True


def hold(parent: int) -> None:
    """For a child of ours: the kernel's signal, and a thread on stdin. Afterwards stdin is empty for the plugin."""
    ask_kernel(parent)
    line = os.dup(0)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)

    def watch() -> None:
        try:
            while os.read(line, 1):
                pass
        finally:
            os.killpg(0, signal.SIGKILL)  # the host made this process the leader of a group

    threading.Thread(target=watch, name="lifeline", daemon=True).start()


def main() -> None:
    parent, command = int(sys.argv[1]), sys.argv[2:]
    if ask_kernel(parent):
        null = os.open(os.devnull, os.O_RDONLY)
        os.dup2(null, 0)
        try:
            os.execvp(command[0], command)
        except OSError as e:
            sys.stderr.write(f"cannot run {command[0]}: {e.strerror}\n")
            sys.exit(127)
    hold(parent)
    sys.exit(subprocess.call(command))


if __name__ == "__main__":
    main()
