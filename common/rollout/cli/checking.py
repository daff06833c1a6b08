"""All that can be checked of a workload's configuration without a cluster: for `rollout plan` and for `--dry-run`."""

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
    """What a run would do, a line each; `fields` for programs; `notes`: what the person should know of it."""

    checked: Checked
    plan: list[str]
    notes: list[str]
    fields: JsonObject


def verdict(workload: Workload[Any, Any], settings: BaseModel, tell: Callable[[str], None]) -> Verdict:
    """ConfigError or InputError with everything that is wrong. `tell` hears what is waited for. Blocking."""
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
    """Lines of the plan: which objects are read, and by which directory the results come to a bucket."""
    files = checked.source.files if checked.source else ()
    read = [file.name for file in files if looks_remote(file.name)]
    more = f" and {len(read) - _SHOWN} more objects" if len(read) > _SHOWN else ""
    lines = [f"reads {', '.join(read[:_SHOWN])}{more}"] if read else []
    if bucket is not None:
        lines.append(f"results are collected in {workload.directory(settings)}, and uploaded to {bucket} from there")
    return lines


def noted(text: str) -> str:
    """What a check found that is no fault, as it is printed: unless it is more, a note."""
    return text if text.startswith("warning: ") else f"note: {text}"
