"""Rows of the input: JSON objects that ask for something, with file and line in every error."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import cast

from rollout.model.errors import InputError
from rollout.workloads.infer.config import InferConfig, SamplingSection, load_schema
from rollout.workloads.infer.request import RowRequest, parse_row
from rollout.workloads.json_form import JsonObject
from rollout.workloads.port import Reading
from rollout.workloads.source import InputReport, Line, Source, UniqueIds, fail, json_of


@dataclass(frozen=True, slots=True)
class Row:
    """A line that is a JSON object."""

    line: Line
    fields: JsonObject


def effective_sampling(config: InferConfig) -> SamplingSection:
    """[sampling] with the JSON schema read from its file. ConfigError."""
    schema = load_schema(config.sampling.json_schema)
    return config.sampling if schema is None else config.sampling.model_copy(update={"json_schema": schema})


def row_of(line: Line) -> Row:
    """InputError with file and line."""
    value = json_of(line)
    if not isinstance(value, dict):
        fail(line.file, line.line, f"a row must be a JSON object, not {type(value).__name__}")
    return Row(line, cast(JsonObject, value))


def request_of(row: Row, sampling: SamplingSection) -> RowRequest:
    """The row's request. InputError with file and line."""
    try:
        request = parse_row(row.fields, sampling)
        if b"\\u" in row.line.raw:  # only an escape can hold one: what is not escaped was decoded from UTF-8
            json.dumps([request.content, request.sampling.stop], ensure_ascii=False).encode()
    except UnicodeEncodeError:
        fail(
            row.line.file,
            row.line.line,
            "the text holds half of a surrogate pair, which is no Unicode: repair the escape",
        )
    except InputError as error:
        fail(row.line.file, row.line.line, error.message)
    return request


def check_input(config: InferConfig, reading: Reading) -> tuple[Source, InputReport]:
    """Read and check every row before anything starts. InputError with all that is wrong."""
    sampling, ids = effective_sampling(config), UniqueIds()

    def check(line: Line) -> None:
        row = row_of(line)
        request_of(row, sampling)
        key = "custom_id" if "body" in row.fields else "id"
        if row.fields.get(key) is not None:
            ids.add(line, key, row.fields[key])

    return reading.rows(config.input.patterns, check)
