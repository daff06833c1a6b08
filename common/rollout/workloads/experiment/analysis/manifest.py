"""Where the facts of a run are, and its manifest."""

from __future__ import annotations

from pathlib import Path

from rollout.model.errors import ConfigError, InputError
from rollout.workloads.experiment.analysis.columns import MANIFEST
from rollout.workloads.experiment.contracts import RunManifest

FACTS = "facts"


def facts_of(directory: Path) -> Path | None:
    """The directory of facts that `directory` has or is; None: neither."""
    for path in (directory / FACTS, directory):
        if (path / MANIFEST).is_file():
            return path
    return None


def read_manifest(facts: Path) -> RunManifest:
    """ConfigError: it cannot be read. InputError: it is not as it was written."""
    path = facts / MANIFEST
    try:
        return RunManifest.decode(path.read_bytes())
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror or error}") from error
    except InputError as error:
        raise InputError(f"{path}: {error.message}") from None
