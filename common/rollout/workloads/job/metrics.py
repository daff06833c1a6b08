"""Metrics that a job asks for besides mean reward and pass rate, over the scored trials of an agent in a dataset."""

from __future__ import annotations

import importlib
import json
import math
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from rollout.model.errors import ConfigError, InputError
from rollout.processes.command import run
from rollout.processes.interpreter import import_from
from rollout.workloads.job.averages import mean
from rollout.workloads.job.config import MetricSection
from rollout.workloads.job.rewards import Rewards
from rollout.workloads.modules import import_faults

_UV_S = 600.0
_SIMPLE: dict[str, Callable[[Sequence[float]], float]] = {"sum": math.fsum, "min": min, "max": max, "mean": mean}


def metric_name(metric: MetricSection) -> str:
    """Return the metric's name in results."""
    if metric.name is not None:
        return metric.name
    if metric.function is not None:
        return metric.function.rpartition(":")[2]
    return metric.type if metric.type in _SIMPLE else Path(str(metric.kwargs["script_path"])).stem


def metric_faults(metrics: Sequence[MetricSection]) -> Iterator[str]:
    """Yield a line for each metric that cannot be computed: a function that cannot be imported, a missing script, or a
    name used twice."""
    seen = set[str]()
    for index, metric in enumerate(metrics):
        name = metric_name(metric)
        if name in seen:
            yield f'metrics.{index}: a second metric called "{name}": give it a name of its own'
        seen.add(name)
        if metric.function is not None:
            yield from (f"metrics.{index}.function: {fault}" for fault in import_faults(metric.function))
        script = metric.kwargs.get("script_path")
        if metric.type == "uv-script" and not Path(str(script)).is_file():
            yield f"metrics.{index}.kwargs.script_path: {script}: no such file"


def compute(metric: MetricSection, rewards: Sequence[Rewards | None]) -> dict[str, float]:
    """Compute the metric. `rewards` are those of each scored trial, None if the agent failed before it was verified.

    Simple metrics give one number, or one for each name if trials have several rewards; a missing reward counts as 0.
    Without trials the result is empty. Raises InputError if a user's metric failed.
    """
    if not rewards:
        return {}
    if metric.type in _SIMPLE:
        return _simple(metric_name(metric), _SIMPLE[metric.type], rewards)
    if metric.function is not None:
        return _own(metric_name(metric), _call(metric.function, rewards))
    return _own(metric_name(metric), _uv_script(Path(str(metric.kwargs["script_path"])), rewards))


def _simple(
    name: str, function: Callable[[Sequence[float]], float], rewards: Sequence[Rewards | None]
) -> dict[str, float]:
    keys = sorted({key for reward in rewards for key in reward or {}})
    if len(keys) <= 1:
        return {name: _finite(name, lambda: function([next(iter((one or {}).values()), 0.0) for one in rewards]))}
    return {
        f"{name}.{key}": _finite(name, lambda key=key: function([(one or {}).get(key, 0.0) for one in rewards]))
        for key in keys
    }


def _finite(name: str, compute: Callable[[], float]) -> float:
    try:
        value = compute()
    except OverflowError:
        value = math.inf
    if not math.isfinite(value):
        raise InputError(f"the metric {name} is too large to be a number: the rewards are huge")
    return value


def _function(path: str) -> Callable[[list[Rewards | None]], Any]:
    """Import a function of an installed package or of a file in the current directory, like an agent's import_path.
    Raises ConfigError."""
    module, _, name = path.partition(":")
    import_from(str(Path.cwd()))
    try:
        found: Any = importlib.import_module(module)
        for part in name.split("."):
            found = getattr(found, part)
    except (Exception, SystemExit) as error:  # what is imported is the person's
        kind = "" if isinstance(error, ImportError | AttributeError) else f"{type(error).__name__}: "
        raise ConfigError(f"{path} cannot be imported: {kind}{error} (looked for in {Path.cwd()} too)") from error
    if not callable(found):
        raise ConfigError(f"{path} is no function")
    return found


def _call(path: str, rewards: Sequence[Rewards | None]) -> Any:
    function = _function(path)
    try:
        return function([None if one is None else dict(one) for one in rewards])
    except (Exception, SystemExit) as error:
        raise InputError(f"the metric {path} failed: {type(error).__name__}: {error}") from error


def _own(name: str, value: Any) -> dict[str, float]:
    values = cast("Mapping[Any, Any]", value) if isinstance(value, Mapping) else {name: value}
    for key, one in values.items():
        if isinstance(one, bool) or not isinstance(one, int | float) or not math.isfinite(one):
            raise InputError(f"the metric {name} must give a finite number or a dict of them, not {key}: {one!r:.60}")
    return {str(key): float(one) for key, one in values.items()}


def _uv_script(path: Path, rewards: Sequence[Rewards | None]) -> Any:
    """Call a script as Harbor does: `uv run SCRIPT -i rewards.jsonl -o metric.json`, with a line of JSON per trial."""
    with tempfile.TemporaryDirectory() as directory:
        given, wanted = Path(directory) / "rewards.jsonl", Path(directory) / "metric.json"
        given.write_text("".join(json.dumps(one) + "\n" for one in rewards), "utf-8")
        try:
            done = run(["uv", "run", path, "-i", given, "-o", wanted], timeout_s=_UV_S)
        except FileNotFoundError as error:
            raise InputError(f"the metric {path} needs uv, which is not installed here") from error
        except TimeoutError as error:
            raise InputError(f"the metric {path} did not end within {_UV_S:.0f} s") from error
        if done.code:
            raise InputError(f"the metric {path} failed: {done.reason or f'exit code {done.code}'}")
        try:
            return json.loads(wanted.read_bytes())
        except (OSError, ValueError) as error:
            raise InputError(f"the metric {path} left no JSON in the file after -o: {error}") from error
