"""Limit of open files and connections of a process."""

from __future__ import annotations

import resource
from contextlib import suppress

_MANY = 1 << 20
_MACOS_MOST = 10_240  # OPEN_MAX there: more is refused where the hard limit says "unlimited"


def raise_open_files() -> int:
    """Raise the soft limit of open files to the hard limit, and return the limit in force.

    Shells and systemd set 1024 by default, for old programs that cannot count further. Each worker and client takes a
    few.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        wanted = _MANY if hard == resource.RLIM_INFINITY else hard
        for limit in (wanted, min(wanted, _MACOS_MOST)):
            if soft != resource.RLIM_INFINITY and limit > soft:
                with suppress(OSError, ValueError):
                    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
                    break
    return open_files_limit()


def open_files_limit() -> int:
    """Return the soft limit in force."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return _MANY if soft == resource.RLIM_INFINITY else soft
