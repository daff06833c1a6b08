"""What a host offers, and the notice that it is about to be taken away."""

from __future__ import annotations

from collections.abc import Callable

from rollout.compute.port import Compute, Gpu, Host, Preemption
from rollout.config.adapters import load_adapter
from rollout.config.cloud import NO_CLOUD, CloudSection
from rollout.config.settings import ComputeSection

__all__ = ["Compute", "Gpu", "Host", "Preemption", "open_compute"]

GROUP = "rollout.compute"


def open_compute(section: ComputeSection, cloud: CloudSection = NO_CLOUD) -> Compute:
    """What `[compute] backend` names. ConfigError if no installed package provides it."""
    factory: Callable[[ComputeSection, CloudSection], Compute] = load_adapter(
        GROUP, section.backend, "[compute] backend"
    )
    return factory(section, cloud)
