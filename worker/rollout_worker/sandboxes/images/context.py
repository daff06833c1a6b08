"""The build context: the directory of a Dockerfile, without what `.dockerignore` names."""

from __future__ import annotations

import hashlib
import io
import os
import shutil
import stat
import tarfile
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from types import SimpleNamespace
from typing import Any

import pathspec

from rollout_worker.sandboxes.errors import ImageBuildError

DOCKERFILE = "Dockerfile"
_CHUNK = 1 << 18


def read_dockerfile(directory: Path) -> str:
    """Return the text of the Dockerfile. Raises ImageBuildError if there is none."""
    path = directory / DOCKERFILE
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        if (directory / "docker-compose.yaml").is_file():
            why = (
                f"{directory} is built by docker-compose.yaml, which is not supported: add a Dockerfile for one sandbox"
            )
        else:
            why = f"there is no {path}"
        raise ImageBuildError(why) from None
    except (OSError, UnicodeDecodeError) as error:
        raise ImageBuildError(f"{path} cannot be read: {error}") from error


def files(directory: Path) -> Iterator[tuple[str, os.stat_result]]:
    """Yield (path in the context, status) of everything in it, including directories, in order."""
    ignored = _ignored(directory)
    waiting = [""]
    while waiting:
        inner = waiting.pop()
        with os.scandir(directory / inner) as entries:
            found = sorted(entries, key=lambda entry: entry.name)
        for entry in found:
            name = f"{inner}/{entry.name}" if inner else entry.name
            is_directory = entry.is_dir(follow_symlinks=False)
            if is_directory:
                waiting.append(name)  # also an ignored one: `!` may take back what is in it
            if not ignored.match_file(name):
                yield name, entry.stat(follow_symlinks=False)


def _ignored(directory: Path) -> pathspec.GitIgnoreSpec:
    """Read `.dockerignore`: Docker's patterns are those of git, but all are anchored at the top."""
    path = directory / ".dockerignore"
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines() if path.is_file() else []
    patterns: list[str] = []
    for line in lines:
        line = line.strip()
        if not line or line.startswith("#"):
            continue
        sign = "!" if line.startswith("!") else ""
        pattern = os.path.normpath(line[len(sign) :].strip().lstrip("/"))
        patterns.append(f"{sign}/{pattern}")
    return pathspec.GitIgnoreSpec.from_lines(patterns)


def content_id(directory: Path, *more: str) -> str:
    """Return a hash, in hex, of all files, their modes and links, and of `more`."""
    total = hashlib.sha256(repr(more).encode())
    _write(directory, SimpleNamespace(write=total.update), dated=False)
    return total.hexdigest()


def pack(directory: Path) -> bytes:
    """Return the context as a tar for engines; it always contains the Dockerfile."""
    stream = io.BytesIO()
    _write(directory, stream, dated=True)
    return stream.getvalue()


def _write(directory: Path, stream: Any, *, dated: bool) -> None:
    def of_root(member: tarfile.TarInfo) -> tarfile.TarInfo | None:
        member.uid = member.gid = 0
        member.uname = member.gname = ""
        member.mtime = member.mtime if dated else 0
        return member if member.isfile() or member.isdir() or member.issym() or member.islnk() else None

    names = {name for name, _ in files(directory)}
    if (directory / DOCKERFILE).is_file():
        names.add(DOCKERFILE)
    with tarfile.open(fileobj=stream, mode="w|", format=tarfile.PAX_FORMAT, bufsize=_CHUNK) as tar:
        for name in sorted(names):
            tar.add(directory / name, arcname=name, recursive=False, filter=of_root)


def gather(directory: Path, source: str, target: Path, *, extract: bool) -> list[str]:
    """Copy what COPY's `source` names into `target`; return the copies' names, for a directory those inside.

    Raises ImageBuildError if it names nothing in the context.
    """
    pattern = os.path.normpath(f"/{source}").lstrip("/")  # `..` ends at the context
    there = dict(files(directory))
    tops = [pattern] if pattern in there or not pattern else [n for n in there if _matches(n, pattern)]
    if not tops:
        raise ImageBuildError(f"{source} is not in the build context {directory}")
    made: list[str] = []
    for top in tops:
        path = directory / top
        if not top or stat.S_ISDIR(there[top].st_mode):
            prefix = f"{top}/" if top else ""
            for name in sorted(name.removeprefix(prefix) for name in there if name.startswith(prefix)):
                _place(path / name, there[f"{prefix}{name}"], target / name)
                made.append(name)
        elif extract and is_archive(path):
            with tarfile.open(path) as tar:
                tar.extractall(target, filter="tar")
                made += [member.name for member in tar.getmembers()]
        else:  # of a link that is named, the file; of one in a directory, the link
            real = path.resolve()
            if not real.is_relative_to(directory.resolve()) or not real.is_file():
                raise ImageBuildError(f"{source} leads to something that is no file in the build context")
            _place(real, real.stat(), target / path.name)
            made.append(path.name)
    return made


def _matches(name: str, pattern: str) -> bool:
    """Match as Go's filepath.Match does: no wildcard matches a slash."""
    return name.count("/") == pattern.count("/") and PurePosixPath(name).match(pattern)


def is_archive(path: Path) -> bool:
    """Return whether ADD unpacks this file."""
    return path.is_file() and not path.is_symlink() and tarfile.is_tarfile(path)


def _place(source: Path, status: os.stat_result, target: Path) -> None:
    if stat.S_ISDIR(status.st_mode):
        target.mkdir(parents=True, exist_ok=True)
        target.chmod(stat.S_IMODE(status.st_mode) | 0o700)
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    if stat.S_ISLNK(status.st_mode):
        target.symlink_to(source.readlink())
    elif stat.S_ISREG(status.st_mode):
        shutil.copy2(source, target)
