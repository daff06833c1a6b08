"""The output of every workload: files that only grow, survive a kill at any point, and are never trusted unseen.

A file is unchanged if its length and a hash over all of it say so. That is checked before anything is appended, after
every write as far as the file system shows it, and in full before a run is called complete. A file that has changed is
written anew from the ledger.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
import socket
import stat
from collections.abc import Generator, Iterable, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from itertools import chain, count
from pathlib import Path
from typing import IO, Any, Self, cast

from blake3 import blake3

from rollout.files import replacing, try_lock
from rollout.model.errors import (
    ConfigError,
    OutputChangedError,
    StateError,
    StorageError,
    StorageFullError,
)
from rollout.model.ids import is_ulid, short
from rollout.workloads.json_form import JsonObject, canonical

DIRECTORY_KEY = "output.dir"
"""The key by which most workloads name an output directory."""
RUN_ID = "run-id"
RUN_CONFIG = ".run.json"
INPUT_INDEX = ".input.idx"
SPOOL = ".input"
STATE = ".collect.json"
SUMMARY = "summary.json"
MEMORY = "memory"
"""Key of a writer's memory, saved with the counts."""
RESULT_FILES = (
    "completions.jsonl",
    "completions.parquet",
    "embeddings.jsonl",
    "embeddings.parquet",
    "results.jsonl",
    "results.parquet",
    "errors.jsonl",
    "openai.jsonl",
    SUMMARY,
)
"""Files that the workloads of this package write."""
_LOCK = ".lock"
_BUCKETS = ("s3:/", "gs:/")
"""How a path begins that was a URL."""
_REPLACES = "replaces"
_FULL = (errno.ENOSPC, errno.EDQUOT)
_PIECE = 4 << 20
_FALSE_ALARMS = 3


@contextmanager
def disk_errors(path: Path) -> Generator[None]:
    """Convert errors of the file system to StorageFullError or StorageError."""
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
    """Write `data` atomically. Raises StorageFullError or StorageError."""
    with disk_errors(path), replacing(path) as file:
        file.write(data)


def seal(value: JsonObject) -> bytes:
    """Encode `value` with a hash, for `unseal`."""
    return canonical({"value": value, "hash": blake3(canonical(value)).hexdigest()})


def unseal(data: bytes) -> JsonObject | None:
    """Decode what `seal` encoded; None if `data` is something else."""
    try:
        sealed = json.loads(data)
        value = sealed["value"]
        whole = sealed["hash"] == blake3(canonical(value)).hexdigest()
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
    return cast(JsonObject, value) if whole and isinstance(value, dict) else None


def saved_state(directory: Path) -> JsonObject | None:
    """Return what ResultFiles saved last in `directory`: run_id, cursor, files, totals, possibly summary; None if
    nothing."""
    try:
        return unseal((directory / STATE).read_bytes())
    except OSError:
        return None


def saved_summary(directory: Path, state: JsonObject) -> JsonObject | None:
    """Return the summary.json written when `state` was saved; None if there is none or it has changed."""
    try:
        data = (directory / SUMMARY).read_bytes()
    except OSError:
        return None
    return json.loads(data) if blake3(data).hexdigest() == state.get("summary") else None


def claimed(directory: Path) -> JsonObject | None:
    """Return what OutputDirectory.claim saved last in `directory`: run_id, config, kept; None if nothing."""
    try:
        return unseal((directory / RUN_CONFIG).read_bytes())
    except OSError:
        return None


def holder_of(directory: Path) -> str:
    """Return the command that holds the directory, as `pid 7 on HOST: COMMAND`, or "". Blocking."""
    try:
        with (directory / _LOCK).open(encoding="utf-8", errors="replace") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                return lock.read().strip() or "another command"
    except OSError:
        return ""
    return ""


def changed_files(directory: Path, names: Sequence[str] = ()) -> list[str]:
    """Return a line for each fault in the files that `ResultFiles` saved last in `directory`, in all or in `names`.
    What was written since then is not checked. Raises OSError. Blocking."""
    state = saved_state(directory)
    saved: JsonObject = {} if state is None else state["files"]
    marks = {name: Mark.of(mark) for name, mark in saved.items() if not names or name in names}
    return [fault for name, mark in marks.items() if (fault := _fault_in(directory / name, mark))]


