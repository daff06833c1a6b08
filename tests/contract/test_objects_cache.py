"""Packs, the host's cache and directory trees, over a store in memory."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import stat
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from rollout.model.errors import (
    InputError,
    NotFoundError,
    ObjectCorruptError,
    StateError,
    StorageError,
    StorageFullError,
)
from rollout.model.item import INLINE_MAX, ObjectSlice
from rollout.objects.cache import ObjectCache, locked, read_cached
from rollout.objects.digest import object_id
from rollout.objects.pack import Packer
from rollout.objects.tree import Tree, TreeFile, describe, materialise, upload


class Memory:
    """A store that keeps the contract: what it returned an id for, it has."""

    def __init__(self) -> None:
        self.objects: dict[bytes, bytes] = {}
        self.puts: list[int] = []
        self.fetches = 0
        self.gate: asyncio.Event | None = None
        self.fail: Exception | None = None

    async def put(self, data: bytes) -> bytes:
        if self.gate is not None:
            await self.gate.wait()
        if self.fail is not None:
            raise self.fail
        self.puts.append(len(data))
        self.objects[object_id(data)] = data
        return object_id(data)

    async def put_pieces(self, pieces: Sequence[bytes]) -> ObjectSlice:
        """After 7 bytes of somebody else's."""
        data = b"another" + b"".join(pieces)
        return ObjectSlice(await self.put(data), 7, len(data) - 7)

    async def put_path(self, path: Path, *, known_id: bytes | None = None) -> bytes:
        name = await self.put(path.read_bytes())
        assert known_id in (None, name)
        return name

    async def has(self, object_ids: list[bytes]) -> list[bool]:
        return [i in self.objects for i in object_ids]

    async def fetch(self, object_id: bytes, path: Path) -> None:
        self.fetches += 1
        if self.gate is not None:
            await self.gate.wait()
        if object_id not in self.objects:
            raise NotFoundError(object_id.hex())
        path.write_bytes(self.objects[object_id])


# packs


async def test_blobs_share_an_object() -> None:
    memory = Memory()
    packer = Packer(memory.put_pieces, max_bytes=100_000, linger_s=0.001)
    blobs = [os.urandom(INLINE_MAX + i) for i in range(1, 50)]
    slices = await asyncio.gather(*[packer.add(b) for b in blobs])
    assert len(memory.puts) == 3
    assert all(size <= 7 + 100_000 for size in memory.puts)
    for blob, place in zip(blobs, slices, strict=True):
        assert memory.objects[place.object_id][place.offset : place.offset + place.length] == blob
    await packer.close()


async def test_small_stays_inline_and_huge_goes_alone() -> None:
    memory = Memory()
    packer = Packer(memory.put_pieces, max_bytes=10_000, linger_s=3600)
    assert await packer.store(b"x" * INLINE_MAX) == b"x" * INLINE_MAX
    assert (await packer.add(b"first" * 1000)).length == 5000, "nothing was sent before it, so it does not wait"
    waiting = asyncio.create_task(packer.add(b"y" * 5000))
    await asyncio.sleep(0.05)
    assert await packer.add(b"z" * 10_000) == ObjectSlice(object_id(b"another" + b"z" * 10_000), 7, 10_000)
    assert not waiting.done()
    await packer.close()
    assert (await waiting).length == 5000
    with pytest.raises(StateError):
        await packer.add(b"late")


async def test_a_failed_pack_fails_its_blobs_only() -> None:
    memory = Memory()
    packer = Packer(memory.put_pieces, linger_s=0.001)
    memory.fail = StorageFullError()
    with pytest.raises(StorageFullError):
        await packer.add(b"a" * 5000)
    memory.fail = None
    await packer.add(b"b" * 5000)


async def test_one_who_gives_up_does_not_take_the_pack_along() -> None:
    memory = Memory()
    memory.gate = asyncio.Event()
    packer = Packer(memory.put_pieces, linger_s=0)
    one, two = asyncio.create_task(packer.add(b"a" * 5000)), asyncio.create_task(packer.add(b"b" * 5000))
    await asyncio.sleep(0)
    one.cancel()
    memory.gate.set()
    assert (await two).offset == 7 + 5000
    assert one.cancelled()


