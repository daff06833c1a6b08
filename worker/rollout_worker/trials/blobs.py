"""The files of an experiment's trial, and contents by their hash."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from rollout.storage.disk import FULL
from rollout.workloads.experiment.contracts import ref_of, sha256_of

from rollout_worker.sandboxes import trees
from rollout_worker.trials.masking import Masks
from rollout_worker.trials.port import TrialFault

STORAGE_FULL = "evidence_storage_full"


class Blobs:
    """`files` is the directory of the trial's files. `directory` holds contents, some of which are kept in the end.

    Every method blocks, and raises OSError.
    """

    def __init__(self, files: Path, directory: Path, masks: Masks) -> None:
        self._files, self._directory, self._masks = files, directory, masks

    def path(self, sha256: str) -> Path:
        self._directory.mkdir(parents=True, exist_ok=True)
        return self._directory / sha256

    def put(self, data: bytes) -> str:
        """Store a content and return its hash."""
        name = sha256_of(data)
        self.path(name).write_bytes(data)
        return name

    def read(self, sha256: str) -> bytes | None:
        """Return a content, or None if there is none."""
        for path in (self.path(sha256), self._kept(sha256)):
            if path.is_file():
                return path.read_bytes()
        return None

    def clear(self) -> None:
        """Remove contents that were not kept."""
        trees.remove(str(self._directory))

    def drop(self) -> None:
        """Remove all contents, including kept ones."""
        trees.remove(str(self._files / "evidence"))

    def keep(self, sha256: str) -> str:
        """Make a content one of the trial's files, and return its reference."""
        target = self._kept(sha256)
        if not target.exists():
            target.parent.mkdir(parents=True, exist_ok=True)
            self.path(sha256).replace(target)
        return ref_of(sha256)

    def _kept(self, sha256: str) -> Path:
        return self._files / "evidence" / "artifacts" / sha256[:2] / sha256

    def write(self, name: str, data: bytes) -> bytes:
        """Write one of the trial's files, with hidden values masked, and return its content."""
        target = self._files / name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(data)
        self._masks.file(target)
        return target.read_bytes()


@contextmanager
def storage() -> Generator[None]:
    """Raise TrialFault inside the block if the disk with the evidence is full."""
    try:
        yield
    except OSError as error:
        if error.errno not in FULL:
            raise
        raise TrialFault(STORAGE_FULL, f"the worker's disk is full: {error.strerror}") from error
