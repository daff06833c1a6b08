"""Sandboxes that are containers of podman, through the API that it shares with Docker (`podman system service`)."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from rollout_worker.sandboxes.engine_provider import EngineProvider, EngineSettings
from rollout_worker.sandboxes.local_sandbox import Price
from rollout_worker.sandboxes.settings import settings_of


class PodmanProvider(EngineProvider):
    name = "podman"


def open_podman(
    state: Path, config: Mapping[str, Any] = MappingProxyType({}), *, price: Price | None = None
) -> PodmanProvider:
    """The provider `podman`; use it with `async with`. ConfigError: of `config`."""
    settings = settings_of(EngineSettings, config, PodmanProvider.name)
    urls = [os.environ["CONTAINER_HOST"]] if os.environ.get("CONTAINER_HOST") else []
    sockets = [Path(f"/run/user/{os.getuid()}/podman/podman.sock")] if os.getuid() != 0 else []
    sockets.append(Path("/run/podman/podman.sock"))
    return PodmanProvider(state, settings, [*urls, *(f"unix://{path}" for path in sockets)], price=price)
