"""Sandboxes that are podman containers, through the API it shares with Docker (`podman system service`)."""

from __future__ import annotations

import os
import resource
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from rollout_worker.sandboxes.engine_api import Engine
from rollout_worker.sandboxes.engine_provider import EngineProvider, EngineSettings
from rollout_worker.sandboxes.port import Price
from rollout_worker.sandboxes.settings import settings_of


class PodmanProvider(EngineProvider):
    name = "podman"

    def _engine_at(self, url: str) -> Engine:
        return Engine(url, globs=True)

    def _ulimits(self) -> list[dict[str, Any]]:
        """Ask for no more than this process has, because podman's defaults exceed what it may set without
        CAP_SYS_RESOURCE.

        podman lowers its own process limit to the largest pid.
        """
        found: list[dict[str, Any]] = []
        for name, kind, most in (
            ("nofile", resource.RLIMIT_NOFILE, resource.RLIM_INFINITY),
            ("nproc", resource.RLIMIT_NPROC, _largest_pid()),
        ):
            hard = min((n for n in (resource.getrlimit(kind)[1], most) if n != resource.RLIM_INFINITY), default=None)
            if hard is not None:
                found.append({"Name": name, "Soft": hard, "Hard": hard})
        return found


def _largest_pid() -> int:
    try:
        return int(Path("/proc/sys/kernel/pid_max").read_text())
    except OSError:  # not Linux: podman runs in a virtual machine
        return resource.RLIM_INFINITY


def open_podman(
    state: Path, config: Mapping[str, Any] = MappingProxyType({}), *, price: Price | None = None
) -> PodmanProvider:
    """Open the provider `podman`; use it with `async with`. Raises ConfigError if `config` is wrong."""
    settings = settings_of(EngineSettings, config, PodmanProvider.name)
    urls = [os.environ["CONTAINER_HOST"]] if os.environ.get("CONTAINER_HOST") else []
    sockets = [Path(f"/run/user/{os.getuid()}/podman/podman.sock")] if os.getuid() != 0 else []
    sockets.append(Path("/run/podman/podman.sock"))
    return PodmanProvider(state, settings, [*urls, *(f"unix://{path}" for path in sockets)], price=price)
