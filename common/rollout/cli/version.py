"""Installed version."""

from __future__ import annotations

import platform
from importlib.metadata import PackageNotFoundError, version

DISTRIBUTION = "rollout-engine"


def version_line(program: str = "rollout") -> str:
    """Return `rollout 0.1.0 (Python 3.11.7, Linux)`."""
    try:
        own = version(DISTRIBUTION)
    except PackageNotFoundError:
        own = "unknown (run from a checkout that is not installed)"
    return f"{program} {own} (Python {platform.python_version()}, {platform.system()})"
