"""The frameworks whose tests can be found and run, by name."""

from __future__ import annotations

from collections.abc import Mapping

from rollout.workloads.test.frameworks.cargo import Cargo
from rollout.workloads.test.frameworks.default import Default
from rollout.workloads.test.frameworks.go import Go
from rollout.workloads.test.frameworks.javascript import Jest, Vitest
from rollout.workloads.test.frameworks.port import Framework
from rollout.workloads.test.frameworks.pytest import Pytest

FRAMEWORKS: Mapping[str, Framework] = {one.name: one for one in (Pytest(), Cargo(), Vitest(), Jest(), Go(), Default())}
"""Frameworks by `FrameworkSection.kind`."""
