"""facts/run_manifest.json: what a run says of itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from rollout.config.wording import describe
from rollout.model.errors import ConfigError, InputError
from rollout.workloads.experiment.analysis.columns import MANIFEST
from rollout.workloads.experiment.analysis.verdict import Direction

FACTS = "facts"


class _Part(BaseModel):
    model_config = ConfigDict(extra="ignore", frozen=True)


class Design(_Part):
    comparison: Literal["paired", "unpaired", "none"] = "paired"
    replications: int = 1
    order: str = ""
    seed: int | None = None


class Variant(_Part):
    variant_id: str
    baseline: bool = False
    image: str | None = None
    bindings: dict[str, Any] = {}


class PrimaryMetric(_Part):
    name: str = "score"
    direction: Direction = "maximize"


class Thresholds(_Part):
    pass_: float = Field(default=1.0, alias="pass")
    non_inferiority_margin: float | None = None


class Manifest(_Part):
    """What the analysis reads of a `run_manifest_v1`; other keys are left out."""

    run_id: str
    experiment_id: str
    name: str
    created_at: str = ""
    design: Design = Design()
    baseline: str
    variants: tuple[Variant, ...]
    total_slots: int
    primary_metric: PrimaryMetric = PrimaryMetric()
    thresholds: Thresholds = Thresholds()


def facts_of(directory: Path) -> Path | None:
    """The directory of facts that `directory` has or is; None: neither."""
    for path in (directory / FACTS, directory):
        if (path / MANIFEST).is_file():
            return path
    return None


def read_manifest(facts: Path) -> Manifest:
    """ConfigError: it is not there. InputError: it is not as it was written."""
    path = facts / MANIFEST
    try:
        return Manifest.model_validate_json(path.read_bytes())
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror or error}") from error
    except ValidationError as error:
        faults = [
            (".".join(map(str, one["loc"])) or "the file", describe(one, ".".join(map(str, one["loc"]))))
            for one in error.errors(include_url=False)
        ]
        raise InputError("\n".join(f"{path}: {place}: {what}" for place, what in faults)) from None
