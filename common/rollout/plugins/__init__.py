"""The interface for plugin authors, the manifest, and the checks that a plugin must pass."""

from __future__ import annotations

from rollout.plugins.api import Environment, reward
from rollout.plugins.manifest import Manifest, load_manifest

__all__ = ["Environment", "Manifest", "load_manifest", "reward"]
