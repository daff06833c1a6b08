"""Output of a completed run besides its lines: the trained model, and a plot of its metrics."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeVar, cast

from rollout.model.errors import ConfigError, IncompleteError, NotFoundError
from rollout.model.ids import is_ulid, short
from rollout.snapshots.export import check_export, export_model
from rollout.snapshots.tar import unpack
from rollout.workloads.json_form import JsonObject
from rollout.workloads.output import disk_errors, free_name
from rollout.workloads.port import Fetch
from rollout.workloads.train.lines import COMMITTED, EVALUATIONS, METRICS

CURVES = "curves.png"
BASE = "base"
"""Directory of the base model inside that of an adapter."""
_MARK = ".made-by.json"
"""Hidden file in a model's directory: the run that wrote it, and its files. It is not part of the model."""
_SHOWN = (
    "reward", "loss", "lr", "grad_norm", "mean_token_accuracy", "accuracy", "rewards/accuracies", "rewards/margins",
    "kl", "objective/kl", "entropy", "completions/mean_length",
)  # fmt: skip
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Maker:
    """The origin of a model: the run, and the snapshot (hex)."""

    run_id: str
    snapshot: str


async def write_model(
    fetch: Fetch,
    snapshot: bytes,
    config: JsonObject,
    directory: Path,
    tell: Callable[[str], None],
    *,
    merged: bool = False,
) -> None:
    """Write the model of a snapshot to `directory`, which is new or empty. `config` is that of the snapshot's run.

    If the run trained an adapter, the adapter is written, or with `merged` the whole model. If its base is a snapshot
    too, no library could load that by name, so it is written next to the adapter, as `base`. The directory appears only
    if the model computes what the trainer did; `tell` reports if that could not be checked. Raises NotFoundError,
    ConfigError, ObjectCorruptError or OSError.
    """
    scratch = TemporaryDirectory(dir=directory.parent, prefix=f".{directory.name}-")
    try:
        made = await _make(fetch, snapshot, config, Path(scratch.name), directory, tell, merged=merged)
        made.rename(directory)
    finally:
        await asyncio.to_thread(scratch.cleanup)


async def leave_model(
    fetch: Fetch, maker: Maker, config: JsonObject, directory: Path, tell: Callable[[str], None]
) -> list[str]:
    """Write the model of a run to its output directory, unless it is there. Returns its path if it was written.

    Nothing is deleted: what is there and is not the complete model of this run and snapshot is moved aside, and `tell`
    reports it. Raises IncompleteError if the cluster no longer has the snapshot, ConfigError or StorageError.
    """
    scratch = directory.with_name(f".{directory.name}-{maker.run_id}")
    with disk_errors(directory):
        await asyncio.to_thread(shutil.rmtree, scratch, ignore_errors=True)  # a command before was killed
        if await asyncio.to_thread(_is_whole, directory, maker):
            return []
        scratch.mkdir()
        try:
            made = await _make(fetch, bytes.fromhex(maker.snapshot), config, scratch, directory, tell)
            aside = await _to_its_end(_put, made, maker, directory)
        except NotFoundError as error:
            raise IncompleteError(
                f"{directory} cannot be written: snapshot {maker.snapshot[:12]} of run {short(maker.run_id)}, or what "
                f"it needs, is not there any more ({error.message}). Set output.model = false to go without, or start "
                "another run, in another output directory"
            ) from error
        finally:
            await asyncio.to_thread(shutil.rmtree, scratch, ignore_errors=True)
    if aside is not None:
        tell(f"note: {directory} was not the model that this run left, or not all of it: it is {aside} now")
    return [str(directory)]


async def _make(
    fetch: Fetch,
    snapshot: bytes,
    config: JsonObject,
    here: Path,
    directory: Path,
    tell: Callable[[str], None],
    *,
    merged: bool = False,
) -> Path:
    """Write the model somewhere below `here`, and return its path; it is then moved to `directory`."""
    model = config["model"]
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
    named = "" if base else str(model["path"] or model["uri"])
    made, unchecked = await _to_its_end(_export, here, directory, named, merged)
    if unchecked:
        tell(f"note: {directory} was not compared with what the trainer computed: {unchecked}")
    return made


