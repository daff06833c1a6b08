"""Kills a process and everything it has started, in whatever group or session that is by now."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import suppress

import psutil


def kill_with_descendants(pid: int, kill: Callable[[], None]) -> None:
    """Kill the process `pid` by `kill`, and its descendants, which are found before it ends and they lose their
    parent."""
    below: list[psutil.Process] = []
    with suppress(psutil.Error):
        below = psutil.Process(pid).children(recursive=True)
    kill()
    kill_each(below)


def kill_each(processes: Iterable[psutil.Process]) -> None:
    for one in processes:
        with suppress(psutil.Error):
            one.kill()
