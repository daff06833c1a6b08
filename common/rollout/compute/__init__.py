"""What a host offers, and the notice that it is about to be taken away."""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import entry_points
from typing import cast

from rollout.compute.port import Compute, Gpu, Host, Preemption
from rollout.config.settings import ComputeSection
from rollout.model.errors import ConfigError

__all__ = ["Compute", "Gpu", "Host", "Preemption", "open_compute"]

GROUP = "rollout.compute"


def open_compute(section: ComputeSection) -> Compute:
    """What `[compute] backend` names. ConfigError if no installed package provides it."""
    found = entry_points(group=GROUP)
    if section.backend not in found.names:
        raise ConfigError(
            f'[compute] backend = "{section.backend}" is not installed; known: '
            f"{', '.join(sorted(found.names)) or 'none'}. A package provides one through the entry point group {GROUP}"
        )
    return cast(Callable[[ComputeSection], Compute], found[section.backend].load())(section)