async def test_while_uploads_are_on_their_way_one_pack_takes_what_comes() -> None:
    memory = Memory()
    memory.gate = asyncio.Event()
    packer = Packer(memory.put_pieces, linger_s=0, uploads=1)
    first = asyncio.create_task(packer.add(b"a" * 5000))
    await asyncio.sleep(0.01)
    rest: list[asyncio.Task[ObjectSlice]] = []
    for _ in range(3):
        rest.append(asyncio.create_task(packer.add(b"b" * 5000)))
        await asyncio.sleep(0.01)
    memory.gate.set()
    assert len({place.object_id for place in await asyncio.gather(first, *rest)}) == 2
    assert memory.puts == [7 + 5000, 7 + 15_000]
    await packer.close()


# cache


async def test_many_tasks_fetch_once(tmp_path: Path) -> None:
    memory = Memory()
    name = await memory.put(b"payload")
    cache = ObjectCache(tmp_path, 1 << 20, memory.fetch)
    paths = await asyncio.gather(*[cache.path(name) for _ in range(20)])
    assert memory.fetches == 1
    assert paths[0].read_bytes() == b"payload"
    assert stat.S_IMODE(paths[0].stat().st_mode) == 0o444
    assert await cache.read(ObjectSlice(name, 3, 2)) == b"lo"
    assert await cache.read(b"inline") == b"inline"
    with pytest.raises(ObjectCorruptError):
        await cache.read(ObjectSlice(name, 3, 20))
    other = ObjectCache(tmp_path, 1 << 20, memory.fetch)
    assert await other.path(name) == paths[0]
    assert memory.fetches == 1


async def test_processes_read_what_is_ready_themselves(tmp_path: Path) -> None:
    memory = Memory()
    name, other = await memory.put(b"payload"), await memory.put(b"elsewhere")
    cache = ObjectCache(tmp_path, 1 << 20, memory.fetch)
    blobs = [ObjectSlice(name, 0, 3), b"inline", ObjectSlice(other, 0, 4), ObjectSlice(name, 3, 4)]
    assert read_cached(tmp_path, blobs) == blobs
    await cache.ready(name, 7)
    assert read_cached(tmp_path, blobs) == [b"pay", b"inline", ObjectSlice(other, 0, 4), b"load"]
    with pytest.raises(ObjectCorruptError, match="shorter than the slice"):
        await cache.ready(name, 8)
    beyond = ObjectSlice(name, 3, 5)
    assert read_cached(tmp_path, [beyond]) == [beyond], "never a part of it"


async def test_a_cache_that_keeps_nothing_says_so(tmp_path: Path) -> None:
    memory = Memory()
    name = await memory.put(b"payload")

    class Full(ObjectCache):
        async def ready(self, object_id: bytes, end: int) -> None:
            await super().ready(object_id, end)
            (await self.path(object_id)).unlink()  # another process evicts it at once

    with pytest.raises(ObjectCorruptError, match="is too small"):
        await Full(tmp_path, 1, memory.fetch).read(ObjectSlice(name, 0, 7))
    assert memory.fetches == 4


async def test_a_cache_that_cannot_be_read_says_so(tmp_path: Path) -> None:
    memory = Memory()
    name = await memory.put(b"payload")
    cache = ObjectCache(tmp_path, 1 << 20, memory.fetch)
    place = await cache.path(name)
    place.unlink()
    place.mkdir()
    with pytest.raises(StorageError, match="cannot be read"):
        await cache.read(ObjectSlice(name, 0, 7))
    place.rmdir()
    place.parent.rmdir()
    place.parent.write_text("")
    for asking in (cache.path(name), cache.ready(name, 7), cache.read(ObjectSlice(name, 0, 7))):
        with pytest.raises(StorageError, match="cannot be read"):
            await asking


