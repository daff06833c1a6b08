"""Mode `python`: the author's module in its own slot process."""

from __future__ import annotations

import sys

from rollout.model.errors import ConfigError
from rollout.plugins.manifest import Manifest

from rollout_worker.hosting.channel import Limits
from rollout_worker.hosting.running import Running, start_child


async def start(manifest: Manifest, limits: Limits) -> Running:
    """Start the process, not yet initialised. Raises ConfigError if this Python is too old for the plugin."""
    wanted = tuple(map(int, manifest.runtime.python_min.split(".")))
    if sys.version_info[:2] < wanted:
        raise ConfigError(
            f"{manifest.path}: the plugin wants Python {manifest.runtime.python_min}, this worker runs "
            f"{sys.version_info.major}.{sys.version_info.minor}"
        )
    entry = manifest.entry.python
    assert entry is not None
    init = {
        "name": manifest.name,
        "kind": manifest.kind,
        "module": entry.module,
        "factory": entry.factory,
        "path": str((manifest.directory / entry.path).resolve()),
        "concurrency": manifest.runtime.concurrency,
        "config": manifest.config,
    }
    return await start_child(manifest, limits, "rollout_worker.hosting.python_child", init)
