"""Checks of a workload's configuration that need no cluster, for `rollout plan` and `--dry-run`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel

from rollout.cloud.url import BucketUrl
from rollout.workloads.json_form import JsonObject
from rollout.workloads.port import Checked, Workload, check_only, cloud_of
from rollout.workloads.publishing import looked_at
from rollout.workloads.source import looks_remote

_SHOWN = 5


@dataclass(frozen=True, slots=True)
class Verdict:
    """Description of what a run would do, one line each. `fields` is for programs; `notes` are hints for the user."""

    checked: Checked
    plan: list[str]
    notes: list[str]
    fields: JsonObject


def verdict(workload: Workload[Any, Any], settings: BaseModel, tell: Callable[[str], None]) -> Verdict:
    """Check the configuration and describe its run. Blocking.

    Raises ConfigError or InputError with all faults. `tell` is told what is waited for.
    """
    checked = check_only(workload, settings, tell=tell)
    bucket = workload.bucket(settings)
    if bucket is not None:
        looked_at(bucket, workload.directory(settings), cloud_of(settings), workload.result_files, tell)
    notes = [*(checked.source.notes if checked.source else ()), *checked.notes]
    return Verdict(
        checked=checked,
        plan=[*workload.describe(settings, checked), *_buckets(checked, bucket, workload, settings)],
        notes=[*map(noted, notes), *(f"warning: {w}" for w in workload.warnings(settings))],
        fields=workload.dry_run(settings, checked),
    )


def _buckets(
    checked: Checked, bucket: BucketUrl | None, workload: Workload[Any, Any], settings: BaseModel
) -> list[str]:
    """Return lines of the plan: which objects are read, and through which directory results reach a bucket."""
    files = checked.source.files if checked.source else ()
    read = [file.name for file in files if looks_remote(file.name)]
    more = f" and {len(read) - _SHOWN} more objects" if len(read) > _SHOWN else ""
    lines = [f"reads {', '.join(read[:_SHOWN])}{more}"] if read else []
    if bucket is not None:
        lines.append(f"results are collected in {workload.directory(settings)}, and uploaded to {bucket} from there")
    return lines


def noted(text: str) -> str:
    """Return a finding that is no fault as it is printed: as a note unless it carries another label."""
    return text if text.startswith("warning: ") else f"note: {text}"
