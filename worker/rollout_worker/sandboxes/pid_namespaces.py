"""Find and end processes of another pid namespace of this machine from outside. Standard library only."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path


def all_processes() -> Iterator[int]:
    return (int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit())


def beside(first: int) -> list[int]:
    """Return the other processes of the namespace whose pid 1 is `first`; none if it has ended or is another user's.

    Also none if it is not pid 1 of a namespace, or is in the namespace of this process: that is no sandbox's.
    """
    if not _is_first(first):
        return []
    namespace = _namespace(first)
    if namespace in (None, _namespace(os.getpid())):
        return []
    return [pid for pid in all_processes() if pid != first and _namespace(pid) == namespace]


def end_others(first: int, patience_s: float) -> bool:
    """End all processes of a namespace but its first, which is stopped meanwhile. Return whether that succeeded.

    Others are stopped first too and start nothing, so that even processes that fork all the time are ended, unless
    there are more than can be stopped in time.
    """
    until = time.monotonic() + patience_s
    if not _is_first(first) or _namespace(first) in (None, _namespace(os.getpid())):
        return False
    try:
        with contextlib.suppress(ProcessLookupError):
            os.kill(first, signal.SIGSTOP)
        while others := [pid for pid in beside(first) if not _has_ended(pid)]:
            if time.monotonic() > until:
                return False
            for number in (signal.SIGSTOP, signal.SIGKILL):
                for pid in others:
                    _send(pid, first, number)
            time.sleep(0.001)
        return True
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(first, signal.SIGCONT)


def _send(pid: int, first: int, number: signal.Signals) -> None:
    """Signal a process if it is still in the namespace, because pids are reused."""
    try:
        fd = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        if _namespace(pid) == _namespace(first):
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(fd, number)
    finally:
        os.close(fd)


def _namespace(pid: int) -> str | None:
    try:
        return str(Path(f"/proc/{pid}/ns/pid").readlink())
    except OSError:
        return None


def _is_first(pid: int) -> bool:
    """Return whether it is pid 1 of a namespace below ours."""
    try:
        text = Path(f"/proc/{pid}/status").read_text(errors="replace")
    except OSError:
        return False
    return any(line.startswith("NSpid:") and line.split()[2:][-1:] == ["1"] for line in text.splitlines())


def _has_ended(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[0] == b"Z"
    except OSError:
        return True
