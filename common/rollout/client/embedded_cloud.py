"""`[cloud]` of a private cluster: written to the files of its coordinator and workers, and read from there by commands
without one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ulid import ULID

from rollout.config.cloud import NO_CLOUD, CloudSection
from rollout.config.load import load_settings, read_values
from rollout.config.settings import CoordinatorSettings
from rollout.files import replacing

COORDINATOR_FILE = "coordinator.toml"
_ID_FILE = "objects-id"


def cloud_sections(cloud: CloudSection) -> dict[str, dict[str, Any]]:
    """Return the sections of a file; none without a provider."""
    given = cloud.model_dump(exclude_unset=True)
    if not cloud.provider:
        return {}
    sections = {"cloud": {key: value for key, value in given.items() if not isinstance(value, dict)}}
    for key, value in given.items():
        if isinstance(value, dict):
            sections[f"cloud.{key}"] = value
    return sections


def own_prefix(state: Path, cloud: CloudSection, *, new_id: str = "ID") -> str:
    """Return the prefix of the objects of the private cluster in `state`, below that of its file. `new_id` stands for
    an id that it does not have yet."""
    path = state / _ID_FILE
    return f"{cloud.prefix}private/{path.read_text('ascii').strip() if path.is_file() else new_id}/"


def keeps_objects_in_a_bucket(state: Path) -> bool:
    """Return whether the private cluster in `state` may have objects in a bucket; only the bucket tells which."""
    return (state / _ID_FILE).is_file()


def of_its_own(state: Path, cloud: CloudSection) -> CloudSection:
    """Return `cloud` with objects below a prefix of this private cluster alone, because one file may serve many output
    directories. Its id is kept in `state`."""
    if not cloud.bucket:
        return cloud
    path, new_id = state / _ID_FILE, str(ULID())
    prefix = own_prefix(state, cloud, new_id=new_id)
    if not path.is_file():
        with replacing(path, durable=False) as file:
            file.write(new_id.encode("ascii"))
    name = "s3" if cloud.provider == "aws" else "gcs"
    part = getattr(cloud, name).model_copy(update={"prefix": prefix})
    return cloud.model_copy(update={name: part})


def cloud_of(state: Path) -> CloudSection:
    """Return [cloud] of the private cluster in `state`; empty if there is no such cluster yet."""
    path = state / COORDINATOR_FILE
    return load_settings(CoordinatorSettings, path, environ={}).cloud if path.is_file() else NO_CLOUD


def rewrite_cloud(state: Path, cloud: CloudSection) -> None:
    """Write the section to the coordinator's file of the private cluster in `state`."""
    values, _ = read_values(state / COORDINATOR_FILE)
    sections: dict[str, dict[str, Any]] = {}
    for name, section in values.items():
        if name != "cloud":
            sections[name] = {key: value for key, value in section.items() if not isinstance(value, dict)}
            sections |= {f"{name}.{key}": value for key, value in section.items() if isinstance(value, dict)}
    sections["objects"]["backend"] = "" if cloud.bucket else "fs"
    write_sections(state / COORDINATOR_FILE, sections | cloud_sections(cloud))


def write_sections(path: Path, sections: dict[str, dict[str, Any]]) -> Path:
    """Write TOML atomically."""
    lines: list[str] = []
    for section, values in sections.items():
        lines.append(f"[{section}]")
        # A JSON string or list of strings is the same in TOML.
        lines += [f"{key} = {json.dumps(value)}" for key, value in values.items()]
    with replacing(path, durable=False) as file:
        file.write(("\n".join(lines) + "\n").encode())
    return path


def secrets_section(cloud: CloudSection) -> dict[str, Any]:
    """Return `[secrets]` of its workers: the cloud's allowlist, or that of the environment."""
    return {} if cloud.secrets.allowlist else {"allow": ["HF_TOKEN"]}


def waited_for(event: dict[str, Any]) -> str:
    """Return a message about a coordinator that cannot reach its objects."""
    at = f" at {event['endpoint']}" if event.get("endpoint") else ""
    return f"{event.get('place')}{at} does not answer; trying for 60 s"
