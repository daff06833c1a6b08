"""The directory of a run that a person names: by its path, its name below the runs directory, its id, or @last."""

from __future__ import annotations

from pathlib import Path

from rollout.cli.references import LAST, means
from rollout.model.errors import ConfigError, NotFoundError
from rollout.model.ids import is_ulid, short
from rollout.workloads.experiment.analysis.sources import Source, project

RUNS = Path(".lab/runs")


def run_directory(text: str, runs_dir: Path = RUNS) -> Path:
    """NotFoundError: there is none. ConfigError: it may be any of several."""
    path = Path(text).expanduser()
    if path.exists():
        return path
    if text and (runs_dir / text).is_dir():
        return runs_dir / text
    runs = project(runs_dir)
    found = runs[-1:] if text == LAST else [one for one in runs if _is(one, text)]
    if len(found) > 1:
        listed = ", ".join(f"{short(one.manifest.run_id)} ({one.directory})" for one in found)
        raise ConfigError(f"{text!r} may be any of {len(found)} runs: {listed}")
    if not found:
        raise NotFoundError(f"{text!r} is no file or directory here, and no run in {runs_dir}")
    return found[0].directory


def _is(source: Source, text: str) -> bool:
    run_id = source.manifest.run_id
    return run_id == text.upper() or (not is_ulid(text.upper()) and means(run_id, text))
