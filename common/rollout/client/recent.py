"""The runs submitted from this account on this machine, for `@last`: one per line, the newest at the end."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from rollout.model.ids import is_ulid
from rollout.workloads.staging import state_home

KEPT = 20


def recent_runs() -> list[str]:
    """Return ids, the newest first."""
    try:
        lines = _path().read_text("ascii").split()
    except (OSError, ValueError, RuntimeError):  # RuntimeError: this account has no home
        return []
    return [line for line in reversed(lines) if is_ulid(line)]


def remember_run(run_id: str) -> None:
    """Record the newest run. A machine where that is impossible does without."""
    runs = [*(known for known in reversed(recent_runs()) if known != run_id), run_id][-KEPT:]
    with suppress(OSError, RuntimeError):
        path = _path()
        scratch = path.with_name(f".{path.name}.{os.getpid()}")
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        scratch.write_text("".join(f"{run}\n" for run in runs), "ascii")
        scratch.replace(path)


def _path() -> Path:
    return state_home() / "runs"
