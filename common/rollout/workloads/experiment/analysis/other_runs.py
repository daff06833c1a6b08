"""Facts of runs that are not experiments: jobs, and JSON Lines with a unit and a score in each line.

Their rows are written as facts to a scratch directory, and are then read like those of an experiment.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

from rollout.model.errors import ConfigError, InputError
from rollout.workloads.experiment.analysis.columns import FACTS, MANIFEST
from rollout.workloads.experiment.analysis.manifest import FACTS as FACTS_DIR
from rollout.workloads.experiment.analysis.manifest import facts_of
from rollout.workloads.experiment.analysis.sources import Source, read_source
from rollout.workloads.experiment.contracts import (
    ManifestDesign,
    ManifestVariant,
    PrimaryMetric,
    RunManifest,
    Thresholds,
)
from rollout.workloads.job.job_directory import JobDirectory, KeptTrial, is_job_directory, read_job_directory
from rollout.workloads.job.pass_at_k import PASS
from rollout.workloads.job.results import ZERO_TIME, rfc3339
from rollout.workloads.json_form import JsonObject, canonical, dump_line, lookup, timestamp

RESULT_FILES = ("results.jsonl", "completions.jsonl")
UNITS = ("task_id", "id", "custom_id", "row")
SCORES = ("score", "reward", "result.score", "result.reward", "passed", "result.passed", "outcome")
_OUTCOMES = {
    **dict.fromkeys(("passed", "xfailed", "flaky", "success"), 1.0),
    **dict.fromkeys(("failed", "xpassed", "error", "crashed", "timeout", "failure"), 0.0),
    **dict.fromkeys(("skipped", "missing")),
}
"""Scores by outcome of a test or an agent."""


@dataclass(frozen=True, slots=True)
class Keys:
    """Keys of a line's unit and score, dotted for nested objects. An empty one means the first of UNITS or SCORES that
    the first line has."""

    unit: str = ""
    score: str = ""


def source_at(path: Path, scratch: Path, keys: Keys) -> Source:
    """Return an experiment's run, a job's directory, a file of JSON Lines, or a directory with one of RESULT_FILES.

    Raises ConfigError if it is none of these, InputError if it is damaged.
    """
    if facts_of(path) is not None:
        return read_source(path)
    made = scratch / f"{len(list(scratch.iterdir()))}"
    if path.is_dir() and is_job_directory(path):
        return _job(read_job_directory(path), made)
    file = next((path / name for name in RESULT_FILES if (path / name).is_file()), path)
    if not file.is_file():
        raise ConfigError(
            f"{path}: no run with results: name the directory of an experiment's run or of a job, or JSON Lines with a "
            "unit and a score in each line"
        )
    name = _id(path.resolve().name if path.is_dir() else file.stem)
    return _written(made, path, name, [name], _lines(file, keys, name))


# ---- jobs


def _job(job: JobDirectory, made: Path) -> Source:
    """Convert a job: its agents become variants, and attempts become replications."""
    several = len({trial.dataset for trial in job.trials}) > 1
    rows = (_of_trial(job, trial, several) for trial in job.trials if trial.result is not None)
    return _written(made, job.path, job.name, job.agents, rows, job.run_id, planned=len(job.trials))


def _of_trial(job: JobDirectory, trial: KeptTrial, several: bool) -> JsonObject:
    result = trial.result
    assert result is not None
    score = job.score(trial)
    usage = trial.record.usage if trial.record is not None else None
    started, ended = result.timestamps.started_at, result.timestamps.ended_at
    return {
        "trial_id": trial.label,
        "variant_id": _id(trial.agent),
        "task_id": f"{trial.dataset}/{trial.task}" if several else trial.task,
        "repl_idx": trial.attempt - 1,
        "status": job.status(trial),
        "outcome": "error" if result.error else "success",
        "classification": result.error.type if result.error else None,
        "score": score,
        "passed": None if score is None else score >= PASS,
        "tokens_in": usage.n_input_tokens if usage is not None else None,
        "tokens_out": usage.n_output_tokens if usage is not None else None,
        "cost_usd": None if usage is not None and usage.cost_usd is None else result.cost,
        "error_message": result.error.message if result.error else None,
        "worker_id": trial.worker or None,
        "started_at": None if started == ZERO_TIME else rfc3339(started),
        "ended_at": None if ended == ZERO_TIME else rfc3339(ended),
        "duration_ms": result.durations.total_sec * 1000,
    }


# ---- lines


def _lines(file: Path, keys: Keys, name: str) -> Iterator[JsonObject]:
    """Yield trials: lines of one unit are its replications, in order."""
    seen = Counter[str]()
    has_score = True
    for number, line in _objects(file):
        if not keys.unit or not keys.score:
            keys = _found(line, keys, f"{file}:{number}")
        unit, score = lookup(line, keys.unit), lookup(line, keys.score)
        if unit is None:
            raise InputError(f"{file}:{number}: it has no {keys.unit}")
        unit = unit if isinstance(unit, str) else canonical(unit).decode()
        has_score = score is not None or (bool(seen) and has_score)
        value = _score(score, f"{file}:{number}: {keys.score}")
        yield {
            "trial_id": f"{name}:{number}",
            "variant_id": name,
            "task_id": unit,
            "repl_idx": seen[unit],
            "status": "completed",
            "outcome": "missing" if value is None else "success" if value >= PASS else "failure",
            "score": value,
            "passed": None if value is None else value >= PASS,
        }
        seen[unit] += 1
    if not has_score:
        raise InputError(f"{file}: no line has {keys.score}: name the key of the score with --score KEY")


def _objects(file: Path) -> Iterator[tuple[int, JsonObject]]:
    try:
        with file.open("rb") as lines:
            for number, raw in enumerate(lines, 1):
                if not raw.strip():
                    continue
                try:
                    value: Any = json.loads(raw)
                except ValueError as error:
                    raise InputError(f"{file}:{number}: not JSON: {error}") from error
                if not isinstance(value, dict):
                    raise InputError(f"{file}:{number}: must be an object")
                yield number, cast(JsonObject, value)
    except OSError as error:
        raise InputError(f"{file}: {error.strerror or error}") from error


def _found(line: JsonObject, keys: Keys, where: str) -> Keys:
    """Complete `keys` with those that the line has."""
    unit = keys.unit or next((key for key in UNITS if lookup(line, key) is not None), "")
    score = keys.score or next((key for key in SCORES if lookup(line, key) is not None), "")
    if not unit:
        raise InputError(f"{where}: it has none of {', '.join(UNITS)}: name the key of the unit with --unit KEY")
    if not score:
        raise InputError(f"{where}: it has none of {', '.join(SCORES)}: name the key of the score with --score KEY")
    return replace(keys, unit=unit, score=score)


def _score(value: Any, where: str) -> float | None:
    if value is None:
        return None
    if isinstance(value, str) and (word := value.strip().lower()) in _OUTCOMES:
        return _OUTCOMES[word]
    if isinstance(value, (str, bool, int, float)):
        with suppress(ValueError, OverflowError):
            if math.isfinite(number := float(value)):
                return number
    raise InputError(f"{where}: must be a number, true or false, or an outcome such as passed, not {value!r:.80}")


# ---- facts


def _written(
    made: Path,
    directory: Path,
    name: str,
    variants: Sequence[str],
    rows: Iterable[JsonObject],
    run_id: str = "",
    planned: int | None = None,
) -> Source:
    facts = made / FACTS_DIR
    facts.mkdir(parents=True)
    digest = hashlib.sha256(str(directory.resolve()).encode()).hexdigest()
    run_id = run_id or digest[:26].upper()
    empty: JsonObject = dict.fromkeys(FACTS["trials"])
    count, tasks = 0, set[str]()
    with (facts / "trials.jsonl").open("wb") as file:
        for index, row in enumerate(rows):
            key = {"run_id": run_id, "schedule_index": index, "attempt": 1, "row_sequence": 0, "baseline": False}
            file.write(dump_line(empty | key | row))
            count += 1
            tasks.add(row["task_id"])
    names = [_id(one) for one in variants] or [_id(name)]
    manifest = RunManifest(
        run_id=run_id,
        experiment_id=_id(name),
        name=name,
        created_at=timestamp(int(directory.stat().st_mtime * 1000)),
        resolved_digest=digest,
        rollout_version="",
        design=ManifestDesign(
            comparison="paired", order="paired_interleaved", replications=1, seed=0, max_concurrency=1
        ),
        baseline=names[0],
        variants=[ManifestVariant(variant_id=one, baseline=one == names[0], image=None, bindings={}) for one in names],
        tasks=len(tasks),
        total_slots=count if planned is None else planned,
        state_policy="isolate_per_trial",
        primary_metric=PrimaryMetric(name="score", direction="maximize"),
        thresholds=Thresholds.model_validate({"pass": PASS}),
        volatile_fields=[],
    )
    (facts / MANIFEST).write_bytes(canonical(manifest.to_json()))
    return replace(read_source(made), directory=directory)


def _id(name: str) -> str:
    """Return `name` as an id that the contracts accept."""
    text = re.sub(r"[^A-Za-z0-9._-]", "-", name)[:128]
    return text if text[:1].isalnum() else f"x{text}"[:128]
