"""Path of an object's file: `cas/ab/cd/<hex>`, the layout in buckets too, or `ab/cd/<hex>` as in earlier versions.

Nothing is moved from one to the other, because a process of an older version that shares the directory would not find
it.
"""

from __future__ import annotations

from pathlib import Path

CAS = "cas"


def path_of(root: Path, name: str) -> Path:
    """Return the path that a new object is written to. `name` is its id in hex."""
    return root / CAS / name[:2] / name[2:4] / name


def paths_of(root: Path, name: str) -> tuple[Path, Path]:
    """Return the paths where an object may be, the preferred one first."""
    return path_of(root, name), root / name[:2] / name[2:4] / name


def found(root: Path, first: str) -> list[str]:
    """Return the names of all objects that begin with the two characters `first`."""
    pattern = f"{first}/??/{'?' * 64}"
    return sorted({path.name for place in (root / CAS, root) for path in place.glob(pattern)})