class OutputDirectory:
    """An output directory. One process at a time holds it; it belongs to the run named in its `run-id`.

    Call open(), then read run_id and stored_config to see whether there is a run to resume, then claim().
    """

    def __init__(self, path: Path, lock: IO[str], *, made: bool, key: str) -> None:
        self.path = path
        self._key = key
        self._lock = lock
        self._made = made

    @classmethod
    def open(cls, directory: str | Path, command: str = "", *, key: str = DIRECTORY_KEY) -> Self:
        """Create the directory if necessary and lock it. Raises ConfigError if it is unusable, StateError if another
        process has it.

        `command` is this process's command line, shown to the user of a refused command. `key` is the key of the
        configuration that names the directory.
        """
        path = Path(directory).expanduser()
        if str(path).startswith(_BUCKETS):
            raise ConfigError(f"{key}: {path} is in a bucket, and this command writes to a directory: name one")
        try:
            made = not path.exists()  # which a name that is too long has no answer to
            path.mkdir(parents=True, exist_ok=True)
            lock = (path / _LOCK).open("a+", encoding="utf-8")
            free = try_lock(lock)
        except UnicodeEncodeError:  # the locale's fault, which is told as that
            raise
        except (OSError, ValueError) as error:  # ValueError: a NUL in the name
            why = getattr(error, "strerror", None) or str(error)
            if isinstance(error, FileExistsError):
                why = "it is a file" if path.is_file() else "it is a link that leads nowhere"
            raise ConfigError(f"{key}: cannot write into {path}: {why}; name another directory") from error
        if not free:
            lock.seek(0)
            holder = lock.read().strip()
            lock.close()
            raise StateError(
                f"{key}: {path} is being written by another command{f' ({holder})' if holder else ''}: wait for "
                "it, stop it, or name another directory"
            )
        lock.truncate(0)
        lock.write(f"pid {os.getpid()} on {socket.gethostname()}{f': {command}' if command else ''}\n")
        lock.flush()
        output = cls(path, lock, made=made, key=key)
        output._finish_handing_over()
        return output

    def close(self) -> None:
        """Release the directory. If `open` created it and nobody claimed it, it is removed, unless it has content."""
        try:
            if not (self.path / RUN_ID).exists():
                shutil.rmtree(self.spool_path, ignore_errors=True)  # what no run goes on from is of no use
            own = {_LOCK, INPUT_INDEX}
            if self._made and self.path.exists() and {path.name for path in self.path.iterdir()} <= own:
                with suppress(OSError):
                    for name in own:
                        (self.path / name).unlink(missing_ok=True)
                    self.path.rmdir()
        finally:
            self._lock.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def run_id(self) -> str | None:
        """The run that this directory belongs to. Raises ConfigError if the file is damaged."""
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
        """The resolved configuration of `run_id` as claimed; None if unknown here (ask the coordinator)."""
        stored = self._stored
        return None if stored is None else stored["config"]

    @property
    def kept(self) -> JsonObject:
        """What else was claimed with that configuration; empty if there is nothing or it is unknown here."""
        stored = self._stored
        return {} if stored is None else stored.get("kept", {})

    @property
    def _stored(self) -> JsonObject | None:
        stored = claimed(self.path)
        return stored if stored and stored.get("run_id") == self.run_id else None

    @property
    def index_path(self) -> Path:
        """Where Source.keep leaves the hashes of the claimed run's rows."""
        return self.path / INPUT_INDEX

    @property
    def spool_path(self) -> Path:
        """Where Source.open keeps the content of streams."""
        return self.path / SPOOL

    def check(self, resume: str | None) -> str | None:
        """Return the run to resume: `resume` if given, else the directory's own. Raises ConfigError if they
        disagree."""
        own = self.run_id
        if resume is not None and own is not None and own != resume:
            raise ConfigError(
                f"{self._key}: {self.path} belongs to run {short(own)}, not {short(resume)}: take another directory, "
                f"or resume {short(own)}"
            )
        return resume or own

    def claim(
        self, run_id: str, config: JsonObject, results: Iterable[str] = RESULT_FILES, kept: JsonObject | None = None
    ) -> list[str]:
        """Make the directory `run_id`'s. Foreign files with names of `results` are moved aside; return their new names.

        `kept` is what a later command needs to know of the run besides its configuration.
        """
        own = self.check(run_id)
        moved = self._move_aside(own, results) if self.run_id is None else []
        stored = {"run_id": run_id, "config": config, "kept": kept or {}}
        before = self._stored
        if before is None or {**before, **stored} != before or self.run_id is None:
            write_atomically(self.path / RUN_CONFIG, seal(stored))
        if self.run_id is None:
            write_atomically(self.path / RUN_ID, f"{run_id}\n".encode())
        return moved

    def hand_over(self, run_id: str, config: JsonObject, kept: JsonObject | None = None) -> None:
        """Hand the directory and everything in it from the current run to `run_id`. Killed at any point, it belongs to
        one of the two."""
        stored = {"run_id": run_id, "config": config, "kept": kept or {}, _REPLACES: self.run_id}
        write_atomically(self.path / RUN_CONFIG, seal(stored))
        self._finish_handing_over()

    def _finish_handing_over(self) -> None:
        with suppress(OSError):
            stored = claimed(self.path)
            own = (self.path / RUN_ID).read_bytes().decode("ascii", "replace").strip()
            if own and stored and stored.get(_REPLACES) == own:
                write_atomically(self.path / RUN_ID, f"{stored['run_id']}\n".encode())

    def leave(self) -> None:
        """Release the directory from its run, so that another may claim it."""
        with disk_errors(self.path):
            (self.path / RUN_ID).unlink(missing_ok=True)

    def _move_aside(self, run_id: str | None, results: Iterable[str]) -> list[str]:
        state, moved = saved_state(self.path), list[str]()
        previous = state["run_id"] if state else "unknown"
        if previous == run_id:
            return moved  # the same run, resumed by its id
        with disk_errors(self.path):
            for name in dict.fromkeys((*results, *(state["files"] if state else ()))):
                path = self.path / name
                if path.exists():
                    moved.append(path.replace(free_name(path, previous)).name)
            (self.path / STATE).unlink(missing_ok=True)
        return moved


