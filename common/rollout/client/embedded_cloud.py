"""`[cloud]` of a private cluster: written into the files of its coordinator and workers, and read from there by
commands that are not told."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rollout.config.cloud import NO_CLOUD, CloudSection
from rollout.config.load import load_settings
from rollout.config.settings import CoordinatorSettings

COORDINATOR_FILE = "coordinator.toml"


def cloud_sections(cloud: CloudSection) -> dict[str, dict[str, Any]]:
    """As sections of a file; none where there is no provider."""
    given = cloud.model_dump(exclude_unset=True)
    if not cloud.provider:
        return {}
    sections = {"cloud": {key: value for key, value in given.items() if not isinstance(value, dict)}}
    for key, value in given.items():
        if isinstance(value, dict):
            sections[f"cloud.{key}"] = value
    return sections


def cloud_of(state: Path) -> CloudSection:
    """Of the private cluster in `state`; none where there is no such cluster yet."""
    path = state / COORDINATOR_FILE
    return load_settings(CoordinatorSettings, path, environ={}).cloud if path.is_file() else NO_CLOUD


def secrets_section(cloud: CloudSection) -> dict[str, Any]:
    """`[secrets]` of its workers: what the cloud's allowlist has, else of the environment."""
    return {} if cloud.secrets.allowlist else {"allow": ["HF_TOKEN"]}


def waited_for(event: dict[str, Any]) -> str:
    """What a coordinator that cannot reach its objects says, for people."""
    at = f" at {event['endpoint']}" if event.get("endpoint") else ""
    return f"{event.get('place')}{at} does not answer; trying for 60 s"
