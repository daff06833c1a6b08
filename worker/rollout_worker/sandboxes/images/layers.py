"""Layers of an image, laid over each other in a directory.

https://github.com/opencontainers/image-spec/blob/main/layer.md. A layer may be hostile: no path in it leads out of the
directory, also not through links of an earlier one, and devices are left out.
"""

from __future__ import annotations

import contextlib
import errno
import gzip
import os
import stat
import tarfile
import zlib
from collections.abc import Generator
from pathlib import Path
from typing import BinaryIO, cast

from backports import zstd

from rollout_worker.sandboxes import trees

_WHITEOUT = ".wh."
_OPAQUE = ".wh..wh..opq"
_CHUNK = 1 << 18
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


class LayerError(Exception):
    """It is damaged, or no layer."""


def unpack_file(archive: Path, root: Path) -> None:
    """Lay what `archive` (a tar; plain, or packed by gzip or zstd) holds over `root`. LayerError, OSError."""
    root.mkdir(mode=0o755, exist_ok=True)
    try:
        with archive.open("rb") as file, _plain(file) as stream, tarfile.open(fileobj=stream, mode="r|") as tar:
            _Unpacker(root).unpack(tar)
    except (tarfile.TarError, EOFError, zlib.error, gzip.BadGzipFile, zstd.ZstdError) as error:
        raise LayerError(str(error)) from error


@contextlib.contextmanager
def _plain(file: BinaryIO) -> Generator[BinaryIO]:
    magic = file.read(4)
    file.seek(0)
    if magic[:2] == b"\x1f\x8b":
        with gzip.open(file) as stream:
            yield cast("BinaryIO", stream)
    elif magic == b"\x28\xb5\x2f\xfd":
        with zstd.open(file) as stream:
            yield cast("BinaryIO", stream)
    else:
        yield file


