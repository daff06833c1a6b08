"""Slices of a pack: by themselves where few are wanted, with the pack where much of it is."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from pathlib import Path

import pytest
from rollout.model.errors import NotFoundError, ObjectCorruptError
from rollout.model.item import Blob, ObjectSlice
from rollout.objects.cache import ObjectCache
from rollout.objects.digest import object_id
from rollout.objects.slices import ALONE_MAX, GAP_BYTES, RENT_BYTES, SliceReader

PACK = os.urandom(8 << 20)
NAME = object_id(PACK)
ROW = 16 << 10


class Host:
    """With a cache of its own; what it asks the store for is noted."""

    def __init__(self, directory: Path, stored: bytes = PACK) -> None:
        self.stored = {object_id(stored): stored}
        self.fetched = 0
        self.calls: list[list[tuple[int, int]]] = []
        self.at_once = self.most_at_once = 0
        self.cache = ObjectCache(directory, 1 << 30, self.fetch)
        self.slices = SliceReader(self.cache, self.read)

    async def fetch(self, name: bytes, path: Path) -> None:
        self.fetched += 1
        path.write_bytes(self.stored[name])

    async def read(self, name: bytes, parts: Sequence[tuple[int, int]]) -> list[bytes]:
        if name not in self.stored:
            raise NotFoundError(f"no object {name.hex()}")
        self.calls.append(list(parts))
        self.at_once += 1
        self.most_at_once = max(self.most_at_once, self.at_once)
        await asyncio.sleep(0)
        self.at_once -= 1
        return [self.stored[name][offset : offset + length] for offset, length in parts]

    async def rows(self, *numbers: int) -> list[Blob]:
        return await self.slices.take(NAME, [ObjectSlice(NAME, n * ROW, ROW) for n in numbers])


def row(number: int) -> bytes:
    return PACK[number * ROW : (number + 1) * ROW]


async def test_a_few_rows_travel_without_their_pack(tmp_path: Path) -> None:
    host = Host(tmp_path)
    assert await host.rows(3) == [row(3)]
    assert await host.rows(400, 7) == [row(400), row(7)]
    assert host.fetched == 0 and [[length for _, length in call] for call in host.calls] == [[ROW], [ROW, ROW]]
    assert await host.slices.read(ObjectSlice(NAME, 5 * ROW, 10)) == PACK[5 * ROW : 5 * ROW + 10]
    assert await host.slices.read(b"inline") == b"inline"
    assert host.fetched == 0


async def test_neighbours_are_read_in_one_go(tmp_path: Path) -> None:
    host = Host(tmp_path)
    assert await host.rows(12, 10, 11, 10) == [row(12), row(10), row(11), row(10)]
    assert host.calls == [[(10 * ROW, 3 * ROW)]]
    apart = 1 + GAP_BYTES // ROW
    assert await host.rows(20, 20 + apart, 21 + 2 * apart) == [row(20), row(20 + apart), row(21 + 2 * apart)]
    assert host.calls[1:] == [[(20 * ROW, (1 + apart) * ROW), ((21 + 2 * apart) * ROW, ROW)]]


async def test_who_wants_much_of_a_pack_fetches_it_once(tmp_path: Path) -> None:
    host = Host(tmp_path)
    alone = RENT_BYTES // ROW
    for number in range(alone):
        assert await host.rows(2 * number) == [row(2 * number)]
    assert host.fetched == 0
    slices = [ObjectSlice(NAME, ROW, ROW), ObjectSlice(NAME, 5 * ROW, ROW)]
    assert await host.slices.take(NAME, slices) == slices, "whoever wants them reads them in the cache"
    assert (await host.cache.path(NAME)).read_bytes() == PACK
    assert await host.rows(9) == [ObjectSlice(NAME, 9 * ROW, ROW)]
    assert host.fetched == 1 and len(host.calls) == alone


async def test_many_rows_at_once_fetch_their_pack_at_once(tmp_path: Path) -> None:
    host = Host(tmp_path)
    await host.rows(*range(100))
    assert host.fetched == 1 and not host.calls


async def test_large_slices_do_not_wait_in_memory(tmp_path: Path) -> None:
    host = Host(tmp_path)
    large = ObjectSlice(NAME, 0, ALONE_MAX + 1)
    assert await host.slices.take(NAME, [large]) == [large]
    assert await host.slices.read(large) == PACK[: ALONE_MAX + 1]
    assert host.fetched == 1 and not host.calls


async def test_what_another_process_of_the_host_fetched_is_not_read_again(tmp_path: Path) -> None:
    await Host(tmp_path).cache.path(NAME)
    host = Host(tmp_path)
    assert await host.rows(1) == [ObjectSlice(NAME, ROW, ROW)]
    assert host.fetched == 0 and not host.calls


async def test_a_slice_beyond_the_end(tmp_path: Path) -> None:
    short = PACK[:100]
    host = Host(tmp_path, short)
    name = object_id(short)
    with pytest.raises(ObjectCorruptError, match="shorter than the slice"):
        await host.slices.take(name, [ObjectSlice(name, 90, 20)])
    with pytest.raises(NotFoundError):
        await host.rows(1)


async def test_not_too_many_calls_at_once(tmp_path: Path) -> None:
    host = Host(tmp_path)
    await asyncio.gather(*[host.rows(n) for n in range(0, 500, 10)])
    assert len(host.calls) == 50 and 2 <= host.most_at_once <= 8
