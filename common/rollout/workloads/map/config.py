"""The configuration of `rollout map`: a file, the command's options, or both."""

from __future__ import annotations

import json
import re
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from rollout.config.cloud import WithCloud
from rollout.config.declared import Setting
from rollout.config.section import Section
from rollout.workloads.sections import (
    ON_BAD_ROW,
    OUTPUT_FORMAT,
    OutputFormat,
    OutputPlace,
    QueuedInput,
    QueuedRun,
    WorkersSection,
)

_UNITS_S = {"": 1.0, "ms": 0.001, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86400.0}
_UNITS_MIB = {"": 1.0} | {
    f"{letter}{rest}": 1024.0**power
    for power, letter in ((-1, "k"), (0, "m"), (1, "g"), (2, "t"))
    for rest in ("", "ib")
}
_NUMBER = re.compile(r"\s*(\d+(?:\.\d*)?)\s*([A-Za-z]*)\s*")


def seconds(value: Any) -> Any:
    """Parse "60s", "1.5 h", or a number of seconds."""
    return _with_unit(value, _UNITS_S, "60s, 5m, 1h, or a number of seconds")


def mebibytes(value: Any) -> Any:
    """Parse "2GiB", "512MiB", or a number of MiB."""
    return _with_unit(value, _UNITS_MIB, "2GiB, 512MiB, or a number of MiB")


def _with_unit(value: Any, units: dict[str, float], examples: str) -> Any:
    if not isinstance(value, str):
        return value
    match = _NUMBER.fullmatch(value)
    factor = units.get(match[2].lower()) if match else None
    if match is None or factor is None:
        raise ValueError(f"must be like {examples}, got {value!r}")
    return float(match[1]) * factor


def _from_json(value: Any) -> Any:
    """Parse a string as JSON, as command lines give it; return other values unchanged."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"must be JSON, got {value!r:.100} ({error})") from error


Seconds = Annotated[float, BeforeValidator(seconds)]
Mebibytes = Annotated[float, BeforeValidator(mebibytes)]


class FunctionSection(Section):
    name: Annotated[str, Setting("PKG.MODULE:FUNCTION")] = Field(
        min_length=1, description="Function, `async def` or class with __call__, as PKG.MODULE:FUNCTION."
    )
    code: Annotated[str | None, Setting("--code", "DIR")] = Field(
        default=None,
        description="Directory of the code, copied to the workers; default: the current one if the module is in it.",
    )
    args: Annotated[list[Any], BeforeValidator(_from_json), Setting("--args", "JSON")] = Field(
        default_factory=list[Any],
        description="JSON list of arguments after the row, or of a class's constructor.",
    )
    kwargs: Annotated[dict[str, Any], BeforeValidator(_from_json), Setting("--kwargs", "JSON")] = Field(
        default_factory=dict[str, Any],
        description="JSON object of keyword arguments, such as '{\"floor\": 0.5}', or of a class's constructor.",
    )


class InputSection(QueuedInput):
    glob: Annotated[str | list[str], Setting("--input", "FILE")] = Field(
        description="Input files: paths, patterns or s3:// and gs:// URLs; - is standard input."
    )
    on_bad_row: Annotated[Literal["error", "skip"], Setting("--on-bad-row")] = ON_BAD_ROW


class OutputSection(OutputPlace):
    dir: Annotated[str, Setting("--output", "DIR")] = Field(
        min_length=1, description="Directory or s3:// or gs:// URL of the results."
    )
    format: OutputFormat = OUTPUT_FORMAT


class RunSection(QueuedRun):
    """How rows run. The Python API accepts the same keys."""

    timeout: Annotated[Seconds, Setting("--timeout", "TIME", on_resume="follow", stored="timeout_s")] = Field(
        default=0.0, ge=0, le=30 * 86400, description="Time limit of one attempt at a row, such as 60s or 5m; 0: none."
    )
    max_attempts: Annotated[int, Setting("--max-attempts", on_resume="follow")] = Field(
        default=3, ge=1, le=100, description="Attempts at a row before it goes to errors.jsonl."
    )
    retry_backoff: Annotated[Seconds, Setting("--retry-backoff", "TIME", on_resume="follow")] = Field(
        default=1.0, ge=0, le=3600, description="Delay before the second attempt, then doubled; default: 1s."
    )
    concurrency: Annotated[int, Setting("--concurrency")] = Field(
        default=0,
        ge=0,
        le=1_000_000_000,
        description="Concurrent rows in the whole cluster; 0: as many as there are slots.",
    )
    concurrency_per_process: Annotated[int, Setting("--concurrency-per-process", on_resume="keep")] = Field(
        default=0,
        ge=0,
        le=4096,
        description="Concurrent rows in one process; default: 0, which is 32 for an `async def`, else 1.",
    )
    lane_key: Annotated[str, Setting("--lane-key", "FIELD")] = Field(
        default="", description="Field of a row; `concurrency` then applies to each of its values."
    )
    gpus: Annotated[int, Setting("--gpus", on_resume="keep")] = Field(
        default=0, ge=0, le=64, description="Whole accelerators per process."
    )
    memory: Annotated[Mebibytes, Setting("--memory", "SIZE", on_resume="keep")] = Field(
        default=0.0, ge=0, le=1e12, description="Memory per process, such as 2GiB; 0: no limit."
    )
    max_rows_per_process: Annotated[int, Setting("--max-rows-per-process", on_resume="keep")] = Field(
        default=0,
        ge=0,
        le=1_000_000_000,
        description="Rows after which a process is replaced, for functions that leak; 0: no limit.",
    )
    name: Annotated[str, Setting("--name", "NAME", on_resume="keep")] = Field(
        default="",
        max_length=200,
        description="Name for use in commands; default: the output directory's.",
    )

    @model_validator(mode="after")
    def _across(self) -> Self:
        if self.lane_key and not self.concurrency:
            raise ValueError("lane_key needs concurrency: the rows at once for each value of the field")
        return self


class MapConfig(WithCloud):
    function: FunctionSection
    input: InputSection
    output: OutputSection
    run: RunSection = RunSection()
    workers: WorkersSection = WorkersSection()
