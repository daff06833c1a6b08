"""A job without a file, given by datasets, agents and their models on the command line."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import product
from pathlib import Path

from rollout.workloads.job.config import HARBOR_REGISTRY, ORACLE
from rollout.workloads.job.datasets import BUNDLED
from rollout.workloads.json_form import JsonObject

_OTHERS = re.compile(r"[^A-Za-z0-9._-]+")


def job_values(
    datasets: Sequence[str], agents: Sequence[str], models: Sequence[str], limit: int | None, dialect: str | None = None
) -> JsonObject:
    """Return the keys of job.yaml. Every agent runs with every model. The same words give the same job, which
    resumes."""
    pairs = list(product(agents or [ORACLE], models or [None]))
    sections: list[JsonObject] = []
    for agent, model in pairs:
        section: JsonObject = {"name": agent}
        if model is not None:
            section["model_name"] = model
        if len(models) > 1:
            section["label"] = f"{agent}-{_short(model or '')}"
        sections.append(section)
    more = {key: value for key, value in (("n_tasks", limit), ("dialect", dialect)) if value}
    words = [*map(_short, datasets), *(agents or [ORACLE]), *map(_short, models)]
    return {
        "datasets": [{**_dataset(text), **more} for text in datasets],
        "agents": sections,
        "name": "-".join(words)[:100],
    }


def _dataset(text: str) -> JsonObject:
    if text.startswith(BUNDLED) or "/" in text or Path(text).is_dir():
        return {"path": text}
    name, _, version = text.partition("@")
    found: JsonObject = {"registry": {"url": HARBOR_REGISTRY}, "name": name}
    return {**found, "version": version} if version else found


def _short(text: str) -> str:
    """Return the last part of a path or model name."""
    return _OTHERS.sub("-", text.rstrip("/").rpartition("/")[2].rpartition(":")[2]) or "job"
