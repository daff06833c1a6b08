"""The report of a run as one HTML file: no network, no script, and links to the files of each trial."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from functools import cache
from importlib.resources import files
from pathlib import Path, PurePosixPath
from typing import Any

from jinja2 import Template

from rollout.model.errors import ConfigError
from rollout.workloads.experiment.analysis import wording
from rollout.workloads.experiment.analysis.opening import DATABASE, SCRIPT, Opened
from rollout.workloads.experiment.analysis.sources import Source
from rollout.workloads.experiment.analysis.summary import Analysis, Comparison
from rollout.workloads.experiment.analysis.view_sets import ViewSet
from rollout.workloads.experiment.contracts import MODEL, PASS_RATE
from rollout.workloads.experiment.layout import EVIDENCE, RESOLVED, TRIALS, artifact_path, trial_directory
from rollout.workloads.job.html import environment, link_to
from rollout.workloads.job.overview import shown_ks
from rollout.workloads.json_form import JsonObject

TASKS_SHOWN = 200
FILES_SHOWN = 12
_MESSAGE_MAX = 2_000
_WIDTH = 1_000
_FILES = (TRIALS, EVIDENCE, RESOLVED, SCRIPT, DATABASE)

_TRIALS = """
WITH last AS (
    SELECT ids.run_id AS run_id, ids.trial_id AS trial_id, arg_max(evidence, r.rowid) AS evidence,
        arg_max(paths.trial_dir, r.rowid) AS directory
    FROM evidence_records r GROUP BY ALL
)
SELECT t.run_id, t.trial_id, t.variant_id, t.task_id, t.repl_idx, t.attempt, t.status, t.classification, t.value,
    t.pass, t.cost_usd, t.tokens_in, t.tokens_out, t.duration_ms, left(t.error_message, 2000), last.evidence,
    last.directory
FROM trials t LEFT JOIN last ON last.run_id = t.run_id AND last.trial_id = t.trial_id
ORDER BY CASE WHEN t.pass = 0 OR t.status = 'failed' THEN 0 WHEN t.pass IS NULL THEN 1 ELSE 2 END, t.variant_id,
    t.schedule_index
LIMIT ?
"""
_MATRIX = """
SELECT task_id, map(list(variant_id), list(struct_pack(pass_rate := pass_rate, score := mean_score, scored := scored,
    trials := trials)))
FROM task_variant_matrix GROUP BY task_id
ORDER BY max(pass_rate) - min(pass_rate) DESC NULLS LAST, max(mean_score) - min(mean_score) DESC NULLS LAST,
    avg(pass_rate), task_id
LIMIT ?
"""


@cache
def _template() -> Template:
    made = environment().overlay()
    filters: dict[str, Any] = made.filters
    filters.update(p=wording.p_text, ratio=wording.cost_ratio, tokens=wording.tokens, measure=wording.measure)
    text = (files("rollout.workloads.experiment.analysis") / "report.html.j2").read_text("utf-8")
    return made.from_string(text)


def write_report(found: Opened, output: Path, margin: float | None, most: int) -> JsonObject:
    """Write the page with at most `most` trials, those that did not pass first; memory does not grow with `most`.

    Returns what `rollout experiment report --json` prints. Raises ConfigError if the file cannot be written, or if
    these are the runs of a project, which have no report.
    """
    analysis = found.analyze(margin)
    total = sum(one.trials for one in analysis.variants)
    links = _Links(found.sources, output)
    page = _template().generate(
        analysis=analysis,
        manifests=found.manifests,
        files=links.files(),
        forests=list(_forests(analysis)),
        ks=sorted({each.k for one in analysis.variants for each in shown_ks(one.pass_at_k)}),
        metrics=_metrics(analysis),
        says=wording.says,
        legend=wording.legend,
        tasks=found.database.rows("SELECT count(DISTINCT task_id) FROM trials")[0][0],
        matrix=found.database.rows(_MATRIX, [TASKS_SHOWN]),
        bindings=_bindings(found),
        trend=found.database.rows("FROM trend") if found.database.view_set is ViewSet.REGRESSION else [],
        total=total,
        listed=min(most, total),
        trials=_trials(found, links, most),
    )
    scratch = output.with_name(f".{output.name}.{os.getpid()}")
    try:
        with scratch.open("w", encoding="utf-8", errors="backslashreplace") as file:
            file.writelines(page)
        scratch.replace(output)
    except OSError as error:
        raise ConfigError(f"{output}: {error.strerror or error}") from error
    finally:
        scratch.unlink(missing_ok=True)
    return {
        "experiment_id": analysis.experiment_id,
        "file": str(output),
        "trials": total,
        "listed": min(most, total),
    }


def _bindings(found: Opened) -> list[tuple[str, str, str]]:
    """Return (variant, binding, value) of all runs' variants, including their models."""
    rows: list[tuple[str, str, str]] = []
    for source in found.sources:
        for one in source.manifest.variants:
            named = source.named(one.variant_id)
            if one.model is not None:
                rows.append((named, MODEL, f"{one.model} ({one.model_id})" if one.model_id else one.model))
            rows += [(named, name, json.dumps(value, ensure_ascii=False)) for name, value in one.bindings.items()]
    return rows