class _Unpacker:
    def __init__(self, root: Path) -> None:
        self._root = root
        self._own = os.geteuid() == 0
        self._modes: dict[str, tuple[int, int]] = {}  # of directories: set at last, since they may be read-only
        self._made: set[str] = set()  # by this layer, which an opaque mark spares

    def unpack(self, tar: tarfile.TarFile) -> None:
        base = os.open(self._root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            for member in tar:
                self._member(tar, member, base)
            for name, (mode, mtime) in reversed(self._modes.items()):
                with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                    parts = name.split("/") if name else []
                    fd = self._parent(base, parts, make=False)
                    try:
                        os.fchmod(fd, mode if self._own else mode | 0o700)
                        os.utime(fd, (mtime, mtime))
                    finally:
                        os.close(fd)
        finally:
            os.close(base)

    def _member(self, tar: tarfile.TarFile, member: tarfile.TarInfo, base: int) -> None:
        parts = _parts(member.name)
        if not parts:
            if member.isdir():
                self._modes[""] = member.mode & 0o7777, int(member.mtime)
            return
        parent = self._parent(base, parts[:-1])
        name = parts[-1]
        try:
            if name == _OPAQUE:
                self._empty(parent, "/".join(parts[:-1]))
            elif name.startswith(_WHITEOUT):
                _remove(parent, name.removeprefix(_WHITEOUT))
            else:
                self._place(tar, member, parent, parts, base)
        finally:
            os.close(parent)

    def _place(self, tar: tarfile.TarFile, member: tarfile.TarInfo, parent: int, parts: list[str], base: int) -> None:
        name, path = parts[-1], "/".join(parts)
        self._made.add(path)
        if member.isdir():
            self._make_directory(parent, name, member)
            self._modes[path] = member.mode & 0o7777, int(member.mtime)
            return
        if not (member.isreg() or member.issym() or member.islnk()):
            return  # a device or a pipe: a sandbox gets its own /dev
        self._modes.pop(path, None)
        if member.islnk():
            self._link(base, _parts(member.linkname), parent, name)
            return
        _remove(parent, name)
        if member.issym():
            os.symlink(member.linkname, name, dir_fd=parent)
            if self._own:
                os.chown(name, member.uid, member.gid, dir_fd=parent, follow_symlinks=False)
            return
        content = tar.extractfile(member)
        assert content is not None
        fd = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600, dir_fd=parent)
        with os.fdopen(fd, "wb") as file:
            while data := content.read(_CHUNK):
                file.write(data)
            file.flush()
            if file.tell() != member.size:
                raise LayerError(f"{path} is cut off")
            if self._own:
                os.fchown(fd, member.uid, member.gid)  # before the mode: it takes the set-user-id bit away
            os.fchmod(fd, (member.mode & 0o7777) if self._own else (member.mode & 0o777) | 0o600)
            os.utime(fd, (member.mtime, member.mtime))

    def _make_directory(self, parent: int, name: str, member: tarfile.TarInfo) -> None:
        try:
            status = os.stat(name, dir_fd=parent, follow_symlinks=False)
        except FileNotFoundError:
            os.mkdir(name, 0o755, dir_fd=parent)
        else:
            if not stat.S_ISDIR(status.st_mode):
                os.unlink(name, dir_fd=parent)
                os.mkdir(name, 0o755, dir_fd=parent)
        if self._own:
            os.chown(name, member.uid, member.gid, dir_fd=parent, follow_symlinks=False)

    def _link(self, base: int, target: list[str], parent: int, name: str) -> None:
        if not target:
            raise LayerError(f"{name} is a hard link to nothing")
        try:
            there = self._parent(base, target[:-1], make=False)
        except OSError as error:
            raise LayerError(f"{name} is a hard link to {'/'.join(target)}, which is not there") from error
        try:
            _remove(parent, name)
            os.link(target[-1], name, src_dir_fd=there, dst_dir_fd=parent, follow_symlinks=False)
        except FileNotFoundError as error:
            raise LayerError(f"{name} is a hard link to {'/'.join(target)}, which is not there") from error
        finally:
            os.close(there)

    def _parent(self, base: int, parts: list[str], *, make: bool = True) -> int:
        """A descriptor of a directory below `base`; with `make`, it is made.

        A layer that writes through a link of an earlier one, as `lib/x` where lib leads to usr/lib, means the place
        that the link leads to: such are followed, as long as they stay within.
        """
        fd = os.dup(base)
        way: list[str] = []
        waiting = list(parts)
        links = 0
        while waiting:
            part = waiting.pop(0)
            if part == "..":
                os.close(fd)
                way = way[:-1]
                fd = self._parent(base, way, make=False)
                continue
            try:
                inner = os.open(part, _DIRECTORY, dir_fd=fd)
            except OSError as error:
                if error.errno == errno.ENOENT and make:
                    os.mkdir(part, 0o755, dir_fd=fd)
                    inner = os.open(part, _DIRECTORY, dir_fd=fd)
                elif error.errno == errno.ENOTDIR and make and _link_at(fd, part) is None:
                    os.unlink(part, dir_fd=fd)  # a file of an earlier layer
                    os.mkdir(part, 0o755, dir_fd=fd)
                    inner = os.open(part, _DIRECTORY, dir_fd=fd)
                elif error.errno in (errno.ELOOP, errno.ENOTDIR) and (link := _link_at(fd, part)) is not None:
                    links += 1
                    if links > 40:
                        os.close(fd)
                        raise
                    if link.startswith("/"):
                        os.close(fd)
                        fd, way = os.dup(base), []
                    waiting = [p for p in link.split("/") if p not in ("", ".")] + waiting
                    continue
                else:
                    os.close(fd)
                    raise
            os.close(fd)
            fd = inner
            way.append(part)
        return fd

    def _empty(self, parent: int, path: str) -> None:
        """An opaque directory: what earlier layers have in it is hidden."""
        with os.scandir(parent) as entries:
            names = [entry.name for entry in entries]
        for name in names:
            whole = f"{path}/{name}" if path else name
            if not any(made == whole or made.startswith(f"{whole}/") for made in self._made):
                _remove(parent, name)


def _link_at(fd: int, name: str) -> str | None:
    try:
        return os.readlink(name, dir_fd=fd)
    except OSError:
        return None


def _parts(name: str) -> list[str]:
    """Of a path in a layer; `..` ends at the root."""
    normal = os.path.normpath(f"/{name}")
    return [part for part in normal.split("/") if part]


def _remove(parent: int, name: str) -> None:
    """Whatever it is; a link itself, not where it leads."""
    if name in ("", ".", ".."):
        return
    try:
        status = os.stat(name, dir_fd=parent, follow_symlinks=False)
    except FileNotFoundError:
        return
    if stat.S_ISDIR(status.st_mode):
        trees.remove(f"/proc/self/fd/{parent}/{name}")
    else:
        os.unlink(name, dir_fd=parent)
