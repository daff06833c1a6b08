"""Daemon that loads its modules before it is known whether it is needed.

It opens and writes nothing until then. If its stdin delivers the path of its output file and then ends, it runs. If its
stdin ends without one, it is not needed.
"""

from __future__ import annotations

import gc
import importlib
import os
import sys

from rollout.processes.interpreter import python_module


def standby(package: str, *arguments: str) -> list[str]:
    """Return the command of a process that waits, and then is `python -m package arguments`.

    The package's `__main__` has a function `main`.
    """
    return python_module("rollout.processes.standby", package, *arguments)


def main() -> None:
    package, *arguments = sys.argv[1:]
    gc.disable()  # importing makes many objects and no garbage
    module = importlib.import_module(f"{package}.__main__")
    gc.enable()
    log = sys.stdin.buffer.read()
    if not log:
        os._exit(0)
    output, null = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666), os.open(os.devnull, os.O_RDONLY)
    for source, target in ((null, 0), (output, 1), (output, 2)):
        os.dup2(source, target)
    os.close(output)
    os.close(null)
    sys.argv[1:] = arguments
    module.main()


if __name__ == "__main__":
    main()
