"""Chooses the views of a run by the questions that its design can answer."""

from __future__ import annotations

from enum import StrEnum
from functools import cache
from importlib.resources import files


class ViewSet(StrEnum):
    AB_TEST = "AbTest"
    MULTI_VARIANT = "MultiVariant"
    PARAMETER_SWEEP = "ParameterSweep"
    REGRESSION = "Regression"
    PROJECT = "Project"


_FILES: dict[ViewSet, tuple[str, ...]] = {
    ViewSet.AB_TEST: ("trials", "summary", "paired"),
    ViewSet.MULTI_VARIANT: ("trials", "summary", "paired", "ranking"),
    ViewSet.PARAMETER_SWEEP: ("trials", "summary", "ranking", "parameter_sweep"),
    ViewSet.REGRESSION: ("trials", "summary", "project"),
    ViewSet.PROJECT: ("trials", "project"),
}


def view_set_of(comparison: str, variants: int) -> ViewSet:
    """Return the views. `comparison` is the design's: paired, unpaired or none."""
    if comparison == "paired":
        return ViewSet.AB_TEST if variants <= 2 else ViewSet.MULTI_VARIANT
    return ViewSet.PARAMETER_SWEEP if comparison == "unpaired" else ViewSet.REGRESSION


@cache
def views_sql(view_set: ViewSet) -> str:
    directory = files("rollout.workloads.experiment.analysis") / "views"
    return "\n".join((directory / f"{name}.sql").read_text("utf-8") for name in _FILES[view_set])
