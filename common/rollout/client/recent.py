"""The runs submitted from this account on this machine, for `@last`: one per line, the newest at the end."""

from __future__ import annotations

from rollout.client.account import keep_lines, kept_lines
from rollout.model.ids import is_ulid

KEPT = 20
_NAME = "runs"


def recent_runs() -> list[str]:
    """Return ids, the newest first."""
    return [line for line in reversed(kept_lines(_NAME)) if is_ulid(line)]


def remember_run(run_id: str) -> None:
    """Record the run as the last one."""
    keep_lines(_NAME, [*(known for known in reversed(recent_runs()) if known != run_id), run_id][-KEPT:])
