"""Mode `cdylib`: a shared library behind the C ABI, in a child process, so that a segfault does not kill the daemon."""

from __future__ import annotations

from rollout.model.errors import ConfigError
from rollout.plugins.manifest import Manifest

from rollout_worker.hosting.channel import Limits
from rollout_worker.hosting.running import Running, start_child


async def start(manifest: Manifest, limits: Limits) -> Running:
    """Start the process, not yet initialised. Raises ConfigError if the library is missing."""
    file = manifest.entry_file
    if file is None or not file.is_file():
        raise ConfigError(f"{manifest.path}: entry.cdylib.path: no such library {file}; build it first")
    init = {
        "name": manifest.name,
        "path": str(file),
        "max_reply_bytes": limits.max_reply_bytes // 2,  # base64 and the frame around it
        "config": manifest.config,
    }
    return await start_child(manifest, limits, "rollout_worker.hosting.cdylib_child", init)
