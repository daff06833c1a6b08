"""What a completed run leaves beside its lines: the trained model, and a picture of its metrics."""

from __future__ import annotations

import asyncio
import json
import shutil
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from rollout.model.errors import ConfigError
from rollout.snapshots.export import export_model
from rollout.snapshots.tar import unpack
from rollout.workloads.json_form import JsonObject
from rollout.workloads.port import Fetch
from rollout.workloads.train.lines import EVALUATIONS, METRICS

CURVES = "curves.png"
_SHOWN = ("loss", "lr", "grad_norm", "mean_token_accuracy", "accuracy", "rewards/accuracies", "rewards/margins", "kl")


async def write_model(fetch: Fetch, snapshot: bytes, directory: Path, base: str) -> str:
    """The model of a snapshot into `directory`, in the place of an older one: its path. `base`: the run's model."""
    scratch = TemporaryDirectory(dir=directory.parent, prefix=".model-")
    try:
        archive = Path(scratch.name) / "state.tar"
        await fetch(snapshot, archive)
        await asyncio.to_thread(_place, archive, snapshot, Path(scratch.name), directory, base)
    finally:
        await asyncio.to_thread(scratch.cleanup)
    return str(directory)


def _place(archive: Path, snapshot: bytes, scratch: Path, directory: Path, base: str) -> None:
    unpack(archive, scratch / "state", snapshot)
    export_model(scratch / "state", scratch / "model", base=base)
    if directory.exists():
        shutil.rmtree(directory)
    (scratch / "model").rename(directory)


def draw_curves(directory: Path) -> list[str]:
    """`curves.png` of the metrics in `directory`: its path, or nothing where matplotlib is not installed."""
    if find_spec("matplotlib") is None:
        return []
    metrics, evaluations = _lines(directory / METRICS), _lines(directory / EVALUATIONS)
    return [str(directory / CURVES)] if draw(metrics, evaluations, directory / CURVES) else []


def draw(metrics: list[JsonObject], evaluations: list[JsonObject], path: Path) -> bool:
    """A picture of these lines in the format of the name's ending; False: they have nothing to show.

    ConfigError: matplotlib is not installed, or writes no such format. OSError.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError('curves need matplotlib on this host: pip install "rollout-engine[train]"') from error
    names = [name for name in _SHOWN if any(name in line for line in metrics)]
    if not names:
        return False
    rows = -(-len(names) // 2)
    figure: Any = Figure(figsize=(10, 3 * rows), layout="constrained")
    for place, name in enumerate(names, 1):
        axes: Any = figure.add_subplot(rows, 2, place)
        _draw(axes, metrics, name, "train")
        if any(name in line for line in evaluations):
            _draw(axes, evaluations, name, "eval")
            axes.legend()
        axes.set_title(name)
        axes.set_xlabel("step")
    scratch = path.with_name(f".{path.name}{path.suffix}")
    try:
        figure.savefig(scratch, metadata={"Software": None} if path.suffix == ".png" else None)
        scratch.replace(path)
    except ValueError as error:
        raise ConfigError(f"{path}: {error}") from error
    finally:
        scratch.unlink(missing_ok=True)
    return True


def _draw(axes: Any, lines: list[JsonObject], name: str, label: str) -> None:
    there = [(line["step"], line[name]) for line in lines if name in line]
    axes.plot([step for step, _ in there], [value for _, value in there], label=label, linewidth=1)


def _lines(path: Path) -> list[JsonObject]:
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()] if path.exists() else []
