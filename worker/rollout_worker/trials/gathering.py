"""Copies logs, and the artifacts that a task or a job declares, out of a sandbox."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
from collections.abc import Awaitable, Callable, Container, Iterator, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, cast

from rollout.storage.disk import FULL
from rollout.workloads.job.artifacts import MAIN_SERVICE, Artifact

from rollout_worker.sandboxes import trees
from rollout_worker.sandboxes.errors import SandboxFileError
from rollout_worker.sandboxes.port import MIB, Sandbox
from rollout_worker.trials.making import admin
from rollout_worker.trials.masking import Masks
from rollout_worker.trials.port import TrialFault

ARTIFACTS_DIRECTORY = "/logs/artifacts"
MANIFEST = "manifest.json"
OK, MISSING, FAILED, TOO_LARGE = "ok", "missing", "failed", "too_large"
"""Results for an artifact."""
LOG_BYTES = 64 * MIB
FILES_MAX = 20_000
"""Maximum files and directories of each copied directory."""
ARTIFACT_BYTES = 1024 * MIB
_KEPT_OF_LOG = 4 * MIB
Look = Callable[[Path | None], Awaitable[None]]
"""Called with a complete copy of a directory, or None."""
_OURS = frozenset({"stdout.txt", "stderr.txt"})
_SHORTEN_S = 120.0
# Of large files the beginning and the end are kept. What an agent did to these programs harms its own logs only.
_SHORTEN = """
find {path} -type f -size +{kib}k 2>/dev/null | while IFS= read -r file; do
  head -c {half} "$file" > "$file.rollout-head" && tail -c {half} "$file" > "$file.rollout-tail" || exit 1
  {{ cat "$file.rollout-head"; printf '\\n[... cut ...]\\n'; cat "$file.rollout-tail"; }} > "$file.rollout-new"
  rm -f "$file" "$file.rollout-head" "$file.rollout-tail" && mv "$file.rollout-new" "$file"
