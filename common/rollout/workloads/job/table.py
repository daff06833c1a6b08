"""The trials of a job as a table with a row for each: CSV, JSON Lines and Parquet with the same columns."""

from __future__ import annotations

import csv
import importlib
import io
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from rollout.model.errors import ConfigError
from rollout.workloads.job.job_directory import JobDirectory, KeptTrial
from rollout.workloads.job.pass_at_k import PASS
from rollout.workloads.job.results import ZERO_TIME, rfc3339
from rollout.workloads.json_form import JsonObject, dump_line

Type = Literal["text", "integer", "number", "truth"]


@dataclass(frozen=True, slots=True)
class Column:
    """A value is missing (null; empty in CSV) if `of` returns None."""

    name: str
    type: Type
    of: Callable[[JobDirectory, KeptTrial], Any]


def _of_result(read: Callable[[Any], Any]) -> Callable[[JobDirectory, KeptTrial], Any]:
    return lambda job, trial: None if trial.result is None else read(trial.result)


def _of_record(read: Callable[[Any], Any]) -> Callable[[JobDirectory, KeptTrial], Any]:
    return lambda job, trial: None if trial.record is None else read(trial.record)


def _passed(job: JobDirectory, trial: KeptTrial) -> bool | None:
    score = job.score(trial)
    return None if score is None else score >= PASS


def _cost(job: JobDirectory, trial: KeptTrial) -> float | None:
    """Return the cost; the format of result.json has 0 for the unknown part."""
    unknown = trial.record is not None and trial.record.usage.cost_usd is None
    return None if unknown or trial.result is None else trial.result.cost


def _time(moment: Any) -> str | None:
    return None if moment is None or moment == ZERO_TIME else rfc3339(moment)


COLUMNS: tuple[Column, ...] = (
    Column("job", "text", lambda job, trial: job.name),
    Column("trial", "text", _of_record(lambda record: record.trial)),
    Column("dataset", "text", lambda job, trial: trial.dataset),
    Column("task", "text", lambda job, trial: trial.task),
    Column("agent", "text", lambda job, trial: trial.agent),
    Column("attempt", "integer", lambda job, trial: trial.attempt),
    Column("status", "text", lambda job, trial: job.status(trial)),
    Column(
        "infrastructure",
        "truth",
        lambda job, trial: job.infrastructure(trial),
    ),
    Column("score", "number", lambda job, trial: job.score(trial)),
    Column("passed", "truth", _passed),
    Column("reward", "number", _of_result(lambda result: result.reward)),
    Column(
        "rewards",
        "text",
        _of_record(lambda record: None if record.rewards is None else json.dumps(record.rewards, ensure_ascii=False)),
    ),
    Column("error_type", "text", _of_result(lambda result: result.error and result.error.type)),
    Column("error_message", "text", _of_result(lambda result: result.error and result.error.message)),
    Column("cost_usd", "number", _cost),
    Column(
        "n_input_tokens",
        "integer",
        _of_record(lambda record: record.usage.n_input_tokens),
    ),
    Column(
        "n_cache_tokens",
        "integer",
        _of_record(lambda record: record.usage.n_cache_tokens),
    ),
    Column("n_output_tokens", "integer", _of_record(lambda record: record.usage.n_output_tokens)),
    Column("total_sec", "number", _of_result(lambda result: result.durations.total_sec)),
    Column(
        "environment_setup_sec",
        "number",
        _of_result(lambda result: result.durations.environment_setup_sec),
    ),
    Column(
        "agent_setup_sec",
        "number",
        _of_result(lambda result: result.durations.agent_setup_sec),
    ),
    Column(
        "agent_execution_sec",
        "number",
        _of_result(lambda result: result.durations.agent_execution_sec),
    ),
    Column(
        "verifier_sec",
        "number",
        _of_result(lambda result: result.durations.verifier_sec),
    ),
    Column("started_at", "text", _of_result(lambda result: _time(result.timestamps.started_at))),
    Column("ended_at", "text", _of_result(lambda result: _time(result.timestamps.ended_at))),
    Column(
        "task_git_commit_id",
        "text",
        _of_result(lambda result: result.task_git_commit_id),
    ),
    Column("agent_version", "text", _of_record(lambda record: record.agent_version or None)),
    Column("provider", "text", _of_record(lambda record: record.provider or None)),
    Column(
        "network",
        "text",
        _of_record(lambda record: record.network or None),
    ),
    Column("environment_cost_usd", "number", _of_record(lambda record: record.environment_cost_usd)),
    Column("tries", "integer", lambda job, trial: trial.tries or None),
    Column("worker", "text", lambda job, trial: trial.worker or None),
    Column("remarks", "text", _of_record(lambda record: "\n".join(record.remarks) or None)),
    Column("directory", "text", lambda job, trial: trial.label),
)


def rows(job: JobDirectory, trials: Iterable[KeptTrial] | None = None) -> list[JsonObject]:
    """Return a row for each trial, in the order of the job, or only for those of `trials`."""
    chosen = job.trials if trials is None else trials
    return [{column.name: column.of(job, trial) for column in COLUMNS} for trial in chosen]


def csv_file(rows: Sequence[JsonObject]) -> bytes:
    """Encode as RFC 4180, UTF-8, with a header; true and false as such, nothing for missing values.

    Text that a spreadsheet would take for a formula gets an apostrophe: the program that opens the file must not
    evaluate what a model or a task wrote.
    """
    text = io.StringIO()
    writer = csv.writer(text)
    writer.writerow([column.name for column in COLUMNS])
    for row in rows:
        writer.writerow([csv_cell(row[column.name]) for column in COLUMNS])
    return text.getvalue().encode()


_FORMULA = ("=", "+", "-", "@", "\t", "\r")


def csv_cell(value: Any) -> Any:
    if isinstance(value, str) and value.startswith(_FORMULA):
        return f"'{value}"
    return str(value).lower() if isinstance(value, bool) else value


def jsonl_file(rows: Sequence[JsonObject]) -> bytes:
    return b"".join(map(dump_line, rows))


def parquet_file(rows: Sequence[JsonObject]) -> bytes:
    """Encode as Parquet. Raises ConfigError if pyarrow is not installed."""
    try:
        pa: Any = importlib.import_module("pyarrow")
        parquet: Any = importlib.import_module("pyarrow.parquet")
    except ImportError as error:
        raise ConfigError(
            "a .parquet file needs pyarrow, which is not installed: pip install rollout-engine[parquet], or write "
            ".csv or .jsonl"
        ) from error
    types = {"text": pa.string(), "integer": pa.int64(), "number": pa.float64(), "truth": pa.bool_()}
    schema = pa.schema([(column.name, types[column.type]) for column in COLUMNS])
    sink = pa.BufferOutputStream()
    parquet.write_table(pa.Table.from_pylist(list(rows), schema=schema), sink)
    return sink.getvalue().to_pybytes()
