"""Snapshots of a workspace, with hashes of its content, and differences between two of them.

Both are JSON that depends only on the workspace: no times, no owners, paths in order.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from hashlib import file_digest, sha256
from pathlib import Path
from typing import Any, Literal, cast

from rollout.workloads.experiment.contracts import ref_of
from rollout.workloads.json_form import JsonObject, canonical

Kind = Literal["file", "directory", "link"]
IGNORED = (
    ".git", ".hg", ".svn", "node_modules", "__pycache__", ".venv", "venv", ".tox", ".nox", ".mypy_cache",
    ".pytest_cache", ".ruff_cache", ".cache", ".npm", ".pnpm-store", ".gradle", ".terraform", "*.pyc", ".DS_Store",
)  # fmt: skip
"""Patterns of names that snapshots leave out: what tools generate again, and what version control keeps itself."""


@dataclass(frozen=True, slots=True)
class Entry:
    """An entry. `mode` has permission bits, `size` is in bytes. A link's content is its target: `sha256` is that of the
    text."""

    kind: Kind
    mode: int
    size: int
    sha256: str = ""
    target: str = ""

    def row(self, path: str) -> JsonObject:
        row: JsonObject = {"path": path, "type": self.kind, "mode": f"{self.mode:04o}"}
        if self.kind != "directory":
            row |= {"size": self.size, "sha256": self.sha256}
        return row | ({"target": self.target} if self.kind == "link" else {})


@dataclass(frozen=True, slots=True)
class Snapshot:
    """`left_out` has (path, why) of the first of `left_out_count` entries of the workspace that are missing here.
    `exists` says whether the workspace was there."""

    entries: dict[str, Entry] = field(default_factory=dict[str, Entry])
    left_out: tuple[tuple[str, str], ...] = ()
    left_out_count: int = 0
    exists: bool = True

    def manifest(self) -> bytes:
        return canonical(
            {
                "schema_version": "workspace_snapshot_v1",
                "exists": self.exists,
                "entries": [entry.row(path) for path, entry in sorted(self.entries.items())],
                "left_out": {"count": self.left_out_count, "entries": _rows(self.left_out)},
            }
        )

    @classmethod
    def from_manifest(cls, value: JsonObject) -> Snapshot:
        """Parse a manifest. Raises ValueError, KeyError or TypeError if it is not one whose paths stay in the
        workspace."""
        entries = dict[str, Entry]()
        for row in cast("list[JsonObject]", value["entries"]):
            path, kind = str(row["path"]), row["type"]
            if kind not in ("file", "directory", "link") or any(part in ("", ".", "..") for part in path.split("/")):
                raise ValueError(f"not an entry of a workspace: {path[:100]}")
            entries[path] = Entry(
                kind, int(row["mode"], 8), row.get("size", 0), row.get("sha256", ""), row.get("target", "")
            )
        left = value["left_out"]
        return cls(entries, tuple((row["path"], row["why"]) for row in left["entries"]), left["count"], value["exists"])

    def hidden(self, paths: Iterable[str]) -> set[str]:
        """Return those of `paths` that are not in `entries` but may be in the workspace nevertheless: they, or a
        directory above them, were left out, or not everything left out is known by name."""
        if self.left_out_count > len(self.left_out):
            return set(paths)
        names = {name for name, _ in self.left_out}
        return {path for path in paths if not names.isdisjoint(_with_parents(path))}


def take(directory: Path, left_out: Iterable[tuple[str, str]] = (), left_out_count: int = 0) -> Snapshot:
    """Take a snapshot of a copy of a workspace: files, directories and links. Raises OSError. Blocking."""
    entries = dict[str, Entry]()
    for root, names, files in os.walk(directory):
        for name in (*names, *files):
            path = Path(root, name)
            status = path.lstat()
            mode = stat.S_IMODE(status.st_mode)
            if stat.S_ISLNK(status.st_mode):
                target = os.readlink(path)  # noqa: PTH115 - as it is written
                content = os.fsencode(target)
                entry = Entry("link", 0o777, len(content), sha256(content).hexdigest(), target)
            elif stat.S_ISDIR(status.st_mode):
                entry = Entry("directory", mode, 0)
            else:
                with path.open("rb") as file:
                    entry = Entry("file", mode, status.st_size, file_digest(file, "sha256").hexdigest())
            entries[str(path.relative_to(directory))] = entry
    return Snapshot(entries, tuple(sorted(left_out)), left_out_count)


@dataclass(frozen=True, slots=True)
class Changes:
    """Paths by kind of change, in order. `unknown` are in one of the two snapshots, and left out of the other."""

    added: tuple[str, ...]
    removed: tuple[str, ...]
    modified: tuple[str, ...]
    unknown: tuple[str, ...]

    @property
    def all(self) -> Sequence[str]:
        return sorted((*self.added, *self.removed, *self.modified))


def compare(before: Snapshot, after: Snapshot) -> Changes:
    new, old = after.entries.keys() - before.entries.keys(), before.entries.keys() - after.entries.keys()
    unknown = before.hidden(new) | after.hidden(old)
    both = before.entries.keys() & after.entries.keys()
    modified = (path for path in both if before.entries[path] != after.entries[path])
    added, removed = new - unknown, old - unknown
    return Changes(*(tuple(sorted(paths)) for paths in (added, removed, modified, unknown)))


def _with_parents(path: str) -> Iterator[str]:
    parts = path.split("/")
    return ("/".join(parts[:count]) for count in range(1, len(parts) + 1))


def diff(before: Snapshot, after: Snapshot, changes: Changes, refs: tuple[str, str]) -> bytes:
    """Return workspace_diff_v1. `refs` are hashes of the two manifests. `complete` means that only ignored files were
    left out."""

    def rows(paths: Iterable[str], snapshot: Snapshot) -> list[JsonObject]:
        return [snapshot.entries[path].row(path) for path in paths]

    def modified(path: str) -> JsonObject:
        old, new = (_without_path(snapshot.entries[path].row(path)) for snapshot in (before, after))
        return {"path": path, "before": old, "after": new}

    return canonical(
        {
            "schema_version": "workspace_diff_v1",
            "from_ref": ref_of(refs[0]),
            "to_ref": ref_of(refs[1]),
            "added": rows(changes.added, after),
            "removed": rows(changes.removed, before),
            "modified": [modified(path) for path in changes.modified],
            "unknown": list(changes.unknown),
            "complete": all(why == "ignored" for one in (before, after) for _, why in one.left_out)
            and all(one.left_out_count == len(one.left_out) for one in (before, after)),
        }
    )


def _without_path(row: JsonObject) -> JsonObject:
    return {key: value for key, value in row.items() if key != "path"}


def _rows(left_out: Iterable[tuple[str, str]]) -> list[dict[str, Any]]:
    return [{"path": path, "why": why} for path, why in left_out]
