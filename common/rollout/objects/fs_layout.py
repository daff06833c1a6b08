"""Where an object's file is: `cas/ab/cd/<hex>`, which is the layout in buckets too, or `ab/cd/<hex>` as in versions
before.

Nothing is moved from one to the other: a process of an older version that shares the directory would not find it.
"""

from __future__ import annotations

from pathlib import Path

CAS = "cas"


def path_of(root: Path, name: str) -> Path:
    """Of what is written now. `name`: the object's id, in hex."""
    return root / CAS / name[:2] / name[2:4] / name


def paths_of(root: Path, name: str) -> tuple[Path, Path]:
    """Where it may be, the place that counts first."""
    return path_of(root, name), root / name[:2] / name[2:4] / name


def found(root: Path, first: str) -> list[str]:
    """The names of all objects that begin with the two characters `first`."""
    pattern = f"{first}/??/{'?' * 64}"
    return sorted({path.name for place in (root / CAS, root) for path in place.glob(pattern)})
