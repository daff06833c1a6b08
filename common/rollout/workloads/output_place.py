"""Where users find a run's result files: in a local directory, and possibly in a bucket as well."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path


class OutputPlace:
    """A local directory only."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    @property
    def shown(self) -> str:
        """Its name for users."""
        return str(self.directory)

    @property
    def lost(self) -> bool:
        """Whether another command now writes to the place, so that nothing more can be uploaded."""
        return False

    @property
    def lock_text(self) -> str:
        """A remark on a lock that this process leaves behind."""
        return ""

    def files(self, results: Sequence[str], made: Iterable[str] = ()) -> dict[str, str]:
        """Return existing `results`, and other files that were `made`, by name."""
        there = [self.directory / name for name in results if (self.directory / name).exists()]
        return {path.name: self._of(path) for path in (*there, *map(Path, made))}

    def _of(self, path: Path) -> str:
        return str(path)

    async def claim(self) -> None:
        """Claim the place for a run."""

    def publish_soon(self, rows: int) -> None:
        """Upload in the background: the files have `rows` rows, and more will follow."""

    async def publish(self, rows: int) -> None:
        """Upload the last rows."""

    def uploaded(self, rows: int, of: str) -> list[str]:
        """Return lines for the user: how many of the `rows` in the directory can be read elsewhere, too."""
        return []
