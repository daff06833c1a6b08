"""The configuration of `rollout map`: a file, the command's options, or both."""

from __future__ import annotations

import re
from typing import Annotated, Any, Self

from pydantic import BeforeValidator, Field, model_validator

from rollout.config.cloud import WithCloud
from rollout.config.section import Section
from rollout.workloads.sections import OutputPlace, QueuedInput

_UNITS_S = {"": 1.0, "ms": 0.001, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86400.0}
_UNITS_MIB = {"": 1.0} | {
    f"{letter}{rest}": 1024.0**power
    for power, letter in ((-1, "k"), (0, "m"), (1, "g"), (2, "t"))
    for rest in ("", "ib")
}
_NUMBER = re.compile(r"\s*(\d+(?:\.\d*)?)\s*([A-Za-z]*)\s*")


def seconds(value: Any) -> Any:
    """ "60s", "1.5 h", or a number of seconds."""
    return _with_unit(value, _UNITS_S, "60s, 5m, 1h, or a number of seconds")


def mebibytes(value: Any) -> Any:
    """ "2GiB", "512MiB", or a number of MiB."""
    return _with_unit(value, _UNITS_MIB, "2GiB, 512MiB, or a number of MiB")


def _with_unit(value: Any, units: dict[str, float], examples: str) -> Any:
    if not isinstance(value, str):
        return value
    match = _NUMBER.fullmatch(value)
    factor = units.get(match[2].lower()) if match else None
    if match is None or factor is None:
        raise ValueError(f"must be like {examples}, got {value!r}")
    return float(match[1]) * factor


Seconds = Annotated[float, BeforeValidator(seconds)]
Mebibytes = Annotated[float, BeforeValidator(mebibytes)]


class FunctionSection(Section):
    name: str = Field(min_length=1, description="PKG.MODULE:FUNCTION: a function, an `async def` or a class.")
    code: str | None = Field(
        default=None, description="Directory that holds it, which travels to the workers. Default: the current one."
    )


class InputSection(QueuedInput):
    glob: str | list[str] = Field(description="JSON Lines: files, globs, s3:// or gs:// URLs, or - for standard input.")


class OutputSection(OutputPlace):
    dir: str = Field(min_length=1, description="Output directory: a path, s3:// or gs:// URL.")


class WorkersSection(Section):
    count: int = Field(default=1, ge=1, le=1024, description="Workers to start when no coordinator is named.")


class RunSection(Section):
    """How rows are run. It is what the Python API takes, too."""

    timeout: Seconds = Field(default=0.0, ge=0, le=30 * 86400, description="Of one try at a row; 0: none.")
    max_attempts: int = Field(default=3, ge=1, le=100, description="Tries at a row before it goes to errors.jsonl.")
    retry_backoff: Seconds = Field(
        default=1.0, ge=0, le=3600, description="Before the second try; doubled for each one after it."
    )
    concurrency: int = Field(
        default=0, ge=0, le=1_000_000_000, description="Rows at once over all workers; 0: as many as they have slots."
    )
    lane_key: str = Field(default="", description="Field of a row: `concurrency` then holds for each of its values.")
    gpus: int = Field(default=0, ge=0, le=64, description="Whole accelerators for the process that runs a row.")
    memory: Mebibytes = Field(
        default=0.0, ge=0, le=1e12, description="Memory for the process that runs a row; 0: no limit."
    )
    name: str = Field(
        default="", max_length=200, description="By which commands know the run; default: the output directory's."
    )
    priority: int = Field(default=0, ge=-1000, le=1000, description="Larger gets a larger share of the workers.")

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
