"""Refuses outputs that would overwrite files of a run, on which facts, evidence or another command depend."""

from __future__ import annotations

from pathlib import Path

from rollout.model.errors import ConfigError
from rollout.workloads.experiment.analysis.columns import MANIFEST as FACTS_MANIFEST
from rollout.workloads.experiment.layout import DIGEST, MANIFEST, RESOLVED, RUN_MANIFEST
from rollout.workloads.output import RESULT_FILES, RUN_CONFIG, RUN_ID

_DIRECTORIES = ("facts", "evidence", "runtime", "trials", "benchmark", "replays")
_FILES = (MANIFEST, RESOLVED, DIGEST, RUN_ID, *RESULT_FILES)


def refuse_output_in_run(output: Path, *inputs: Path) -> None:
    """Raise ConfigError if a run wrote or may write `output`, or if it is one of the `inputs`. Blocking."""
    path = output.resolve()
    if any(path == one.resolve() for one in inputs):
        raise ConfigError(f"--output: {output} is what is read: name another file")
    for directory in path.parents:
        if _is_owned(path, directory):
            raise ConfigError(f"--output: {output} is a file of the run in {directory}: name another file")


def _is_owned(path: Path, directory: Path) -> bool:
    if (directory / FACTS_MANIFEST).is_file():
        return True
    if not (directory / RUN_MANIFEST).is_file() and not (directory / RUN_CONFIG).is_file():
        return False
    below = path.relative_to(directory)
    first = below.parts[0]
    return first in _DIRECTORIES or first.startswith(".") or str(below) in (*_FILES, *_ANALYSIS)


_ANALYSIS = ("analysis/agentlab.duckdb", "analysis/load_duckdb.sql")
