"""Sandboxes that are containers of a Docker engine."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from rollout_worker.sandboxes.engine_provider import EngineProvider, EngineSettings
from rollout_worker.sandboxes.port import Price
from rollout_worker.sandboxes.settings import settings_of


class DockerProvider(EngineProvider):
    name = "docker"


def open_docker(
    state: Path, config: Mapping[str, Any] = MappingProxyType({}), *, price: Price | None = None
) -> DockerProvider:
    """Return the provider `docker`; use it with `async with`. Raises ConfigError if `config` is wrong."""
    settings = settings_of(EngineSettings, config, DockerProvider.name)
    urls = [os.environ["DOCKER_HOST"]] if os.environ.get("DOCKER_HOST") else []
    sockets = [Path("/var/run/docker.sock"), Path.home() / ".docker/run/docker.sock"]
    return DockerProvider(state, settings, [*urls, *(f"unix://{path}" for path in sockets)], price=price)
