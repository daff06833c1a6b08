"""The report of a job as one HTML file that needs no network and no script and prints well."""

from __future__ import annotations

import os
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any
from urllib.parse import quote

from jinja2 import Environment, StrictUndefined, Template
from markupsafe import Markup

from rollout.workloads.job import overview as words
from rollout.workloads.job.intervals import Estimate
from rollout.workloads.job.job_directory import JobDirectory, KeptTrial
from rollout.workloads.job.overview import Overview, overview, shown_ks

_TEMPLATE = "report.html.j2"
_MESSAGE_MAX = 2_000


@cache
def environment() -> Environment:
    """Return the environment for the product's pages: `style` is their style sheet, and values are escaped."""
    made = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    filters: dict[str, Any] = made.filters
    filters.update(percent=words.percent, number=words.number, dollars=words.dollars, seconds=words.seconds, span=_span)
    variables: dict[str, Any] = made.globals
    variables["style"] = Markup((files("rollout.workloads.job") / "report.css").read_text("utf-8"))
    return made


@cache
def _template() -> Template:
    return environment().from_string((files("rollout.workloads.job") / _TEMPLATE).read_text("utf-8"))


def html_file(job: JobDirectory, output: Path) -> bytes:
    """Return the file for `output`: links to the trials' directories are relative to it."""
    found = overview(job)
    page = _template().render(
        job=job,
        overview=found,
        groups=found.groups or found.agents,
        ks=_ks(found),
        trials=[_trial(job, trial, output) for trial in job.trials],
        remarks=_remarks(job),
        has_tokens=any(one.tokens.n_input or one.tokens.n_output for one in found.agents),
        has_cost=any(one.cost_usd for one in found.agents),
        metrics=list(dict.fromkeys(name for one in (*found.agents, *found.groups) for name in one.metrics)),
    )
    return page.encode("utf-8", "backslashreplace")


def _ks(found: Overview) -> list[int]:
    """Return the values of k in the table of pass@k: those that every agent has."""
    return sorted({one.k for agent in found.agents for one in shown_ks(agent.statistics.pass_at_k)})


def _span(value: Estimate | None) -> dict[str, float] | None:
    """Return the position of an interval in [0, 1] on a scale of 100, or None if there is none."""
    if value is None or value.low is None or value.high is None:
        return None
    low, high = value.low * 100, value.high * 100
    return {"low": low, "width": max(high - low, 0.5), "mean": value.mean * 100}


def _trial(job: JobDirectory, trial: KeptTrial, output: Path) -> dict[str, Any]:
    error = trial.result.error if trial.result is not None else None
    return {
        "kept": trial,
        "status": job.status(trial),
        "infrastructure": job.infrastructure(trial),
        "score": job.score(trial),
        "rewards": trial.record.rewards if trial.record is not None else None,
        "error": error.type if error else "",
        "message": error.message[:_MESSAGE_MAX] if error else "",
        "link": link_to(job.path / trial.label, output),
    }


def _remarks(job: JobDirectory) -> list[tuple[str, list[str]]]:
    """Return each remark once with its trials, the most frequent first: all trials of a job often have the same."""
    found: dict[str, list[str]] = {}
    for trial in job.trials:
        for remark in dict.fromkeys(trial.record.remarks if trial.record is not None else ()):
            found.setdefault(remark, []).append(trial.label)
    return sorted(found.items(), key=lambda one: -len(one[1]))


def link_to(path: Path, output: Path) -> str:
    """Return a link to a file or directory, relative to the page at `output`, or "" if it does not exist."""
    if not path.exists():
        return ""
    relative = os.path.relpath(path.resolve(), output.parent.resolve())
    ending = "/" if path.is_dir() else ""
    return quote(Path(relative).as_posix(), safe="/", errors="surrogateescape") + ending
