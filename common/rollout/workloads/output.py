"""The output directory: whose it is, and files that only grow and survive a kill at any point."""

from __future__ import annotations

import errno
import fcntl
import json
import os
from collections.abc import Generator, Iterable
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Self

from blake3 import blake3

from rollout.model.errors import ConfigError, StateError, StorageError, StorageFullError
from rollout.model.ids import is_ulid
from rollout.workloads.json_form import JsonObject

RUN_ID = "run-id"
RUN_CONFIG = ".run.json"
INPUT_INDEX = ".input.idx"
STATE = ".collect.json"
_LOCK = ".lock"
_FULL = (errno.ENOSPC, errno.EDQUOT)
_TAIL = 4096


@contextmanager
def disk_errors(path: Path) -> Generator[None]:
    """StorageFullError or StorageError for what the file system refuses."""
    try:
        yield
    except OSError as error:
        if error.errno in _FULL:
            raise StorageFullError(
                f"no space left while writing {path}: what is collected so far is safe; free some space and run the "
                "same command again"
            ) from error
        raise StorageError(f"cannot write {path}: {error.strerror or error}") from error


def write_atomically(path: Path, data: bytes) -> None:
    """All of `data` or the file as it was: temporary file, fsync, rename, fsync of the directory."""
    temporary = path.with_name(f"{path.name}.tmp")
    with disk_errors(path):
        with temporary.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
        _sync_directory(path.parent)


def _sync_directory(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


class OutputDirectory:
    """One process at a time holds a directory; it belongs to the run named in its `run-id`.

    Order of use: open(), then run_id and stored_config to see whether there is a run to go on with, then claim().
    """

    def __init__(self, path: Path, lock: IO[str], *, made: bool) -> None:
        self.path = path
        self._lock = lock
        self._made = made

    @classmethod
    def open(cls, directory: str | Path) -> Self:
        """Make the directory if need be and lock it. ConfigError: not usable; StateError: another process has it."""
        path = Path(directory).expanduser()
        made = not path.exists()
        try:
            path.mkdir(parents=True, exist_ok=True)
            lock = (path / _LOCK).open("a+", encoding="utf-8")
        except OSError as error:
            raise ConfigError(
                f"output.dir: cannot write to {path}: {error.strerror}: name another directory"
            ) from error
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            lock.seek(0)
            holder = lock.read().strip()
            lock.close()
            raise StateError(
                f"output.dir: {path} is being written by another process{f' ({holder})' if holder else ''}: wait for "
                "it, or name another directory"
            ) from error
        lock.truncate(0)
        lock.write(f"pid {os.getpid()}\n")
        lock.flush()
        return cls(path, lock, made=made)

    def close(self) -> None:
        """A directory that `open` made and nobody claimed is gone afterwards, unless there is something in it."""
        own = {_LOCK, INPUT_INDEX}
        if self._made and {path.name for path in self.path.iterdir()} <= own:
            with suppress(OSError):
                for name in own:
                    (self.path / name).unlink(missing_ok=True)
                self.path.rmdir()
        self._lock.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def run_id(self) -> str | None:
        """The run this directory belongs to. ConfigError if the file is damaged."""
        path = self.path / RUN_ID
        try:
            text = path.read_text("utf-8").strip()
        except FileNotFoundError:
            return None
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"cannot read {path}: {error}") from error
        if not is_ulid(text):
            raise ConfigError(f"{path} holds {text[:40]!r}, which is no run id: delete it to start a new run")
        return text

    @property
    def stored_config(self) -> JsonObject | None:
        """The resolved configuration of `run_id`, as claimed; None: not known here (ask the coordinator)."""
        try:
            stored = json.loads((self.path / RUN_CONFIG).read_text("utf-8"))
        except (OSError, ValueError):
            return None
        return stored["config"] if stored.get("run_id") == self.run_id else None

    @property
    def index_path(self) -> Path:
        """Where the check of the input keeps the row hashes of the claimed run."""
        return self.path / INPUT_INDEX

    def check(self, resume: str | None) -> str | None:
        """The run to go on with: `resume` if given, else the directory's own. ConfigError if they disagree."""
        own = self.run_id
        if resume is not None and own is not None and own != resume:
            raise ConfigError(
                f"output.dir: {self.path} belongs to run {own}, not {resume}: take another directory, or resume {own}"
            )
        return resume or own

    def claim(self, run_id: str, config: JsonObject, results: Iterable[str]) -> None:
        """Make the directory `run_id`'s. `results`, of a run whose `run-id` was deleted, are moved aside, not lost."""
        own = self.check(run_id)
        if self.run_id is None:
            self._move_aside(own, results)
        if self.stored_config != config or self.run_id is None:
            write_atomically(self.path / RUN_CONFIG, json.dumps({"run_id": run_id, "config": config}).encode())
        if self.run_id is None:
            write_atomically(self.path / RUN_ID, f"{run_id}\n".encode())

    def _move_aside(self, run_id: str | None, results: Iterable[str]) -> None:
        try:
            previous = json.loads((self.path / STATE).read_text("utf-8"))["run_id"]
        except (OSError, ValueError, KeyError, TypeError):
            previous = "unknown"
        if previous == run_id:
            return  # the same run, resumed by its id
        with disk_errors(self.path):
            for name in results:
                path = self.path / name
                if path.exists():
                    path.replace(path.with_name(f"{path.stem}.{previous}{path.suffix}"))
            (self.path / STATE).unlink(missing_ok=True)


class GrowingFile:
    """A file known to be good up to a recorded length; on opening, whatever follows is cut off."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._tail = b""
        with disk_errors(path):
            # Unbuffered: a failed write must not be tried again by close().
            self._file = path.open("r+b" if path.exists() else "w+b", buffering=0)
        self._buffer: list[bytes] = []
        self.size = 0

    def restore(self, mark: JsonObject | None) -> bool:
        """Go back to `mark`. False: the file is not what it was, so it must be written anew (it is empty now)."""
        size = 0 if mark is None else int(mark["bytes"])
        with disk_errors(self.path):
            intact = os.fstat(self._file.fileno()).st_size >= size
            if intact and size:
                start = max(0, size - _TAIL)
                self._file.seek(start)
                self._tail = self._file.read(size - start) or b""
                intact = mark is not None and blake3(self._tail).hexdigest() == mark["tail"]
            if not intact:
                size = 0
            if not size:
                self._tail = b""
            self._file.truncate(size)
            self._file.seek(size)
        self.size = size
        return intact

    def append(self, line: bytes) -> None:
        self._buffer.append(line)

    def sync(self) -> JsonObject:
        """Everything appended is on disk; the mark to restore to."""
        data = memoryview(b"".join(self._buffer))
        with disk_errors(self.path):
            # A write that failed half way (full disk) is made good by the next call.
            self._file.truncate(self.size)
            self._file.seek(self.size)
            written = 0
            while written < len(data):
                written += self._file.write(data[written:]) or 0
            os.fsync(self._file.fileno())
        self._buffer.clear()
        self.size += len(data)
        self._tail = (self._tail + bytes(data[-_TAIL:]))[-_TAIL:]
        return {"bytes": self.size, "tail": blake3(self._tail).hexdigest()}

    def close(self) -> None:
        self._file.close()
