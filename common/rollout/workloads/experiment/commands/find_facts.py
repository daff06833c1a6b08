"""Finds the directory of the run whose facts the user asks for."""

from __future__ import annotations

from pathlib import Path

from rollout.workloads.experiment.commands.find_run import find_run


def run_directory(text: str, runs_dir: Path) -> Path:
    """Return an existing path, which need not be an experiment's run, or a run as `find_run` finds it. Raises
    ConfigError."""
    for path in (Path(text).expanduser(), runs_dir / text):
        if text and path.exists():
            return path
    return find_run(text, runs_dir).directory
