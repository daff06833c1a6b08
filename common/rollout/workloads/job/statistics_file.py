"""stats.json, next to the result.json of a job: every rate with its denominator and its interval."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict

from rollout.workloads.job.aggregate import Statistics
from rollout.workloads.job.intervals import CONFIDENCE
from rollout.workloads.job.spending import Spent
from rollout.workloads.json_form import JsonObject


def statistics_json(job_name: str, statistics: Mapping[tuple[str, str], Statistics], spent: Spent) -> bytes:
    """Return the file. `statistics` are by agent and dataset (`aggregate.job_statistics`). `spent` covers all tries."""
    groups = [{"agent": agent, "dataset": dataset, **_group(found)} for (agent, dataset), found in statistics.items()]
    value = {"job_name": job_name, "confidence": CONFIDENCE, "spent": spent.to_json(), "groups": groups}
    return json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False).encode() + b"\n"


def _group(statistics: Statistics) -> JsonObject:
    values = asdict(statistics)
    values["pass_at_k"] = [{"k": one.k, **_of_tasks(asdict(one.value))} for one in statistics.pass_at_k]
    return values


def _of_tasks(estimate: JsonObject) -> JsonObject:
    """Remove the number of trials: pass@k has one value per task."""
    return {key: value for key, value in estimate.items() if key != "trials"}