def free_name(path: Path, run_id: str) -> Path:
    """Return a name to which `path` can be moved without replacing what was moved there before."""
    numbers = chain([""], (f".{number}" for number in count(2)))
    names = (f"{path.stem}.{run_id}{number}{path.suffix}" for number in numbers)
    return next(aside for name in names if not os.path.lexists(aside := path.with_name(name)))


@dataclass(frozen=True, slots=True)
class Mark:
    """A file as written: its length, its lines, and a hash over all of it."""

    bytes: int
    lines: int
    hash: str

    @classmethod
    def of(cls, saved: Any) -> Self:
        return cls(int(saved["bytes"]), int(saved["lines"]), str(saved["hash"]))


def mark_of(path: Path) -> Mark | None:
    """Return the mark of a file as it is, or None if it is missing."""
    try:
        with path.open("rb") as file:
            return _content(file.fileno(), os.fstat(file.fileno()).st_size).mark
    except FileNotFoundError:
        return None


class _Content:
    """Running length, lines and hash of bytes."""

    def __init__(self) -> None:
        self.bytes = 0
        self.lines = 0
        self._hash = blake3()

    def add(self, piece: bytes) -> None:
        self.bytes += len(piece)
        self.lines += piece.count(b"\n")
        self._hash.update(piece)

    @property
    def mark(self) -> Mark:
        return Mark(self.bytes, self.lines, self._hash.hexdigest())


