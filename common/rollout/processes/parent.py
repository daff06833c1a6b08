"""Ends a process with the one that started it.

Embedded mode starts daemons as children and hands each the reading end of a pipe whose writing end only the parent
holds. However the parent ends, even by SIGKILL, the pipe closes, on every operating system.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable, Mapping

from rollout.processes.lifeline import at_end

PARENT_FD = "ROLLOUT_PARENT_FD"
GRACE_S = 8.0
"""Seconds that a daemon has after its parent's end before it is killed."""


def has_parent() -> bool:
    """Return whether this process was started by one that it ends with."""
    return os.environ.get(PARENT_FD, "").isdigit()


def watch_parent(
    callback: Callable[[], None],
    *,
    environ: Mapping[str, str] | None = None,
    grace_s: float = GRACE_S,
) -> bool:
    """Call `callback` once when the parent has ended. Returns False, and does nothing, if no parent asked for that.

    The callback runs in the running event loop, or else in a thread. `grace_s` seconds later the process is killed,
    with its process group if it leads one. Call this as early as possible.
    """
    text = (os.environ if environ is None else environ).get(PARENT_FD, "")
    if not text.isdigit():
        return False
    fd = int(text)
    try:
        os.set_inheritable(fd, False)
    except OSError:
        return False  # inherited the variable, not the pipe: a grandchild
    try:
        loop = asyncio.get_running_loop()
    except RuntimeError:
        loop = None
    at_end(fd, lambda: _end(callback, loop, grace_s))
    return True


def _end(callback: Callable[[], None], loop: asyncio.AbstractEventLoop | None, grace_s: float) -> None:
    try:
        if loop is None:
            callback()
        else:
            loop.call_soon_threadsafe(callback)
    except RuntimeError:
        pass  # the loop has ended already: so is the process about to
    finally:
        time.sleep(grace_s)
        if os.getpgid(0) == os.getpid():
            os.killpg(0, signal.SIGKILL)
        os._exit(1)
