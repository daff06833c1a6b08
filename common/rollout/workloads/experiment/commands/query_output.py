"""Writes the answer to a query as a table, CSV, JSON Lines or Parquet."""

from __future__ import annotations

import csv
import importlib
import io
import sys
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any, Literal, TextIO, cast

from rollout.cli.streams import json_line
from rollout.model.errors import ConfigError
from rollout.workloads.experiment.analysis.database import Answer
from rollout.workloads.experiment.commands.show_analysis import print_rows
from rollout.workloads.job.table import csv_cell


def write_answer(
    answer: Answer, form: Literal["table", "csv", "json", "parquet"], output: Path | None, table_rows: int
) -> None:
    """Write the answer. Raises ConfigError if the format needs a missing package, QueryError while rows are read."""
    if form == "table" and output is None:
        print_rows(answer.columns, answer.rows, table_rows)
    elif form == "parquet":
        assert output is not None
        _parquet(answer, output)
    else:
        lines = _json(answer) if form == "json" else _csv(answer)
        with _sink(output) as out:
            for line in lines:
                out.write(line)


@contextmanager
def _sink(output: Path | None) -> Generator[TextIO]:
    if output is None:
        yield sys.stdout
        sys.stdout.flush()
    else:
        with output.open("w", encoding="utf-8", errors="backslashreplace", newline="") as file:
            yield file


def _json(answer: Answer) -> Iterator[str]:
    for row in answer.rows:
        yield json_line(dict(zip(answer.columns, map(plain, row), strict=True)))


def _csv(answer: Answer) -> Iterator[str]:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")

    def taken() -> str:
        value = text.getvalue()
        text.seek(0)
        text.truncate()
        return value

    writer.writerow(answer.columns)
    yield taken()
    for row in answer.rows:
        writer.writerow(
            [csv_cell(json_line(one).strip() if isinstance(one, (list, dict)) else one) for one in map(plain, row)]
        )
        yield taken()


def plain(value: Any) -> Any:
    """Return a DuckDB value as JSON: dates and other types become text."""
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        return value if abs(value) < float("inf") else None
    if isinstance(value, Decimal):
        return float(value)
    if isinstance(value, (list, tuple)):
        return [plain(one) for one in cast("list[Any]", value)]
    if isinstance(value, dict):
        return {str(key): plain(one) for key, one in cast("dict[Any, Any]", value).items()}
    if isinstance(value, (datetime, date, time)):
        return value.isoformat()
    if isinstance(value, timedelta):
        return value.total_seconds()
    return str(value)


def _parquet(answer: Answer, output: Path) -> None:
    try:
        pa: Any = importlib.import_module("pyarrow")
        parquet: Any = importlib.import_module("pyarrow.parquet")
    except ImportError as error:
        raise ConfigError(
            "a .parquet file needs pyarrow, which is not installed: pip install rollout-engine[parquet], or use "
            "--format csv or json"
        ) from error
    rows = [[plain(value) for value in row] for row in answer.rows]
    columns = [[row[index] for row in rows] for index in range(len(answer.columns))]
    parquet.write_table(pa.table(columns, names=list(answer.columns)), output)
