"""The frameworks whose tests can be found and run, by name."""

from __future__ import annotations

from collections.abc import Mapping

from rollout.workloads.test.frameworks.port import Framework
from rollout.workloads.test.frameworks.pytest import Pytest

FRAMEWORKS: Mapping[str, Framework] = {one.name: one for one in (Pytest(),)}
"""By `FrameworkSection.kind`."""