def _metrics(analysis: Analysis) -> list[tuple[str, str, dict[str, float]]]:
    """Return (metric, source, mean by variant)."""
    found: dict[tuple[str, str], dict[str, float]] = {}
    for one in analysis.metrics:
        found.setdefault((one.metric, one.source or ""), {})[one.variant_id] = one.mean
    return [(*key, means) for key, means in found.items()]


# ---- plots


def _forests(analysis: Analysis) -> Iterator[JsonObject]:
    """Yield a plot of differences for each measure: positions on a scale of _WIDTH that includes 0."""
    for measure in dict.fromkeys(one.measure for one in analysis.comparisons):
        rows = [one for one in analysis.comparisons if one.measure == measure]
        margin = analysis.margin if measure == analysis.primary else None
        yield _forest(measure, rows, margin)


def _forest(measure: str, rows: Sequence[Comparison], margin: float | None) -> JsonObject:
    ends = [0.0, *(end for one in rows for end in (one.interval or (one.difference,)))]
    ends += [] if margin is None else [-margin, margin]
    low, high = min(ends), max(ends)
    room = (high - low or 1.0) * 0.06
    low, high = low - room, high + room
    rates = measure == PASS_RATE

    def at(value: float) -> float:
        return round((value - low) / (high - low) * _WIDTH, 1)

    return {
        "measure": measure,
        "rates": rates,
        "ends": [wording.change(end, None, rates=rates) for end in (low, high)],
        "tests": list(dict.fromkeys(wording.TESTS[one.test] for one in rows)),
        "zero": at(0.0),
        "margin": None if margin is None else {"from": at(-margin), "width": round(at(margin) - at(-margin), 1)},
        "rows": [
            {
                "found": one,
                "text": wording.change(one.difference, one.interval, rates=rates),
                "at": at(one.difference),
                "span": None if one.interval is None else [at(end) for end in one.interval],
            }
            for one in rows
        ],
    }


# ---- trials


class _Links:
    """Links of the page, relative to its location."""

    def __init__(self, sources: Sequence[Source], output: Path) -> None:
        self._output = output
        self._sources = {one.manifest.run_id: one for one in sources}

    def files(self) -> list[tuple[str, str]]:
        """Return (name, link) of the existing files of the runs."""
        found: list[tuple[str, str]] = []
        for source in self._sources.values():
            for name in _FILES:
                if link := link_to(source.directory / name, self._output):
                    found.append((f"{source.label}: {name}" if source.label else name, link))
        return found

    def trial(self, run_id: str, trial_id: str, directory: str | None, evidence: str | None) -> list[tuple[str, str]]:
        """Return (name, link) of a trial's files and its evidence."""
        root = self._sources[run_id].directory
        found: list[tuple[str, str]] = []
        for path in (directory, trial_directory(trial_id), trial_id):
            if path is not None and _inside(path) and (root / path).is_dir():
                found = self._listed(root / path)
                break
        refs: dict[str, Any] = json.loads(evidence) if evidence else {}
        for name, ref in refs.items():
            hashed = str(ref).removeprefix("artifact://sha256/")
            if name.endswith("_ref") and len(hashed) == 64 and _inside(hashed):
                link = link_to(root / artifact_path(hashed), self._output)
                found += [(name.removesuffix("_ref").replace("_", " "), link)] if link else []
        return found

    def _listed(self, directory: Path) -> list[tuple[str, str]]:
        try:
            names = sorted(one.name for one in os.scandir(directory) if not one.name.startswith("."))
        except OSError:
            return []
        found = [("directory", link_to(directory, self._output))]
        return found + [(name, link_to(directory / name, self._output)) for name in names[:FILES_SHOWN]]


def _inside(path: str) -> bool:
    """Return whether a path in the facts stays in the run's directory."""
    parts = PurePosixPath(path)
    return not parts.is_absolute() and ".." not in parts.parts


def _trials(found: Opened, links: _Links, most: int) -> Iterator[JsonObject]:
    for row in found.database.batches(_TRIALS, [most]):
        run_id, trial_id, variant, task, replication, attempt, status, kind, value, passed, cost, *rest = row
        tokens_in, tokens_out, duration, message, evidence, directory = rest
        yield {
            "trial": trial_id,
            "variant": variant,
            "task": task,
            "replication": replication,
            "attempt": attempt,
            "status": status,
            "classification": kind,
            "value": value,
            "passed": passed,
            "cost": cost,
            "tokens": None if tokens_in is None and tokens_out is None else (tokens_in or 0) + (tokens_out or 0),
            "seconds": None if duration is None else duration / 1000,
            "message": (message or "")[:_MESSAGE_MAX],
            "links": links.trial(run_id, trial_id, directory, evidence),
        }
