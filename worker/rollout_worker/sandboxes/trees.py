"""Transfer files and directories through a pipe as tar (POSIX pax); the sender may be hostile. Standard library only.

One side runs in the sandbox, where every path is the sandbox's own, the other in the owner. The stream's first member,
`.`, is the requested file or directory.
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
import stat
import tarfile
from collections.abc import Container, Iterator
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import BinaryIO

SKIPPED_SHOWN = 1000
DEPTH_MAX = 100
PATH_BYTES_MAX = 512
NAME_BYTES_MAX = 255
"""Limits of names that leave a sandbox, so that the receiver can read and remove them where paths may be short."""
_CHUNK = 1 << 18
_MEMBER = tarfile.BLOCKSIZE  # counts for each entry: millions of empty files are not a small tree
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


class TooLargeError(Exception):
    """The files are larger than allowed."""

    reason = "too_large"


class TooManyError(TooLargeError):
    """There are more files and directories than allowed."""

    reason = "too_many"


@dataclass
class Moved:
    """The result of a transfer. `skipped` has the first SKIPPED_SHOWN of the `left_out` entries."""

    files: int = 0
    size: int = 0
    skipped: list[tuple[str, str]] = field(default_factory=list[tuple[str, str]])
    left_out: int = 0

    def skip(self, name: str, why: str) -> None:
        self.left_out += 1
        if len(self.skipped) < SKIPPED_SHOWN:
            self.skipped.append((name, why))


IGNORED, FILE_TOO_LARGE, OVER_BUDGET, TOO_MANY = "ignored", "file_too_large", "over_budget", "too_many"
"""Reasons why a selection leaves an entry out."""


@dataclass(frozen=True, slots=True)
class Selection:
    """The part of a tree to transfer; the rest is left out, which is no error.

    `ignore` has patterns (`fnmatch`): one without a slash matches names at any depth, one with a slash whole paths. A
    directory that matches is left out whole. `file_bytes` limits one file, `max_bytes` all of them, `max_entries` the
    number of files, links and directories.
    """

    ignore: tuple[str, ...]
    file_bytes: int
    max_bytes: int
    max_entries: int

    def ignores(self, name: str) -> bool:
        """Return whether a pattern matches this path in the tree; its parents are not checked."""
        last = name.rpartition("/")[2]
        return any(fnmatchcase(name if "/" in pattern else last, pattern) for pattern in self.ignore)


class Chooser:
    """Applies a selection to entries in order, each directory before its contents."""

    def __init__(self, selection: Selection | None) -> None:
        self.left: set[str] = set()
        """Directories that are left out whole."""
        self._selection = selection
        self._bytes = self._entries = 0

    def takes(self, name: str, size: int, moved: Moved, *, is_directory: bool) -> bool:
        """Return whether to take an entry. What is left out is noted in `moved`, but not what is in a left-out
        directory."""
        if self._selection is None:
            return True
        if name.rpartition("/")[0] in self.left:
            if is_directory:
                self.left.add(name)
            return False
        why = self._why_not(self._selection, name, size)
        if not why:
            self._entries += 1
            self._bytes += size
            return True
        moved.skip(name, why)
        if is_directory:
            self.left.add(name)
        return False

    def _why_not(self, selection: Selection, name: str, size: int) -> str:
        if selection.ignores(name):
            return IGNORED
        if self._entries >= selection.max_entries:
            return TOO_MANY
        if size > selection.file_bytes:
            return FILE_TOO_LARGE
        return OVER_BUDGET if self._bytes + size > selection.max_bytes else ""


class _Exactly(io.RawIOBase):
    """A file's bytes, cut or zero-padded to the size in its header, because the file may change meanwhile."""

    def __init__(self, fd: int, size: int) -> None:
        self._fd = fd
        self._left = size

    def read(self, size: int = -1, /) -> bytes:
        size = self._left if size < 0 else min(size, self._left)
        data = os.read(self._fd, size) or bytes(size)
        self._left -= len(data)
        while len(data) < size and (more := self.read(size - len(data))):
            data += more
        return data


