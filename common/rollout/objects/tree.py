"""A directory as objects: one per file, and a manifest whose id identifies the whole tree.

The manifest is canonical JSON, so equal trees have equal ids on every machine. Paths, sizes, contents and the
executable bit count; times and owners do not.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, Literal, Protocol, cast

from rollout.cloud.parallel import gathered
from rollout.files import fsync_dir, temporary_beside
from rollout.model.errors import InputError, ObjectCorruptError
from rollout.objects.cache import locked
from rollout.objects.digest import ID_BYTES, hash_file, object_id
from rollout.objects.fs import storage_errors

VERSION = 1
MAX_FILES = 1_000_000
_CONCURRENT = 4
_CHECK_EACH = 256
_AS_IT_BEGAN = (
    "A run needs its files as they were when it began: change it back, or start a new run, with another output, when "
    "nothing writes to them"
)


class Uploads(Protocol):
    """Part of `RemoteObjects` that an upload needs."""

    async def has(self, object_ids: list[bytes]) -> list[bool]: ...
    async def put(self, data: bytes) -> bytes: ...
    async def put_path(self, path: Path, *, known_id: bytes | None = None) -> bytes: ...


class Paths(Protocol):
    """Part of `ObjectCache` that materialising needs."""

    async def path(self, object_id: bytes) -> Path: ...


Links = Literal["inside", "follow"]
Progress = Callable[[int, int], None]
"""Function called with (bytes done, total bytes)."""


@dataclass(frozen=True, slots=True, order=True)
class TreeFile:
    path: str  # relative, with forward slashes
    size: int
    object_id: bytes
    executable: bool = False


@dataclass(frozen=True, slots=True)
class Tree:
    files: tuple[TreeFile, ...]  # in order of path

    @property
    def size(self) -> int:
        return sum(f.size for f in self.files)

    def to_bytes(self) -> bytes:
        rows = [[f.path, f.size, f.object_id.hex(), int(f.executable)] for f in self.files]
        value = {"files": rows, "kind": "tree", "version": VERSION}
        return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()

    @property
    def id(self) -> bytes:
        return object_id(self.to_bytes())

    @staticmethod
    def from_bytes(data: bytes) -> Tree:
        """Parse a manifest. Raises ObjectCorruptError unless every name stays inside the directory."""
        try:
            value: Any = json.loads(data)
            if value["kind"] != "tree" or value["version"] != VERSION:
                raise ObjectCorruptError(f"this is not a tree manifest of version {VERSION}; upgrade this program")
            rows = cast("list[tuple[str, int, str, int]]", value["files"])
            files = tuple(TreeFile(_safe(p), int(s), bytes.fromhex(i), bool(x)) for p, s, i, x in rows)
        except (ValueError, KeyError, TypeError) as e:
            raise ObjectCorruptError(f"this is not a tree manifest: {e}") from e
        names = {f.path for f in files}
        parents = {str(parent) for f in files for parent in PurePosixPath(f.path).parents}
        if len(names) != len(files) or names & parents or any(len(f.object_id) != ID_BYTES for f in files):
            raise ObjectCorruptError("a tree manifest names the same path twice, or an impossible object")
        return Tree(files)


def _safe(path: str) -> str:
    parts = path.split("/")
    if any(part in ("", ".", "..") for part in parts) or "\0" in path or "\\" in path:
        raise ObjectCorruptError(f"a tree manifest holds the unsafe path {path!r}")
    return path


def scan_directory(directory: Path, *, links: Links = "inside") -> list[tuple[str, Path]]:
    """Return (name in the tree, file), by name. Blocking.

    Symbolic links are followed if they stay inside the directory, else InputError is raised; `links="follow"` follows
    all (a model in the Hugging Face cache is a directory of links to its blobs). Special files raise InputError.
    """
    root = directory.resolve()
    if not root.is_dir():
        raise InputError(f"{directory} is not a directory")
    found: list[tuple[str, Path]] = []
    seen: set[Path] = set()

    def walk(at: Path, prefix: str) -> None:
        real = at.resolve()
        if real in seen:
            raise InputError(f"{at} is a link to a directory above or beside it; a tree cannot hold it twice")
        seen.add(real)
        for entry in sorted(at.iterdir()):
            name = prefix + entry.name
            if "\\" in name:
                raise InputError(f"{entry}: a backslash in a name cannot travel; rename the file")
            if entry.is_symlink() and links == "inside" and not entry.resolve().is_relative_to(root):
                raise InputError(f"{entry} is a link that leads out of {directory}; copy the directory with cp -rL")
            if entry.is_dir():
                walk(entry, name + "/")
            elif entry.is_file():
                found.append((name, entry))
            else:
                raise InputError(f"{entry} is neither a file nor a directory, or its link leads nowhere")

    walk(root, "")
    if len(found) > MAX_FILES:
        raise InputError(f"{directory} holds {len(found)} files; {MAX_FILES} is the most a tree can hold")
    return sorted(found)


Chosen = Sequence[tuple[str, Path]]
"""(name in the tree, file) of the files of a directory that are included."""


async def describe(directory: Path, *, links: Links = "inside", files: Chosen | None = None) -> Tree:
    """Hash a directory, or the `files` chosen from it, and return its tree. Nothing is uploaded. Raises InputError."""
    tree, _ = await _describe(directory, links, files)
    return tree


async def _describe(directory: Path, links: Links, chosen: Chosen | None) -> tuple[Tree, dict[bytes, Path]]:
    files: list[TreeFile] = []
    sources: dict[bytes, Path] = {}
    try:
        if chosen is None:
            chosen = await asyncio.to_thread(scan_directory, directory, links=links)
        for name, path in chosen:
            digest, size = await asyncio.to_thread(hash_file, path)
            files.append(TreeFile(name, size, digest, os.access(path, os.X_OK)))
            sources.setdefault(digest, path)
    except OSError as e:
        raise InputError(f"{directory} cannot be read: {e}") from e
    return Tree(tuple(sorted(files))), sources


async def upload(
    directory: Path,
    remote: Uploads,
    progress: Progress | None = None,
    *,
    links: Links = "inside",
    files: Chosen | None = None,
    expected: bytes | None = None,
) -> bytes:
    """Upload what the store lacks, and return the manifest's id for `materialise`. An interrupted call loses only a
    file.

    `files` are the files to include; the default is all. `expected` is the manifest's id from an earlier call:
    InputError is raised if the directory has changed since and the store lacks the earlier content.
    """
    tree, sources = await _describe(directory, links, files)
    if expected is not None and tree.id != expected:
        if (await remote.has([expected]))[0]:
            return expected
        raise InputError(f"a file of {directory} was changed before it was uploaded. {_AS_IT_BEGAN}")
    sizes = {f.object_id: f.size for f in tree.files}
    ids = list(sources)
    total, done = sum(sizes.values()), 0
    there: set[bytes] = set()
    for start in range(0, len(ids), _CHECK_EACH):
        part = ids[start : start + _CHECK_EACH]
        there.update(i for i, has in zip(part, await remote.has(part), strict=True) if has)
    done = sum(sizes[i] for i in there)
    if progress is not None:
        progress(done, total)

    async def send(name: bytes) -> None:
        nonlocal done
        try:
            await remote.put_path(sources[name], known_id=name)
        except ObjectCorruptError as error:
            if (await asyncio.to_thread(hash_file, sources[name]))[0] != name:
                raise InputError(f"{sources[name]} was changed while it was uploaded. {_AS_IT_BEGAN}") from error
            raise
        done += sizes[name]
        if progress is not None:
            progress(done, total)

    await gathered(send, [i for i in ids if i not in there], _CONCURRENT)
    return await remote.put(tree.to_bytes())


async def materialise(manifest_id: bytes, cache: Paths, root: Path, progress: Progress | None = None) -> Path:
    """Return the tree as the read-only directory `root/<hex of manifest_id>`, complete as soon as it has that name.

    Files are hard links into the cache if the file system allows them, else copies. An interrupted call resumes with
    the files it had. Raises NotFoundError, ObjectCorruptError, StorageFullError.
    """
    final = root / manifest_id.hex()
    with storage_errors(f"{final} cannot be made"):
        if await asyncio.to_thread(final.is_dir):
            return final
        async with locked(root / ".locks" / manifest_id.hex()):
            if await asyncio.to_thread(final.is_dir):
                return final
            manifest = await cache.path(manifest_id)
            tree = Tree.from_bytes(await asyncio.to_thread(manifest.read_bytes))
            partial = root / f".{manifest_id.hex()}.partial"
            await asyncio.to_thread(partial.mkdir, parents=True, exist_ok=True)
            done = 0

            async def place(file: TreeFile) -> None:
                nonlocal done
                await _place(file, cache, partial)
                done += file.size
                if progress is not None:
                    progress(done, tree.size)

            await gathered(place, tree.files, _CONCURRENT)
            await asyncio.to_thread(_finish, partial, final)
    return final


async def _place(file: TreeFile, cache: Paths, partial: Path) -> None:
    target = partial / file.path
    try:
        if (await asyncio.to_thread(target.stat)).st_size == file.size:
            return  # each file got its name only when it was whole
    except FileNotFoundError:
        pass
    for attempt in range(3):
        source = await cache.path(file.object_id)
        try:
            await asyncio.to_thread(_link, source, target, file.executable)
            return
        except FileNotFoundError:  # evicted in between by another process
            if attempt == 2:
                raise


def _link(source: Path, target: Path, executable: bool) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    tmp = temporary_beside(target)
    try:
        if executable:  # a link shares its mode with the cache's file
            _copy(source, tmp, 0o555)
        else:
            try:
                tmp.hardlink_to(source)
            except FileNotFoundError:
                raise
            except OSError:  # another file system, or one without links
                _copy(source, tmp, 0o444)
        tmp.replace(target)
    finally:
        # rename() of two names of one file does nothing, and leaves the temporary one
        tmp.unlink(missing_ok=True)


def _copy(source: Path, target: Path, mode: int) -> None:
    shutil.copyfile(source, target)
    with target.open("rb+") as file:
        os.fsync(file.fileno())
    target.chmod(mode)


def _finish(partial: Path, final: Path) -> None:
    for directory in [p for p in partial.rglob("*") if p.is_dir()]:
        fsync_dir(directory)
    fsync_dir(partial)
    partial.replace(final)
    fsync_dir(final.parent)