async def test_a_failed_fetch_is_tried_again(tmp_path: Path) -> None:
    memory = Memory()
    cache = ObjectCache(tmp_path, 1 << 20, memory.fetch)
    with pytest.raises(NotFoundError):
        await cache.path(object_id(b"late"))
    await memory.put(b"late")
    assert (await cache.path(object_id(b"late"))).read_bytes() == b"late"


async def test_least_recently_used_go_first(tmp_path: Path) -> None:
    memory = Memory()
    now = [1_800_000_000.0]
    cache = ObjectCache(tmp_path, 10_000, memory.fetch, now=lambda: now[0])
    names = [await memory.put(bytes([i]) * 1000) for i in range(12)]
    for name in names[:10]:
        await cache.path(name)
        now[0] += 10
    await cache.path(names[0])  # used again
    now[0] += 100
    await cache.path(names[10])
    kept = {p.name for p in tmp_path.glob("??/*")}
    assert names[0].hex() in kept
    assert names[10].hex() in kept
    assert names[1].hex() not in kept
    assert sum(p.stat().st_size for p in tmp_path.glob("??/*")) <= 10_000


def _fetch_in_process(directory: str, barrier: object, log: str) -> None:
    async def fetch(name: bytes, path: Path) -> None:
        with Path(log).open("a") as file:
            file.write("fetched\n")
        await asyncio.sleep(0.05)
        path.write_bytes(b"of the host")

    async def main() -> None:
        cache = ObjectCache(Path(directory), 1 << 20, fetch)
        barrier.wait()  # type: ignore[attr-defined]
        assert (await cache.path(object_id(b"of the host"))).read_bytes() == b"of the host"

    asyncio.run(main())


