"""Where the result files of a run are for whoever reads them: in a directory here, and perhaps in a bucket as well."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path


class OutputPlace:
    """`directory` and nowhere else."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    @property
    def shown(self) -> str:
        """What a person calls it."""
        return str(self.directory)

    @property
    def lost(self) -> bool:
        """Another command writes to the place by now: nothing more can be uploaded."""
        return False

    @property
    def lock_text(self) -> str:
        """What to say of a lock that this process leaves behind."""
        return ""

    def files(self, results: Sequence[str], made: Iterable[str] = ()) -> dict[str, str]:
        """The `results` that are there, and what was `made` beside them: name to place."""
        there = [self.directory / name for name in results if (self.directory / name).exists()]
        return {path.name: self._of(path) for path in (*there, *map(Path, made))}

    def _of(self, path: Path) -> str:
        return str(path)

    async def claim(self) -> None:
        """The directory is a run's from now on."""

    def publish_soon(self, rows: int) -> None:
        """The files hold so many rows, and further ones will come."""

    async def publish(self, rows: int) -> None:
        """As `publish_soon`, of the last ones."""

    def uploaded(self, rows: int, of: str) -> list[str]:
        """Lines for a person: how many of the `rows` in the directory can be read elsewhere too."""
        return []
