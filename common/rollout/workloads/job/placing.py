"""Writes the directory of a trial: its result and the files that were kept, for later inspection.

A part is one try: its record, and the tar of its files, which is fetched by its id. The last try fills the directory
itself, earlier ones `tries/1`, `tries/2` and so on. Everything is prepared next to the directory and moved into it;
`result.json` comes last, so a directory that has it is complete.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import tarfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Self

from rollout.model.errors import InputError, NotFoundError, ObjectCorruptError
from rollout.objects.digest import hash_file
from rollout.workloads.job.record import TrialRecord, record_from, record_json
from rollout.workloads.job.result_files import ERROR_TEXT, RESULT
from rollout.workloads.json_form import JsonObject
from rollout.workloads.output import disk_errors
from rollout.workloads.port import Fetch

_SCRATCH = ".placing-"
BYTES_MAX = 16 << 30
ENTRIES_MAX = 500_000
"""Maximum entries of an archive: several times what a worker keeps of a trial."""
_HEADER_MAX = 1 << 20
"""Maximum bytes of a header, such as a long name, which tarfile reads into memory at once."""


@dataclass(frozen=True, slots=True)
class Part:
    """`at` is the path below the trial's directory; "" is the directory itself."""

    at: str
    record: TrialRecord


@dataclass(frozen=True, slots=True)
class Placed:
    """What was written to `directory`, which is relative to that of the job. `files` has size and hash by path."""

    directory: str
    parts: tuple[Part, ...]
    files: dict[str, tuple[int, str]]

    def to_json(self) -> JsonObject:
        parts = [{"at": part.at, "record": record_json(part.record)} for part in self.parts]
        return {"directory": self.directory, "parts": parts, "files": self.files}

    @classmethod
    def from_json(cls, value: JsonObject) -> Placed:
        parts = tuple(Part(one["at"], record_from(one["record"])) for one in value["parts"])
        files = {name: (int(size), str(digest)) for name, (size, digest) in value["files"].items()}
        return cls(value["directory"], parts, files)

    def differs(self, job: Path) -> bool:
        """Return whether something is missing below `job` or was changed; additions do not count. Blocking."""
        directory = job / self.directory
        for name, (size, digest) in self.files.items():
            path = directory / name
            try:
                if path.is_symlink() or path.stat().st_size != size or hash_file(path)[0].hex() != digest:
                    return True
            except OSError:
                return True
        return False


async def place(job: Path, directory: str, parts: Sequence[Part], fetch: Fetch) -> tuple[Placed, str]:
    """Write `parts` to `directory` below `job`. Also returns a note for the user, for example about a missing object.

    Raises StorageError or StorageFullError.
    """
    told: list[str] = []
    with disk_errors(job / directory):
        made = await asyncio.to_thread(TemporaryDirectory[str], prefix=_SCRATCH, dir=job)
        try:
            content = Path(made.name) / "content"
            for part in parts:
                if why := await _make(part, content / part.at, Path(made.name) / "tar", fetch):
                    told.append(f"{directory}/{part.at}".rstrip("/") + f": {why}")
            files = await asyncio.to_thread(_move, content, job / directory)
        finally:
            await asyncio.to_thread(made.cleanup)
    return Placed(directory, tuple(parts), files), "; ".join(told)


async def _make(part: Part, directory: Path, archive: Path, fetch: Fetch) -> str:
    record, why = part.record, ""
    await asyncio.to_thread(directory.mkdir, parents=True, exist_ok=True)
    if record.files is not None:
        try:
            await fetch(bytes.fromhex(record.files), archive)
            await asyncio.to_thread(unpack, archive, directory)
        except (NotFoundError, ObjectCorruptError, InputError) as error:
            why = f"what the trial left is not there: {error.message}"
        finally:
            await asyncio.to_thread(archive.unlink, missing_ok=True)
    result = record.result
    if result.error is not None:
        text = f"{result.error.type}: {result.error.message}\n"
        (directory / ERROR_TEXT).write_text(text, "utf-8", "backslashreplace")
    (directory / RESULT).write_bytes(result.model_copy(update={"rewards": record.rewards}).to_json())
    return why


def clear(job: Path) -> None:
    """Remove what a killed process left. Blocking."""
    for path in job.glob(f"{_SCRATCH}*"):
        shutil.rmtree(path, ignore_errors=True)


def unpack(archive: Path, directory: Path) -> None:
    """Unpack the files of `archive`, which may come from an untrusted worker: none leaves `directory`, and links and
    special files are left out. Raises InputError if it is not a tar, or larger than any trial's. Blocking.

    Compressed and sparse files are refused, so the unpacked files are not larger than the archive.
    """
    if archive.stat().st_size > BYTES_MAX:
        raise InputError(f"it is larger than {BYTES_MAX >> 30} GiB")
    try:
        with tarfile.open(archive, "r:", tarinfo=_Bounded) as tar:
            for number, member in enumerate(tar, 1):
                if number > ENTRIES_MAX:
                    raise InputError(f"it has more than {ENTRIES_MAX:,} entries")
                if (member.isreg() and not member.issparse()) or member.isdir():
                    tar.extract(member, directory, set_attrs=False, filter=_inside)
    except (tarfile.TarError, EOFError, ValueError) as error:
        raise InputError(f"it cannot be unpacked: {error}") from error


class _Bounded(tarfile.TarInfo):
    @classmethod
    def frombuf(cls, buf: bytes | bytearray, encoding: str, errors: str) -> Self:
        found = super().frombuf(buf, encoding, errors)
        if not found.isreg() and found.size > _HEADER_MAX:
            raise tarfile.ReadError(f"a header of {found.size:,} bytes")
        return found


def _inside(member: tarfile.TarInfo, path: str) -> tarfile.TarInfo:
    return tarfile.data_filter(member, path)


def _move(content: Path, directory: Path) -> dict[str, tuple[int, str]]:
    """Move everything in `content` to `directory`, replacing what has the same name. Returns size and hash of each
    file."""
    files: dict[str, tuple[int, str]] = {}
    names = sorted(_files(content, ""), key=lambda name: (name == RESULT, name))
    for name in names:
        digest, size = hash_file(content / name)
        files[name] = (size, digest.hex())
    directory.parent.mkdir(parents=True, exist_ok=True)
    if not os.path.lexists(directory):
        content.replace(directory)
        return files
    for name in names:
        target = directory / name
        _clear_way(directory, target)
        target.parent.mkdir(parents=True, exist_ok=True)
        (content / name).replace(target)
    return files


def _clear_way(directory: Path, target: Path) -> None:
    """Remove anything else that occupies the path of `target` or of a directory above it."""
    for path in (directory, *reversed([p for p in target.parents if directory in p.parents])):
        if os.path.lexists(path) and (path.is_symlink() or not path.is_dir()):
            path.unlink()
    if target.is_dir() and not target.is_symlink():
        shutil.rmtree(target)


def _files(directory: Path, prefix: str) -> Iterator[str]:
    for path in directory.iterdir():
        if path.is_dir():
            yield from _files(path, f"{prefix}{path.name}/")
        else:
            yield prefix + path.name


def aside(job: Path, directory: str, trial: str) -> str:
    """Move the directory of a trial that has changed aside, and return its new name, or "" if there was none."""
    path = job / directory
    if not os.path.lexists(path):
        return ""
    number, name = 1, f"{path.name}.before-{trial[:8]}"
    while os.path.lexists(path.with_name(name)):
        number += 1
        name = f"{path.name}.before-{trial[:8]}.{number}"
    with disk_errors(path):
        path.replace(path.with_name(name))
    return name