def test_processes_of_a_host_fetch_once(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    barrier = context.Barrier(3)
    args = (str(tmp_path / "cache"), barrier, str(tmp_path / "log"))
    children = [context.Process(target=_fetch_in_process, args=args) for _ in range(3)]
    for child in children:
        child.start()
    for child in children:
        child.join(60)
        assert child.exitcode == 0
    assert (tmp_path / "log").read_text() == "fetched\n"


# trees


def make_model(root: Path) -> Path:
    root.mkdir()
    (root / "config.json").write_text("{}")
    (root / "weights").mkdir()
    (root / "weights" / "a.bin").write_bytes(b"w" * 100_000)
    (root / "weights" / "same.bin").write_bytes(b"w" * 100_000)
    (root / "run.sh").write_text("#!/bin/sh\n")
    (root / "run.sh").chmod(0o755)
    (root / "link.json").symlink_to("config.json")
    return root


async def test_a_directory_travels(tmp_path: Path) -> None:
    memory = Memory()
    source = make_model(tmp_path / "model")
    steps: list[tuple[int, int]] = []
    name = await upload(source, memory, lambda done, total: steps.append((done, total)))
    assert name == (await describe(source)).id
    assert steps[-1][0] == steps[-1][1] == 100_000 + 2 + 10
    assert memory.puts.count(100_000) == 1
    memory.puts.clear()
    assert await upload(source, memory) == name
    assert len(memory.puts) == 1  # the manifest only

    cache = ObjectCache(tmp_path / "cache", 1 << 30, memory.fetch)
    made = await asyncio.gather(*[materialise(name, cache, tmp_path / "models") for _ in range(3)])
    assert made[0] == tmp_path / "models" / name.hex()
    names = sorted(str(p.relative_to(made[0])) for p in made[0].rglob("*") if p.is_file())
    assert names == ["config.json", "link.json", "run.sh", "weights/a.bin", "weights/same.bin"]
    assert (made[0] / "weights" / "a.bin").read_bytes() == b"w" * 100_000
    assert os.access(made[0] / "run.sh", os.X_OK)
    assert not os.access(made[0] / "config.json", os.X_OK)
    assert (await describe(made[0])).id == name  # the same tree on the other side
    assert (made[0] / "weights" / "a.bin").samefile(made[0] / "weights" / "same.bin")


async def test_materialise_goes_on_where_it_stopped(tmp_path: Path) -> None:
    memory = Memory()
    name = await upload(make_model(tmp_path / "model"), memory)
    lost = object_id(b"{}")
    held = memory.objects.pop(lost)
    cache = ObjectCache(tmp_path / "cache", 1 << 30, memory.fetch)
    with pytest.raises(NotFoundError):
        await materialise(name, cache, tmp_path / "models")
    assert not (tmp_path / "models" / name.hex()).exists()
    memory.objects[lost] = held
    assert (await materialise(name, cache, tmp_path / "models") / "config.json").read_text() == "{}"


@pytest.mark.parametrize("path", ["/etc/passwd", "../up", "a/../../b", "a//b", "", "a/./b", "c:\\x", "nul\0"])
async def test_unsafe_names_are_refused(path: str) -> None:
    bad = Tree((TreeFile(path, 1, bytes(32)),)).to_bytes()
    with pytest.raises(ObjectCorruptError, match="unsafe path"):
        Tree.from_bytes(bad)


@pytest.mark.parametrize(
    "data",
    [b"", b"[]", b'{"kind":"tree","version":2,"files":[]}', b'{"kind":"tree","version":1,"files":[["a",1,"zz",0]]}'],
)
def test_other_objects_are_not_manifests(data: bytes) -> None:
    with pytest.raises(ObjectCorruptError):
        Tree.from_bytes(data)


def test_a_name_is_a_file_or_a_directory() -> None:
    files = (TreeFile("a", 1, bytes(32)), TreeFile("a/b", 1, bytes(32)))
    with pytest.raises(ObjectCorruptError, match="same path twice"):
        Tree.from_bytes(Tree(files).to_bytes())


async def test_links_stay_inside_unless_asked(tmp_path: Path) -> None:
    (tmp_path / "blob").write_text("weights")
    root = tmp_path / "model"
    root.mkdir()
    (root / "model.bin").symlink_to(tmp_path / "blob")
    with pytest.raises(InputError, match="leads out of"):
        await describe(root)
    assert (await describe(root, links="follow")).size == 7
    (root / "loop").symlink_to(root)
    with pytest.raises(InputError, match="cannot hold it twice"):
        await describe(root, links="follow")
    with pytest.raises(InputError, match="not a directory"):
        await describe(tmp_path / "absent")
    os.mkfifo(tmp_path / "pipe")
    (root / "loop").unlink()
    (root / "pipe").symlink_to(tmp_path / "pipe")
    with pytest.raises(InputError, match="neither a file nor a directory"):
        await describe(root, links="follow")


async def test_a_file_that_changes_while_it_is_uploaded_is_named(tmp_path: Path) -> None:
    class Changing(Memory):
        async def put_path(self, path: Path, *, known_id: bytes | None = None) -> bytes:
            path.write_text("and more")
            raise ObjectCorruptError("the uploaded bytes hash to something else")

    (tmp_path / "said.txt").write_text("some")
    with pytest.raises(InputError, match=r"said\.txt was changed"):
        await upload(tmp_path, Changing())


async def test_a_directory_is_not_uploaded_as_something_else_than_it_was(tmp_path: Path) -> None:
    memory = Memory()
    (tmp_path / "code.py").write_text("as it began")
    began = (await describe(tmp_path)).id
    (tmp_path / "code.py").write_text("edited")
    with pytest.raises(InputError, match="was changed before it was uploaded"):
        await upload(tmp_path, memory, expected=began)
    (tmp_path / "code.py").write_text("as it began")
    assert await upload(tmp_path, memory, expected=began) == began
    (tmp_path / "code.py").write_text("edited")
    assert await upload(tmp_path, memory, expected=began) == began  # it is there


async def test_those_who_wait_for_a_lock_leave_its_holder_threads(tmp_path: Path) -> None:
    """As many trials of one task do on a host with few processors, at the first of which its files are laid out."""
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(2))

    async def work() -> None:
        async with locked(tmp_path / "lock"):
            await asyncio.to_thread(sum, (1, 2))

    async with asyncio.timeout(20):
        await asyncio.gather(*(work() for _ in range(5)))