def pack(
    source: str,
    stream: BinaryIO,
    max_bytes: int | None = None,
    form: int = tarfile.PAX_FORMAT,
    max_entries: int | None = None,
    selection: Selection | None = None,
) -> Moved:
    """Write `source` to the stream. Links in it are not followed, but `source` itself is. Raises OSError,
    TooLargeError.

    `selection` says what to take; with one, `source` is not followed either (ELOOP).
    """
    moved, chooser = Moved(), Chooser(selection)
    with tarfile.open(fileobj=stream, mode="w|", format=form, errors="surrogateescape") as tar:
        top = os.stat(source, follow_symlinks=selection is None)
        if stat.S_ISLNK(top.st_mode):
            raise OSError(errno.ELOOP, "a link", source)
        if not stat.S_ISDIR(top.st_mode):
            if not stat.S_ISREG(top.st_mode):
                raise OSError(errno.EINVAL, "not a regular file or a directory", source)
            _pack_file(tar, source, ".", moved, max_bytes, os.O_RDONLY | (os.O_NOFOLLOW if selection else 0))
            return moved
        tar.addfile(_header(".", top, tarfile.DIRTYPE))
        entries = 0
        for name, path, status in _walk(source, moved, chooser.left):
            size = status.st_size if stat.S_ISREG(status.st_mode) else 0
            if not chooser.takes(name, size, moved, is_directory=stat.S_ISDIR(status.st_mode)):
                continue
            entries += 1
            if max_entries is not None and entries > max_entries:
                raise TooManyError
            if max_bytes is not None and moved.size + entries * _MEMBER > max_bytes:
                raise TooLargeError
            if stat.S_ISREG(status.st_mode):
                try:
                    _pack_file(tar, path, name, moved, max_bytes, os.O_RDONLY | os.O_NOFOLLOW)
                except PermissionError as error:
                    moved.skip(name, error.strerror or "")
                except OSError as error:
                    if error.errno not in (errno.ENOENT, errno.ELOOP, errno.EINVAL):  # replaced after it was listed
                        raise
                    moved.skip(name, "it changed meanwhile")
            elif stat.S_ISDIR(status.st_mode):
                tar.addfile(_header(name, status, tarfile.DIRTYPE))
            elif stat.S_ISLNK(status.st_mode):
                link = _header(name, status, tarfile.SYMTYPE)
                link.linkname = os.readlink(path)
                tar.addfile(link)
            else:
                moved.skip(name, "a pipe, a socket or a device")
    return moved


def _walk(top: str, moved: Moved, left: Container[str] = ()) -> Iterator[tuple[str, str, os.stat_result]]:
    """Yield (name in the tree, path, status) of entries, a directory before its contents, names in order.

    `left` has directories to skip; the caller may add a directory when it gets it.
    """
    waiting = [""]
    while waiting:
        inner = waiting.pop()
        try:
            with os.scandir(os.path.join(top, inner)) as entries:
                found = sorted(entries, key=lambda entry: entry.name)
        except OSError as error:
            moved.skip(inner or ".", error.strerror or "")
            continue
        deeper: list[str] = []
        for entry in found:
            name = f"{inner}/{entry.name}" if inner else entry.name
            try:
                status = entry.stat(follow_symlinks=False)
            except OSError as error:
                moved.skip(name, error.strerror or "")
                continue
            yield name, entry.path, status
            if entry.is_dir(follow_symlinks=False) and name not in left:
                deeper.append(name)
        waiting.extend(reversed(deeper))


def _header(name: str, status: os.stat_result, kind: bytes) -> tarfile.TarInfo:
    header = tarfile.TarInfo(name)
    header.type = kind
    header.mode = stat.S_IMODE(status.st_mode) & 0o777
    header.mtime = int(status.st_mtime)
    return header


