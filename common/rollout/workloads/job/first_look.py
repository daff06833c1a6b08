"""Finds faults of a job besides its keys: variables, metrics, provider settings, datasets. They are reported together
with wrong keys, as far as their sections can be read."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar, cast

from pydantic import ValidationError

from rollout.config.load import Located, located
from rollout.config.section import Section
from rollout.model.errors import ConfigError
from rollout.model.problems import faults_of, problems
from rollout.workloads.job.config import DatasetSection, Env, EnvironmentSection, JobConfig, MetricSection, environments
from rollout.workloads.job.datasets import dataset_faults
from rollout.workloads.job.metrics import metric_faults
from rollout.workloads.job.providers_here import settings_faults
from rollout.workloads.job.templates import unset

S = TypeVar("S", bound=Section)


def beside_datasets(settings: JobConfig, environ: Mapping[str, str] | None) -> Iterator[str]:
    """Yield a line for each fault, beginning with its key. `environ` is that of the workers, None if unknown here."""
    yield from settings_faults(settings.environment)
    yield from metric_faults(settings.metrics)
    if environ is not None:
        yield from _unset(environments(settings), environ)


@contextmanager
def whole_list(path: Path, environ: Mapping[str, str] | None) -> Generator[None]:
    """Extend the error that the block raises for wrong keys by the other faults."""
    try:
        yield
    except ConfigError as error:
        try:
            source = Located.read(path)
        except ConfigError:
            raise error from None  # it is no YAML at all
        JobConfig.prepare(source)
        others = list(_beside_keys(source.values, environ))
        if others:
            with located(path, JobConfig):
                raise ConfigError(problems([*faults_of(error.message), *others])) from error
        raise


def _beside_keys(values: dict[str, Any], environ: Mapping[str, str] | None) -> Iterator[str]:
    if (environment := _read(EnvironmentSection, values.get("environment", {}))) is not None:
        yield from settings_faults(environment)
    metrics = [_read(MetricSection, one) for one in _list(values.get("metrics"))]
    if None not in metrics:
        yield from metric_faults([one for one in metrics if one is not None])
    if environ is not None:
        places = [("environment",), ("verifier",), *(("agents", n) for n in range(len(_list(values.get("agents")))))]
        envs = [(place, _read(Env, {"env": _at(values, (*place, "env")) or {}})) for place in places]
        yield from _unset(((place, one.env) for place, one in envs if one is not None), environ)
    for index, table in enumerate(_list(values.get("datasets"))):
        dataset = _read(DatasetSection, table)
        if dataset is not None:
            yield from dataset_faults(f"datasets.{index}", dataset)


def _unset(envs: Any, environ: Mapping[str, str]) -> Iterator[str]:
    return (fault.removeprefix(": ") for fault in unset(envs, environ, lambda place: ""))


def _read(kind: type[S], values: Any) -> S | None:
    try:
        return kind.model_validate(values, strict=True)
    except ValidationError:  # told by whoever reads the whole file
        return None


def _list(values: Any) -> list[Any]:
    return cast("list[Any]", values) if isinstance(values, list) else []


def _at(values: Any, place: tuple[str | int, ...]) -> Any:
    for key in place:
        if isinstance(values, dict):
            values = cast("dict[Any, Any]", values).get(key)
        elif isinstance(values, list) and isinstance(key, int):
            values = cast("list[Any]", values)[key]
        else:
            return None
    return values
