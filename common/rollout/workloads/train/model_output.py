"""What a completed run leaves beside its lines: the trained model, and a picture of its metrics."""

from __future__ import annotations

import asyncio
import json
import shutil
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from rollout.model.errors import ConfigError, NotFoundError
from rollout.snapshots.export import export_model
from rollout.snapshots.tar import unpack
from rollout.workloads.json_form import JsonObject
from rollout.workloads.port import Fetch
from rollout.workloads.train.lines import EVALUATIONS, METRICS

CURVES = "curves.png"
BASE = "base"
"""Of an adapter, in its directory."""
_SHOWN = ("loss", "lr", "grad_norm", "mean_token_accuracy", "accuracy", "rewards/accuracies", "rewards/margins", "kl")


async def write_model(
    fetch: Fetch, snapshot: bytes, config: JsonObject, directory: Path, *, merged: bool = False
) -> None:
    """The model of a snapshot into `directory`, in the place of an older one. `config`: of the snapshot's run.

    Of a run that trained an adapter it is the adapter, or `merged` the whole model. Where its base is a snapshot too,
    no library could load that by its name, so it is written beside the adapter, as `base`. NotFoundError, ConfigError,
    ObjectCorruptError, OSError.
    """
    scratch = TemporaryDirectory(dir=directory.parent, prefix=f".{directory.name}-")
    try:
        here, model = Path(scratch.name), config["model"]
        await _bring(fetch, snapshot, here / "state")
        base = bytes.fromhex(model["snapshot"]) if config["algorithm"]["settings"].get("lora") else b""
        if base:  # a whole model: nothing is trained from the snapshot of an adapter
            try:
                await _bring(fetch, base, here / "base-state")
            except NotFoundError as error:
                raise NotFoundError(
                    f"the base of this adapter, {model['uri']} (snapshot {base.hex()[:12]}), is gone from the run's "
                    f"cluster, and an adapter is of no use without its base: train it again ({error.message})"
                ) from error
        await asyncio.to_thread(_place, here, directory, "" if base else str(model["path"] or model["uri"]), merged)
    finally:
        await asyncio.to_thread(scratch.cleanup)


async def _bring(fetch: Fetch, snapshot: bytes, directory: Path) -> None:
    archive = directory.with_suffix(".tar")
    await fetch(snapshot, archive)
    await asyncio.to_thread(unpack, archive, directory, snapshot)
    archive.unlink()


def _place(scratch: Path, directory: Path, base: str, merged: bool) -> None:
    """`base`: of an adapter; empty: what is in `base-state`."""
    made = scratch / "model"
    if base:
        export_model(scratch / "state", made, base=base, merged=merged)
    elif merged:
        export_model(scratch / "base-state", scratch / "base")
        export_model(scratch / "state", made, base=str(scratch / "base"), merged=True)
    else:
        # peft takes a path as the process that loads has it, not as the adapter's directory does.
        export_model(scratch / "state", made, base=str(directory.absolute() / BASE))
        export_model(scratch / "base-state", made / BASE)
    if directory.exists():
        shutil.rmtree(directory)
    made.rename(directory)


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
