"""All that can be checked of a workload's configuration without a cluster: for `rollout plan` and for `--dry-run`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel

from rollout.workloads.json_form import JsonObject
from rollout.workloads.port import Workload, check_only


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a run would do, a line each; `fields` for programs; `notes`: what the person should know of it."""

    plan: list[str]
    notes: list[str]
    fields: JsonObject


def verdict(workload: Workload[Any, Any], settings: BaseModel, tell: Callable[[str], None]) -> Verdict:
    """ConfigError or InputError with everything that is wrong. `tell` hears what is waited for. Blocking."""
    checked = check_only(workload, settings, tell=tell)
    notes = [*(checked.source.notes if checked.source else ()), *checked.notes]
    return Verdict(
        plan=workload.describe(settings, checked),
        notes=[*map(noted, notes), *(f"warning: {w}" for w in workload.warnings(settings))],
        fields=workload.dry_run(settings, checked),
    )


def noted(text: str) -> str:
    """What a check found that is no fault, as it is printed: unless it is more, a note."""
    return text if text.startswith("warning: ") else f"note: {text}"
