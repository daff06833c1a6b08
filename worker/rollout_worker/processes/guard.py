"""Ends what a killed daemon leaves behind. Its own process, standard library only: `guard.py SCRATCH_DIR`.

It reads "+PGID" and "-PGID" lines from its stdin, a pipe whose other end only the daemon holds. However the daemon
ends, even by SIGKILL, the pipe closes. Every group still listed is then killed, including grandchildren and processes
whose interpreter is stuck, and the daemon's scratch directory is removed.

"/PATH" names a directory of control groups, which is removed at the end too.

"=PGID SECONDS" kills a listed group at that time of `clock`; "=PGID 0" cancels that. Groups with exclusive attempts
have such a time, which the daemon postpones while the coordinator answers. They therefore end even if the daemon is
stopped or hangs and cannot fence itself.
"""

from __future__ import annotations

import os
import select
import shutil
import signal
import sys
import time
from pathlib import Path

REMOVE_S = 5.0  # at most, until the kernel lets go of killed processes' control groups
LOOK_S = 0.25  # at the clock, at most: a wait does not end earlier because the machine slept


def clock() -> float:
    """Return seconds of a clock that includes the machine's sleep, if the system has one."""
    boottime = getattr(time, "CLOCK_BOOTTIME", None)
    return time.monotonic() if boottime is None else time.clock_gettime(boottime)


def kill(group: int) -> None:
    try:
        os.killpg(group, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        return


def remove_groups(base: Path) -> None:
    until = time.monotonic() + REMOVE_S
    while base.is_dir() and time.monotonic() < until:
        try:
            for path in [p for p in base.iterdir() if p.is_dir()]:
                path.rmdir()
            base.rmdir()
        except OSError:
            time.sleep(0.02)


def main() -> None:
    for ignored in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(ignored, signal.SIG_IGN)
    groups: dict[int, float] = {}  # when each is to be killed; 0: not before the daemon ends
    control_groups = ""
    rest = b""
    while True:
        now = clock()
        for group in [g for g, at in groups.items() if at and at <= now]:
            kill(group)
            groups[group] = 0.0
        times = [at - now for at in groups.values() if at]
        ready = select.select([0], [], [], min(LOOK_S, *times) if times else None)[0]
        if not ready:
            continue
        data = os.read(0, 1 << 16)
        if not data:
            break
        *lines, rest = (rest + data).split(b"\n")
        for line in lines:
            sign, words = line[:1], line[1:].split()
            if sign == b"+":
                groups[int(words[0])] = 0.0
            elif sign == b"-":
                groups.pop(int(words[0]), None)
            elif sign == b"/":
                control_groups = os.fsdecode(line[1:])
            elif int(words[0]) in groups:
                groups[int(words[0])] = float(words[1])
    for group in groups:
        kill(group)
    if control_groups:
        remove_groups(Path(control_groups))
    shutil.rmtree(sys.argv[1], ignore_errors=True)


if __name__ == "__main__":
    main()
