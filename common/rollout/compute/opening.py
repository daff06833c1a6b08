"""Opens the configured compute adapter."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rollout.compute import local
from rollout.compute.auto import AutoCompute
from rollout.compute.port import Compute
from rollout.config.adapters import load_adapter
from rollout.config.cloud import NO_CLOUD, CloudSection
from rollout.config.settings import ComputeSection

GROUP = "rollout.compute"
_OF_PROVIDER = {"aws": "ec2", "gcp": "gce"}


def open_compute(section: ComputeSection, cloud: CloudSection = NO_CLOUD) -> Compute:
    """Open `[compute] backend`; if it is empty, that of `[cloud] provider` if its metadata service responds, else the
    local one. Raises ConfigError if no installed package provides it."""
    name = section.backend or _OF_PROVIDER.get(cloud.provider, "local")
    factory: Callable[[ComputeSection, CloudSection], Any] = load_adapter(GROUP, name, "[compute] backend")
    opened = factory(section, cloud)
    if section.backend or name == "local":
        return opened
    return AutoCompute(opened, local.open_compute(section, cloud))
