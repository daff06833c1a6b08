"""Plugins in their three modes (python, sidecar, cdylib), each in a process of its own."""

from __future__ import annotations

from rollout_worker.hosting.channel import Limits
from rollout_worker.hosting.host import PluginHost

__all__ = ["Limits", "PluginHost"]