def _pack_file(tar: tarfile.TarFile, path: str, name: str, moved: Moved, max_bytes: int | None, flags: int) -> None:
    fd = os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC)  # a pipe in its place must not block us
    try:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            raise OSError(errno.EINVAL, "not a regular file", path)
        if max_bytes is not None and moved.size + status.st_size > max_bytes:
            raise TooLargeError
        header = _header(name, status, tarfile.REGTYPE)
        header.size = status.st_size
        tar.addfile(header, _Exactly(fd, status.st_size))
        moved.files += 1
        moved.size += status.st_size
    finally:
        os.close(fd)


def unpack(
    stream: BinaryIO, target: str, *, leave: bool, max_bytes: int | None = None, max_entries: int | None = None
) -> Moved:
    """Extract the stream at `target`. `leave` allows links out of it. Raises OSError, TarError, TooLargeError.

    Without `leave`, names that are not UTF-8 are escaped, and what is too deep or has too long a name is skipped.
    Existing files are replaced as a whole; links and files in place of directories are errors (ENOTDIR, ELOOP).
    """
    moved = Moved()
    members = 0
    base = -1
    try:
        with tarfile.open(fileobj=stream, mode="r|", errors="surrogateescape") as tar:
            for member in tar:
                if max_entries is not None and members > max_entries:  # the first is the top
                    raise TooManyError
                members += 1
                if max_bytes is not None and moved.size + member.size + members * _MEMBER > max_bytes:
                    raise TooLargeError
                if base < 0:
                    base = _unpack_top(tar, member, target, moved)
                    if base < 0:
                        return moved
                    continue
                _unpack_member(tar, member, base, moved, leave)
    finally:
        if base >= 0:
            os.close(base)
    return moved


def _unpack_top(tar: tarfile.TarFile, member: tarfile.TarInfo, target: str, moved: Moved) -> int:
    """Return a descriptor of the directory for the rest, or -1 if the stream was a single file."""
    if member.name != ".":
        raise tarfile.ReadError("the stream does not begin as it should")
    if member.isdir():
        make_directories(target)
        return os.open(target, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    parent, name = os.path.split(os.path.abspath(target))
    make_directories(parent)
    fd = os.open(parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        _unpack_file(tar, member, fd, name, moved)
    finally:
        os.close(fd)
    return -1


def make_directories(path: str) -> None:
    """Make a directory and its parents. Raises OSError: ENOTDIR also if the path itself is not a directory."""
    try:
        os.makedirs(path, exist_ok=True)
    except FileExistsError as error:
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), path) from error


def _unpack_member(tar: tarfile.TarFile, member: tarfile.TarInfo, base: int, moved: Moved, leave: bool) -> None:
    name = member.name if leave else _readable(member.name)
    parts = name.split("/")
    if any(part in ("", ".", "..") for part in parts):
        moved.skip(member.name, "not a path in the tree")
        return
    if not leave and _is_too_long(parts):
        moved.skip(f"{name[:100]}...", "too deep, or too long a name")
        return
    parent = _open_parent(base, parts[:-1])
    try:
        name = parts[-1]
        if member.isdir():
            _make_directory(parent, name, member.mode)
        elif member.isreg():
            _unpack_file(tar, member, parent, name, moved)
        elif not member.issym():
            moved.skip(member.name, "not a file, a directory or a symbolic link")
        elif not leave and not stays_inside(member.linkname, len(parts) - 1):
            moved.skip(member.name, f"a link that leads out: {member.linkname}")
        else:
            _remove_file(parent, name)
            os.symlink(member.linkname, name, dir_fd=parent)
            moved.files += 1
    finally:
        os.close(parent)


def _readable(name: str) -> str:
    r"""Return the name with bytes that are not UTF-8 as `\xff`."""
    return name.encode(errors="surrogateescape").decode(errors="backslashreplace")


