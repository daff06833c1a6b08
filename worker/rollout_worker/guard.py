"""Ends what a killed daemon leaves behind. A process of its own, standard library only: `guard.py SCRATCH_DIR`.

It reads "+PGID" and "-PGID" lines from its stdin, a pipe whose other end only the daemon holds. However the daemon
ends, also by SIGKILL, the pipe closes: then every group still listed is killed, grandchildren included, also those
whose interpreter is stuck, and the daemon's scratch directory is removed.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys


def main() -> None:
    for ignored in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(ignored, signal.SIG_IGN)
    groups: set[int] = set()
    for line in sys.stdin:
        sign, number = line[:1], line[1:].strip()
        if number.isdigit():
            (groups.add if sign == "+" else groups.discard)(int(number))
    for group in groups:
        try:
            os.killpg(group, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            continue
    shutil.rmtree(sys.argv[1], ignore_errors=True)


if __name__ == "__main__":
    main()
