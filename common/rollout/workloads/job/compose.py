"""Checks a task's docker-compose.yaml: services besides the sandbox are not supported, which must not go unnoticed."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

from rollout.config.load import Located
from rollout.model.errors import ConfigError
from rollout.model.problems import faults_of
from rollout.workloads.job.artifacts import MAIN_SERVICE

_NAME = "docker-compose.yaml"
"""The only one of Docker's names that Harbor reads."""


def check_compose(directory: Path) -> tuple[list[str], list[str]]:
    """Return (faults, notes) of the file in `directory`, from which a sandbox is built; it need not exist."""
    path = directory / _NAME
    if not path.is_file():
        return [], []
    try:
        source = Located.read(path)
    except ConfigError as error:
        return list(faults_of(error.message)), []
    services: Any = source.values.get("services")
    if not isinstance(services, dict):
        services = {}
    others = [name for name in cast("dict[str, Any]", services) if name != MAIN_SERVICE]
    faults = [
        f"{source.where(('services', name))}: services.{name}: side services are not supported yet: a task needs "
        f"{directory.name}/Dockerfile or docker_image alone"
        for name in others
    ]
    if faults:
        return faults, []
    return [], [f"{path}: not used: the sandbox is made from {directory.name}/Dockerfile or docker_image alone"]
