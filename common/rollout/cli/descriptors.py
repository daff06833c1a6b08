"""How many files and connections a process may have open."""

from __future__ import annotations

import resource
from contextlib import suppress

_MANY = 1 << 20
_MACOS_MOST = 10_240  # OPEN_MAX there: more is refused where the hard limit says "unlimited"


def raise_open_files() -> int:
    """Raise the soft limit of open files to the hard one; the limit in force. Shells and systemd give 1024 by default,
    for programs of old that cannot count further; each worker and each client takes a few."""
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
    """The soft limit in force."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return _MANY if soft == resource.RLIM_INFINITY else soft
