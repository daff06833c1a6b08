"""Registries: the one that an image's name refers to, and its login."""

from __future__ import annotations

import ipaddress
import json
import os
from pathlib import Path
from typing import Any

DOCKER_HUB = "docker.io"


def registry_of(name: str) -> str:
    """Return the registry of `[registry/]repository[:tag][@digest]`, with Docker's default."""
    first, slash, _ = name.partition("/")
    named = slash and ("." in first or ":" in first or first == "localhost")
    return DOCKER_HUB if not named or first == f"index.{DOCKER_HUB}" else first


def is_here(registry: str) -> bool:
    """Return whether a registry is on this machine; such registries speak HTTP, as for Docker."""
    name = registry.rpartition(":")[0] if ":" in registry else registry
    try:
        return name == "localhost" or ipaddress.ip_address(name.strip("[]")).is_loopback
    except ValueError:
        return False


def login_of(registry: str) -> str | None:
    """Return the login that `docker login` or `podman login` stored in its file, `user:password` in base64, or None."""
    names = ("https://index.docker.io/v1/", DOCKER_HUB) if registry == DOCKER_HUB else (registry, f"https://{registry}")
    places = [
        Path(os.environ.get("REGISTRY_AUTH_FILE", "")),
        Path(os.environ.get("DOCKER_CONFIG") or Path.home() / ".docker") / "config.json",
        Path(os.environ.get("XDG_RUNTIME_DIR") or "/run") / "containers" / "auth.json",
    ]
    for path in places:
        try:
            found: dict[str, dict[str, Any]] = json.loads(path.read_bytes()).get("auths") or {}
        except (OSError, ValueError):
            continue
        for name in names:
            if name in found and found[name].get("auth"):
                return str(found[name]["auth"])
    return None