async def _bring(fetch: Fetch, snapshot: bytes, directory: Path) -> None:
    archive = directory.with_suffix(".tar")
    await fetch(snapshot, archive)
    await _to_its_end(unpack, archive, directory, snapshot)
    archive.unlink()


async def _to_its_end(function: Callable[..., T], *arguments: Any) -> T:
    """Run `function` in a thread to its end, even if cancelled, because its output is deleted afterwards."""
    work = asyncio.ensure_future(asyncio.to_thread(function, *arguments))
    try:
        return await asyncio.shield(work)
    finally:
        await asyncio.wait([work])


def _export(scratch: Path, directory: Path, base: str, merged: bool) -> tuple[Path, str]:
    """Return (path of the model, why it was not checked). `base` is that of an adapter; if it is empty, `base-state`
    has it."""
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
    return made, check_export(scratch / "state", made, base or str(made / BASE))


def _put(made: Path, maker: Maker, directory: Path) -> Path | None:
    """Move the model into place. Returns where an earlier one was moved."""
    (made / _MARK).write_text(json.dumps(asdict(maker) | {"files": _sizes(made)}, indent=2) + "\n", "utf-8")
    aside: Path | None = None
    if os.path.lexists(directory):
        made_by = str(_mark(directory).get("run_id"))
        aside = free_name(directory, made_by if is_ulid(made_by) else "unknown")
        directory.rename(aside)
    made.rename(directory)
    return aside


def _is_whole(directory: Path, maker: Maker) -> bool:
    mark = _mark(directory)
    files: JsonObject = mark.get("files", {})
    return asdict(maker).items() <= mark.items() and files.items() <= _sizes(directory).items()


def _mark(directory: Path) -> JsonObject:
    """Return the marker that was written with a model, or {} if the model is not ours."""
    try:
        found: Any = json.loads((directory / _MARK).read_bytes())
    except (OSError, ValueError):
        return {}
    return cast(JsonObject, found) if isinstance(found, dict) else {}


def _sizes(directory: Path) -> dict[str, int]:
    """Return the sizes of the files below `directory`, in bytes by name."""
    files = (path for path in sorted(directory.rglob("*")) if path.is_file())
    return {path.relative_to(directory).as_posix(): path.stat().st_size for path in files}


def draw_curves(directory: Path) -> list[str]:
    """Plot the metrics in `directory` as `curves.png`, unless it is there. Returns its path if it was plotted.

    Without matplotlib nothing is plotted.
    """
    curves, metrics = directory / CURVES, directory / METRICS
    if find_spec("matplotlib") is None or not metrics.exists():
        return []
    if curves.exists() and curves.stat().st_mtime_ns >= metrics.stat().st_mtime_ns:
        return []
    with disk_errors(curves):
        return [str(curves)] if draw(_lines(metrics), _lines(directory / EVALUATIONS), curves) else []


def draw(metrics: list[JsonObject], evaluations: list[JsonObject], path: Path) -> bool:
    """Plot these lines in the format of the path's suffix. Returns False if there is nothing to plot.

    Raises ConfigError if matplotlib is not installed or does not write this format, or OSError.
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
        _draw(axes, metrics, name, "train", "C0")
        if name != "loss" or "reward" not in names:  # a policy's evaluation has its reward's opposite for a loss
            _draw(axes, evaluations, name, "eval", "C1")
        if len(axes.lines) > 1:
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


def _draw(axes: Any, lines: list[JsonObject], name: str, label: str, color: str) -> None:
    """Draw a curve. Uncommitted steps are dashed and continue the rest. A single point is drawn as a dot."""
    there = [line for line in lines if name in line]
    kept = [line for line in there if line.get(COMMITTED, True)]
    left = there[len(kept) :]
    parts = [(kept, label, "-")] + [([*kept[-1:], *left], f"{label}, not committed", "--")] * bool(left)
    for part, what, style in parts:
        points = ([line["step"] for line in part], [line[name] for line in part])
        if part:
            axes.plot(*points, style, label=what, linewidth=1, color=color, marker="" if len(part) > 1 else "o")


def _lines(path: Path) -> list[JsonObject]:
    return [json.loads(line) for line in path.read_bytes().splitlines()] if path.exists() else []