def _is_too_long(parts: list[str]) -> bool:
    sizes = [len(part.encode()) for part in parts]
    return len(parts) > DEPTH_MAX or max(sizes) > NAME_BYTES_MAX or sum(sizes) + len(sizes) > PATH_BYTES_MAX


def stays_inside(link: str, depth: int) -> bool:
    """Return whether a link in a directory `depth` levels below the top cannot lead above it, whatever other links
    exist.

    `..` is only allowed at the front, where it climbs directories that are none of the tree's links: `a/..` leads
    somewhere else than it seems if `a` is a link.
    """
    parts = [part for part in link.split("/") if part not in ("", ".")]
    climbs = next((n for n, part in enumerate(parts) if part != ".."), len(parts))
    return not link.startswith("/") and climbs <= depth and ".." not in parts[climbs:]


def _open_parent(base: int, parts: list[str]) -> int:
    fd = os.dup(base)
    for part in parts:
        try:
            with contextlib.suppress(FileExistsError):
                os.mkdir(part, 0o755, dir_fd=fd)
            inner = os.open(part, _DIRECTORY, dir_fd=fd)
        finally:
            os.close(fd)
        fd = inner
    return fd


def _make_directory(parent: int, name: str, mode: int) -> None:
    with contextlib.suppress(FileExistsError):
        os.mkdir(name, 0o755, dir_fd=parent)
    fd = os.open(name, _DIRECTORY, dir_fd=parent)
    try:
        os.fchmod(fd, (mode & 0o777) | 0o700)  # whoever made it must be able to remove it
    finally:
        os.close(fd)


def _remove_file(parent: int, name: str) -> None:
    with contextlib.suppress(FileNotFoundError):
        os.unlink(name, dir_fd=parent)


def _unpack_file(tar: tarfile.TarFile, member: tarfile.TarInfo, parent: int, name: str, moved: Moved) -> None:
    content = tar.extractfile(member)
    if content is None:
        raise OSError(errno.EINVAL, "not a regular file", member.name)
    _remove_file(parent, name)
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    fd = os.open(name, flags, 0o600, dir_fd=parent)
    with os.fdopen(fd, "wb") as file:
        while data := content.read(_CHUNK):
            moved.size += file.write(data)
        file.flush()
        os.fchmod(fd, (member.mode & 0o777) | 0o600)
        os.utime(fd, (member.mtime, member.mtime))
    moved.files += 1


def usage(top: str) -> int:
    """Return the bytes a tree uses on disk; what cannot be read counts as 0."""
    size = 0
    for _, _, status in _walk(top, Moved()):
        size += status.st_blocks * 512
    return size


def remove(top: str) -> None:
    """Remove a tree of any depth, even if its directories cannot be read or written. Raises OSError if something is
    left.

    Each directory in a directory is first moved up to `top`, so that no path is longer than the kernel allows.
    """
    try:
        if not stat.S_ISDIR(os.lstat(top).st_mode):
            os.unlink(top)
            return
    except FileNotFoundError:
        return
    moved_up = 0
    while inner := _empty(top):
        for path in inner:
            for deeper in _empty(path):
                moved_up += 1
                os.rename(deeper, f"{top}/.removed-{os.getpid()}-{moved_up}")
            os.rmdir(path)
    os.rmdir(top)


def _empty(path: str) -> list[str]:
    """Remove what is not a directory; return the paths of directories, with permissions to empty and move each."""
    if not os.access(path, os.R_OK | os.W_OK | os.X_OK):
        os.chmod(path, 0o700)
    inner: list[str] = []
    with os.scandir(path) as entries:
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                if not os.access(entry.path, os.R_OK | os.W_OK | os.X_OK):
                    os.chmod(entry.path, 0o700)
                inner.append(entry.path)
            else:
                os.unlink(entry.path)
    return inner