class GrowingFile:
    """A file that only this process appends to. Call `take_up` or `begin_anew` first, and `close` always.

    It is opened for appending and never extended in any other way, so that it cannot get holes, whatever others do to
    it at the same time.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._fd = -1
        self._content = _Content()
        self._pending = b""
        self._buffer: list[bytes] = []
        self._changed_ns = 0
        self._false_alarms = 0

    def take_up(self, mark: Mark) -> str | None:
        """Continue after `mark`, cutting off what follows it. If the file has changed, return the fault and leave it
        untouched."""
        self.close()
        if not self.path.exists():
            if mark.bytes:
                return f"{self.path} is missing"
            self.begin_anew()
            return None
        with disk_errors(self.path):
            fd = self._open(0)
            try:
                size = os.fstat(fd).st_size
                content = _content(fd, mark.bytes)
            except OSError:
                os.close(fd)
                raise
            if fault := _difference(self.path, size, content, mark):
                os.close(fd)
                return fault
            self._fd, self._content = fd, content
            if size > mark.bytes:
                os.ftruncate(fd, mark.bytes)
            self._changed_ns = os.fstat(fd).st_ctime_ns
        return None

    def begin_anew(self) -> None:
        """Empty the file, or create it."""
        self.close()
        self._content, self._pending = _Content(), b""
        self._buffer.clear()
        with disk_errors(self.path):
            self._fd = self._open(os.O_CREAT | os.O_TRUNC)
            self._changed_ns = os.fstat(self._fd).st_ctime_ns

    def append(self, lines: bytes) -> None:
        self._buffer.append(lines)

    def write(self) -> Mark:
        """Write everything appended to disk. After StorageFullError call it again; after OutputChangedError begin
        anew."""
        self._pending += b"".join(self._buffer)
        self._buffer.clear()
        with disk_errors(self.path):
            self._look()
            if self._pending:
                while self._pending:
                    written = os.write(self._fd, self._pending)
                    self._content.add(self._pending[:written])
                    self._pending = self._pending[written:]
                os.fsync(self._fd)
                status = os.fstat(self._fd)
                self._compare_size(status)
                self._changed_ns = status.st_ctime_ns
        return self._content.mark

    def verify(self) -> None:
        """Raise OutputChangedError unless the whole file is as written."""
        with disk_errors(self.path):
            self._look()
            if _content(self._fd, self._content.bytes).mark != self._content.mark:
                raise OutputChangedError(f"{self.path} was edited while the run was writing it")

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _open(self, flags: int) -> int:
        fd = os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CLOEXEC | os.O_NONBLOCK | flags, 0o666)
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            os.close(fd)
            raise StorageError(f"cannot write {self.path}: it is no regular file: move it away")
        return fd

    def _look(self) -> None:
        """Check what the file system shows at no cost, and the content if that shows a change."""
        status = os.fstat(self._fd)
        try:
            there = self.path.stat()
        except FileNotFoundError:
            raise OutputChangedError(f"{self.path} was deleted while the run was writing it") from None
        if (there.st_dev, there.st_ino) != (status.st_dev, status.st_ino):
            raise OutputChangedError(f"{self.path} was replaced while the run was writing it")
        self._compare_size(status)
        if status.st_ctime_ns == self._changed_ns or self._false_alarms >= _FALSE_ALARMS:
            return
        if _content(self._fd, self._content.bytes).mark != self._content.mark:
            raise OutputChangedError(f"{self.path} was edited while the run was writing it")
        # Another mode or link, perhaps; a file system whose times mean nothing must not cost a reading each time.
        self._false_alarms += 1
        self._changed_ns = status.st_ctime_ns

    def _compare_size(self, status: os.stat_result) -> None:
        expected = self._content.bytes
        if status.st_size != expected:
            raise OutputChangedError(
                f"{self.path} was cut from {expected} to {status.st_size} bytes while the run was writing it"
                if status.st_size < expected
                else f"{self.path} was written to by another program while the run was writing it"
            )


def _has_content(path: Path) -> bool:
    """Return whether it has content: an empty file may be left of a command that was killed before it saved
    anything."""
    return path.exists() and path.stat().st_size > 0


def _fault_in(path: Path, mark: Mark) -> str:
    """Return the fault of a file with the saved `mark`."""
    if not path.exists():
        return f"{path} is missing" if mark.bytes else ""
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        return _difference(path, size, _content(file.fileno(), mark.bytes), mark)


def _difference(path: Path, size: int, content: _Content, mark: Mark) -> str:
    if content.mark == mark:
        return ""
    if size < mark.bytes:
        return f"{path} was cut to {size} of {mark.bytes} bytes"
    return f"{path} is not what was written: it was edited or replaced"


def _content(fd: int, size: int) -> _Content:
    """Read the first `size` bytes, or as many as there are."""
    content = _Content()
    while content.bytes < size:
        piece = os.pread(fd, min(_PIECE, size - content.bytes), content.bytes)
        if not piece:
            break
        content.add(piece)
    return content


class ResultFiles:
    """The files of a run's commit log, with their position in the log: `cursor`, and `totals` so far.

    Call `begin`, then `append`, with `save` now and then, `finish` at the end, and `close` always. If a file has
    changed, `begin` says so, and `save` and `finish` raise OutputChangedError: call `restart`, and append everything
    from the log's beginning.
    """

    def __init__(self, directory: Path, run_id: str, names: Sequence[str]) -> None:
        self._directory = directory
        self._run_id = run_id
        self._files = {name: GrowingFile(directory / name) for name in names}
        self._begun = False
        self.cursor = 0
        self.totals: JsonObject = {}
        self._summary: JsonObject | None = None

    def begin(self) -> list[str]:
        """Continue from the saved position, or return a line for each fault: nothing is lost yet, and the cursor is
        0."""
        state = saved_state(self._directory)
        if state is None or state["run_id"] != self._run_id:
            left = self._directory / STATE
            damaged = state is None and (left.exists() or any(_has_content(one.path) for one in self._files.values()))
            return [f"{left} is damaged or missing"] if damaged else []
        saved = state["files"]
        if saved.keys() != self._files.keys():
            return ["other result files are wanted than were written so far"]
        found = [file.take_up(Mark.of(saved[name])) for name, file in self._files.items()]
        if faults := [fault for fault in found if fault]:
            self.close()
            return faults
        self._begun = True
        self.cursor, self.totals = state["cursor"], state["totals"]
        self._summary = saved_summary(self._directory, state)
        return []

    def restart(self) -> None:
        """Empty every file, because the log is read again from its beginning."""
        self.cursor, self.totals, self._summary, self._begun = 0, {}, None, False
        for file in self._files.values():
            file.begin_anew()
        self._begun = True

    @property
    def begun(self) -> bool:
        """Whether lines can be appended: `begin` continued, or `restart` emptied everything."""
        return self._begun

    @property
    def summary(self) -> JsonObject | None:
        """What `finish` wrote, if the files have not changed since."""
        return self._summary

    def append(self, name: str, lines: bytes) -> None:
        """Append one or more whole lines. After a `begin` with faults, the first call empties the file."""
        if not self._begun:
            self.restart()
        self._files[name].append(lines)

    def save(self, cursor: int, totals: JsonObject) -> None:
        """Make everything appended durable: the files first, then the cursor. Raises OutputChangedError or
        StorageError."""
        self._save(cursor, totals, None)

    def finish(self, cursor: int, totals: JsonObject, summary: JsonObject) -> None:
        """Save, verify every file in full, and write summary.json. Raises OutputChangedError or StorageError."""
        self._save(cursor, totals, None)
        for file in self._files.values():
            file.verify()
        data = json.dumps(summary, indent=2).encode() + b"\n"
        write_atomically(self._directory / SUMMARY, data)
        self._save(cursor, totals, blake3(data).hexdigest())

    def close(self) -> None:
        for file in self._files.values():
            file.close()

    def _save(self, cursor: int, totals: JsonObject, summary: str | None) -> None:
        if not self._begun:
            self.restart()
        marks = {name: asdict(file.write()) for name, file in self._files.items()}
        self.cursor, self.totals = cursor, totals
        state = {"run_id": self._run_id, "cursor": cursor, "files": marks, "totals": totals, "summary": summary}
        write_atomically(self._directory / STATE, seal(state))
