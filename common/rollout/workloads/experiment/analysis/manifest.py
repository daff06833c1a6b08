"""Finds the facts of a run and reads its manifest."""

from __future__ import annotations

from pathlib import Path

from rollout.model.errors import ConfigError, InputError
from rollout.workloads.experiment.analysis.columns import MANIFEST
from rollout.workloads.experiment.contracts import RunManifest

FACTS = "facts"


def facts_of(directory: Path) -> Path | None:
    """Return the directory of facts in `directory`, `directory` itself if it is one, or None."""
    for path in (directory / FACTS, directory):
        if (path / MANIFEST).is_file():
            return path
    return None


def read_manifest(facts: Path) -> RunManifest:
    """Read the manifest. Raises ConfigError if it cannot be read, InputError if it is damaged."""
    path = facts / MANIFEST
    try:
        return RunManifest.decode(path.read_bytes())
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror or error}") from error
    except InputError as error:
        raise InputError(f"{path}: {error.message}") from None