done
"""


async def empty_of(sandbox: Sandbox, *paths: str) -> frozenset[str]:
    """Return the directories that are known to be empty, which need no copy. Raises SandboxError."""
    names = await sandbox.names(*paths) or {}
    return frozenset(path for path, found in names.items() if not found)


async def bring_logs(sandbox: Sandbox, source: str, target: Path, masks: Masks, look: Look | None = None) -> list[str]:
    """Copy the directory `source` to `target`, except stdout.txt and stderr.txt, which are ours, and return remarks.

    `look` is called once `source` is copied, or is too large, and before anything is changed. Raises SandboxError, or
    TrialFault if the worker's disk is full.
    """
    try:
        return await _bring_logs(sandbox, source, target, masks, look)
    except OSError as error:
        return [f"{source} was not kept whole: {_why(error)}"]


async def _bring_logs(sandbox: Sandbox, source: str, target: Path, masks: Masks, look: Look | None) -> list[str]:
    staged = target.with_name(f".{target.name}.staged")
    remarks = list[str]()
    try:
        try:
            moved = await sandbox.download(source, staged, max_bytes=LOG_BYTES, max_entries=FILES_MAX)
        except SandboxFileError as error:
            reason = error.context.get("reason")
            if reason not in ("too_large", "too_many"):
                return [] if reason == "ENOENT" else [f"{source} was not kept: {error.message}"]
            if look is not None:
                await look(None)
                look = None
            if reason == "too_many":
                return [f"{source} holds more than {FILES_MAX} files and directories: it was kept in part only"]
            remarks.append(f"{source} holds more than {LOG_BYTES // MIB} MiB: of large files the middle was left out")
            await asyncio.to_thread(shutil.rmtree, staged, True)
            script = _SHORTEN.format(path=source, kib=_KEPT_OF_LOG >> 10, half=_KEPT_OF_LOG // 2)
            await sandbox.exec(script, cwd="/", user=admin(sandbox), timeout_s=_SHORTEN_S)
            try:
                moved = await sandbox.download(source, staged, max_bytes=LOG_BYTES, max_entries=FILES_MAX)
            except SandboxFileError as again:
                return [*remarks, f"{source} was kept in part only: {again.message}"]
        if look is not None:
            await look(None if moved.skipped or not staged.is_dir() else staged)
        remarks += [f"{source}/{name} was not kept: {why}" for name, why in moved.skipped[:3]]
    finally:
        await asyncio.to_thread(_take_in, staged, target, masks)
    return remarks


def _why(error: OSError) -> str:
    """Return the remark for an agent's file that cannot be kept. Raises TrialFault if the worker's disk is full, so
    that no other files can be kept either."""
    if error.errno in FULL:
        raise TrialFault("environment_resource_allocation_failed", f"the worker's disk is full: {error}") from error
    return f"{type(error).__name__}: {error.strerror or error}"


def _take_in(staged: Path, target: Path, masks: Masks) -> None:
    if not staged.is_dir() or staged.is_symlink():
        staged.unlink(missing_ok=True)
        return
    try:
        without_links(staged)
        for path in sorted(staged.iterdir()):
            if path.name in _OURS:
                continue
            for file in (path, *path.rglob("*")) if path.is_dir() else (path,):
                if file.is_file():
                    masks.file(file)
            target.mkdir(parents=True, exist_ok=True)
            path.replace(target / path.name)
    finally:
        trees.remove(str(staged))


def without_links(directory: Path) -> list[str]:
    """Remove what our archives cannot hold, above all links, and return the names."""
    removed = list[str]()
    for root, names, files in os.walk(directory):
        for name in (*names, *files):
            path = Path(root, name)
            if path.is_symlink() or not (path.is_file() or path.is_dir()):
                path.unlink()
                removed.append(str(path.relative_to(directory)))
    return removed


@dataclass(frozen=True, slots=True)
class Brought:
    """A copied artifact. Paths in the manifest are relative to it."""

    source: str
    destination: str
    status: str
    is_directory: bool = False
    executable: tuple[str, ...] = ()  # of a directory: names of programs in it; of a file: "." where it is one
    message: str = ""

    def row(self) -> dict[str, Any]:
        row: dict[str, Any] = {
            "source": self.source,
            "destination": self.destination,
            "type": "directory" if self.is_directory else "file",
            "status": self.status,
        }
        return (
            row
            | ({"executable": list(self.executable)} if self.executable else {})
            | ({"message": self.message} if self.message else {})
        )


def declared(artifacts: Sequence[Artifact], workdir: str, empty: Container[str] = ()) -> Iterator[Artifact]:
    """Yield the artifacts that a trial keeps: first /logs/artifacts, as always. Sources are absolute."""
    if ARTIFACTS_DIRECTORY not in empty:
        yield Artifact(source=ARTIFACTS_DIRECTORY)
    for artifact in artifacts:
        yield artifact.model_copy(update={"source": os.path.normpath(Path(workdir, artifact.source))})


async def bring_artifacts(
    sandbox: Sandbox, workdir: str, artifacts: Sequence[Artifact], target: Path, empty: Container[str] = ()
) -> list[Brought]:
    """Copy each to its destination below `target`, and record its origin in manifest.json.

    `empty` has directories known to be empty. Raises SandboxError, or TrialFault if the worker's disk is full.
    """
    brought, room = list[Brought](), ARTIFACT_BYTES
    for artifact in declared(artifacts, workdir, empty):
        try:
            one, size = await _bring(sandbox, artifact, target, room)
        except OSError as error:
            one, size = replace(_missing(artifact), status=FAILED, message=_why(error)), 0
        room -= size
        if not (artifact.source == ARTIFACTS_DIRECTORY and one.status == MISSING):
            brought.append(one)
    if brought:
        await asyncio.to_thread(_write_manifest, target, brought)
    elif artifacts or ARTIFACTS_DIRECTORY not in empty:
        await asyncio.to_thread(shutil.rmtree, target, True)  # what was made on the way
    return brought


def _write_manifest(target: Path, brought: Sequence[Brought]) -> None:
    target.mkdir(parents=True, exist_ok=True)
    text = json.dumps([one.row() for one in brought], indent=2, ensure_ascii=False)
    (target / MANIFEST).write_text(text + "\n", "utf-8", "backslashreplace")


def _missing(artifact: Artifact) -> Brought:
    return Brought(artifact.source, artifact.destination or artifact.source.lstrip("/"), MISSING)


async def _bring(sandbox: Sandbox, artifact: Artifact, target: Path, room: int) -> tuple[Brought, int]:
    missing = _missing(artifact)
    if artifact.service not in (None, MAIN_SERVICE):
        return replace(missing, status=FAILED, message=f"there is no service {artifact.service} here"), 0
    path = target / missing.destination
    await asyncio.to_thread(_make_way, target, path)
    try:
        moved = await sandbox.download(artifact.source, path, max_bytes=room, max_entries=FILES_MAX)
    except SandboxFileError as error:
        await asyncio.to_thread(trees.remove, str(path))
        reason = str(error.context.get("reason", ""))
        status = {"ENOENT": MISSING, "ENOTDIR": MISSING, "too_large": TOO_LARGE, "too_many": TOO_LARGE}.get(
            reason, FAILED
        )
        return replace(missing, status=status, message=error.message), 0
    executable, removed = await asyncio.to_thread(_look_over, path, artifact.exclude)
    left_out = [*(name for name, _ in moved.skipped), *removed]
    if artifact.source == ARTIFACTS_DIRECTORY and not moved.files:
        return missing, 0
    message = f"left out: {', '.join(left_out[:5])}" if left_out else ""
    found = replace(missing, status=OK, is_directory=path.is_dir(), executable=executable, message=message)
    return found, moved.size


def _make_way(target: Path, path: Path) -> None:
    """Remove links that another artifact brought and that are in the way."""
    if target.is_dir():
        without_links(target)
    if path.is_file():
        path.unlink()
    path.parent.mkdir(parents=True, exist_ok=True)


def _look_over(path: Path, exclude: Sequence[str]) -> tuple[tuple[str, ...], list[str]]:
    """Return (names of programs, what was removed) of a copy from a sandbox."""
    if not path.is_dir():
        return ((".",) if os.access(path, os.X_OK) and path.stat().st_mode & 0o100 else ()), []
    removed = without_links(path)
    executable = list[str]()
    for one in sorted(path.rglob("*")):
        name = str(one.relative_to(path))
        if not one.exists():
            continue  # in a directory that is gone
        if any(fnmatchcase(name, pattern) or fnmatchcase(one.name, pattern) for pattern in exclude):
            trees.remove(str(one))
        elif one.is_file() and one.stat().st_mode & 0o100:
            executable.append(name)
    return tuple(executable), removed


def read_manifest(directory: Path) -> list[Brought]:
    """Read the manifest of `bring_artifacts`. Raises TrialFault if it cannot be read. Blocking."""
    try:
        rows: Any = json.loads((directory / MANIFEST).read_bytes())
        found = [
            Brought(
                str(row["source"]),
                str(row["destination"]),
                str(row["status"]),
                row["type"] == "directory",
                tuple(row.get("executable", ())),
            )
            for row in cast("list[dict[str, Any]]", rows)
        ]
    except FileNotFoundError:
        return []
    except (ValueError, KeyError, TypeError) as error:
        raise TrialFault("task_invalid", f"{directory / MANIFEST} cannot be read: {error}") from error
    return [one for one in found if _is_inside(one.destination)]


def _is_inside(destination: str) -> bool:
    return not destination.startswith("/") and ".." not in Path(destination).parts


async def put_artifacts(sandbox: Sandbox, brought: Sequence[Brought], directory: Path) -> None:
    """Copy artifacts to their original places in another sandbox. Raises SandboxError or OSError."""
    for one in brought:
        if one.status != OK:
            continue
        path = directory / one.destination
        for name in one.executable:
            await asyncio.to_thread((path / name).chmod, 0o755)
        await sandbox.upload(path, one.source)
