"""The client against the real Objects server over mTLS, and against one that breaks."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import grpc.aio
import pytest
from objects_rig import Rig, raw
from rollout.model.errors import (
    AuthError,
    InputError,
    NotFoundError,
    ObjectCorruptError,
    ProtocolError,
    StorageFullError,
    UnavailableError,
)
from rollout.objects.cache import ObjectCache
from rollout.objects.digest import CHUNK, object_id
from rollout.objects.fs import FsObjectStore
from rollout.objects.remote import RemoteObjects
from rollout.objects.tree import materialise, upload
from rollout.security.roles import Peer
from rollout.wire.channel import CLIENT_OPTIONS
from rollout.wire.epoch import EpochGuard
from rollout.wire.errors import error_of
from rollout.wire.v1 import objects_pb2 as pb
from rollout_coordinator.objects_service import ObjectsService

BIG = os.urandom(3 * CHUNK + 12345)


async def test_round_trip(rig: Rig, tmp_path: Path) -> None:
    client = rig.client()
    name = await client.put(BIG)
    assert name == object_id(BIG)
    assert await client.get(name) == BIG
    assert await client.get(name, 5, 7) == BIG[5:12]
    assert await client.get(name, CHUNK - 1) == BIG[CHUNK - 1 :]
    assert await client.get(name, 3, 0) == b""
    (tmp_path / "file").write_bytes(BIG)
    assert await client.put_path(tmp_path / "file") == name
    await client.fetch(name, tmp_path / "copy")
    assert (tmp_path / "copy").read_bytes() == BIG
    assert await client.has([name, object_id(b"no")]) == [True, False]
    empty = await client.put(b"")
    assert await client.get(empty) == b""
    assert await rig.store.pinned([name, empty]) == {name, empty}
    with pytest.raises(NotFoundError):
        await client.get(object_id(b"no"))
    with pytest.raises(NotFoundError):
        await client.fetch(object_id(b"no"), tmp_path / "no")
    await client.close()


async def test_a_cut_stream_goes_on_where_it_stopped(rig: Rig) -> None:
    client = rig.client()
    name = await client.put(BIG)
    rig.faults.cut_after = [1, 0, 2]
    assert await client.get(name) == BIG
    assert rig.faults.offsets == [0, CHUNK, CHUNK, 3 * CHUNK]
    await client.close()


async def test_a_fetch_goes_on_after_its_process_died(rig: Rig, tmp_path: Path) -> None:
    name = await rig.client().put(BIG)
    (tmp_path / "copy.partial").write_bytes(BIG[: CHUNK + 5])
    client = rig.client()
    await client.fetch(name, tmp_path / "copy")
    assert rig.faults.offsets == [CHUNK + 5]
    assert (tmp_path / "copy").read_bytes() == BIG
    (tmp_path / "other.partial").write_bytes(b"damaged" + BIG[: CHUNK + 5])
    await client.fetch(name, tmp_path / "other")
    assert rig.faults.offsets[-1] == 0
    assert (tmp_path / "other").read_bytes() == BIG


async def test_what_is_there_is_not_sent_again(rig: Rig) -> None:
    client = rig.client()
    name = await client.put(b"small")
    assert await client.put(b"small") == name
    big = await client.put(BIG)

    async def pieces() -> AsyncGenerator[bytes]:
        for at in range(0, len(BIG), CHUNK):
            yield BIG[at : at + CHUNK]

    async def not_yet(ids: list[bytes]) -> list[bool]:
        return [False] * len(ids)

    client.has = not_yet  # type: ignore[method-assign]
    for _ in range(5):  # somebody else put it after we asked: the server answers before it has read all
        await client._put(big, len(BIG), pieces)
    await client.close()


async def test_an_expired_certificate_costs_a_new_channel(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    client = rig.client()
    name = await client.put(b"x")
    good, refused = rig.service._check_peer, [1]

    def check(context: Any) -> Peer:
        if refused:
            refused.pop()
            raise AuthError("expired")
        return good(context)

    monkeypatch.setattr(rig.service, "_check_peer", check)
    assert await client.get(name) == b"x"
    assert rig.opened == 2
    refused += [1, 1]  # a fresh channel is refused too: then it is final
    with pytest.raises(AuthError):
        await client.get(name)
    await client.close()


async def test_damaged_bytes_are_never_believed(rig: Rig, tmp_path: Path) -> None:
    client = rig.client()
    name = await client.put(BIG)
    rig.faults.damage = True
    with pytest.raises(ObjectCorruptError):
        await client.get(name)
    with pytest.raises(ObjectCorruptError):
        await client.fetch(name, tmp_path / "copy")
    assert [p.name for p in tmp_path.iterdir()] == ["store"]


@pytest.mark.parametrize("call", ["get", "read"])
async def test_a_part_of_a_damaged_object_is_not_given(rig: Rig, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    """A part cannot show that it is sound, so the server looks at the whole before it gives the first."""
    client = rig.client()
    name = await client.put(BIG)
    reads: list[tuple[int, int | None]] = []
    get = FsObjectStore.get

    def noted(self: FsObjectStore, object_id: bytes, offset: int = 0, length: int | None = None) -> Any:
        reads.append((offset, length))
        return get(self, object_id, offset, length)

    monkeypatch.setattr(FsObjectStore, "get", noted)
    assert await client.get(name, 10, 20) == BIG[10:30]
    assert reads == [(10, 20)], "it came through this server, and was looked at then"
    later = ObjectsService(rig.store, 0, check_peer=rig.service._check_peer)  # pyright: ignore[reportPrivateUsage]
    monkeypatch.setattr(rig.service, "_sound", later._sound)  # pyright: ignore[reportPrivateUsage]
    reads.clear()
    if call == "read":
        assert await client.read(name, [(9, 5)]) == [BIG[9:14]]
        assert reads == [(0, None)], "it was looked at before"
        reads.clear()
        monkeypatch.setattr(rig.service, "_sound", type(later._sound)(rig.store))  # pyright: ignore[reportPrivateUsage]
    assert await asyncio.gather(*[client.get(name, at, 5) for at in (1, 2, 3)]) == [
        BIG[at : at + 5] for at in (1, 2, 3)
    ]
    assert sorted(reads, key=str) == [(0, None), (1, 5), (2, 5), (3, 5)], "once"
    other = await client.put(os.urandom(50_000))
    path = rig.store.path_of(other)
    path.chmod(0o644)
    damaged = bytearray(path.read_bytes())
    damaged[40_000] ^= 1
    path.write_bytes(damaged)
    again = ObjectsService(rig.store, 0, check_peer=rig.service._check_peer)  # pyright: ignore[reportPrivateUsage]
    monkeypatch.setattr(rig.service, "_sound", again._sound)  # pyright: ignore[reportPrivateUsage]
    with pytest.raises(ObjectCorruptError, match="does not match its id"):
        await (client.read(other, [(10, 20)]) if call == "read" else client.get(other, 10, 20))
    assert not path.exists(), "out of the way of the next upload"


async def test_it_gives_up_in_time_when_nobody_answers() -> None:
    async def channel() -> grpc.aio.Channel:
        return grpc.aio.insecure_channel("127.0.0.1:1", options=CLIENT_OPTIONS)

    client = RemoteObjects(channel, retry_for_s=0.3)
    with pytest.raises(UnavailableError):
        await client.put(b"x")
    await client.close()


async def test_a_store_that_is_away_for_a_moment_costs_nothing(rig: Rig, tmp_path: Path) -> None:
    client = rig.client()
    name = await client.put(b"here")
    root = rig.store.path_of(name).parents[3]
    root.rename(tmp_path / "elsewhere")
    calls = [
        asyncio.create_task(call)
        for call in (client.get(name), client.read(name, [(0, 2)]), client.put(b"more"), client.add_pieces([b"some"]))
    ]
    await asyncio.sleep(0.2)
    assert not any(call.done() for call in calls)
    (tmp_path / "elsewhere").rename(root)
    got, parts, *_ = await asyncio.gather(*calls)
    assert got == b"here" and parts == [b"he"]
    await client.close()


async def test_epochs(rig: Rig) -> None:
    guard = EpochGuard()
    guard.check_peer(pb.HasReply(epoch=3))
    client = rig.client(guard=guard, retry_for_s=0.3)
    with pytest.raises(UnavailableError) as caught:
        try:
            await client.put(b"x")
        except Exception as e:
            raise UnavailableError(str(e)) from e
    assert "epoch 3" in str(caught.value)
    rig.service.epoch = 5
    await client.put(b"x")
    assert guard.current == 5
    rig.service.epoch = 4  # a deposed coordinator's server
    with pytest.raises(Exception, match="epoch"):
        await client.has([object_id(b"x")])
    await client.close()


@pytest.mark.parametrize(
    ("messages", "kind", "words"),
    [
        ([], ProtocolError, "must begin"),
        ([pb.PutUp(object_id=bytes(32), size=1)], ProtocolError, "no epoch"),
        ([pb.PutUp(epoch=0, object_id=b"short", size=1)], InputError, "32 bytes"),
        ([pb.PutUp(epoch=0, object_id=bytes(32), size=5 << 20)], InputError, "over the limit"),
        ([pb.PutUp(epoch=0, object_id=bytes(32), size=1, pin="x" * 999)], InputError, "holder of a pin"),
        ([pb.PutUp(epoch=0, object_id=bytes(32), size=1, chunk=b"x" * (CHUNK + 1))], ProtocolError, "at most"),
        ([pb.PutUp(epoch=0, object_id=bytes(32), size=1, chunk=b"x")], ObjectCorruptError, "hash to"),
        ([pb.PutUp(epoch=0, object_id=bytes(32), size=9, chunk=b"x")], ObjectCorruptError, "said 9 bytes"),
    ],
)
async def test_bad_uploads(rig: Rig, messages: list[pb.PutUp], kind: type[Exception], words: str) -> None:
    stub = await raw(rig)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stub.Put(iter(messages))
    error = error_of(caught.value)
    assert words in str(error)
    assert isinstance(error, kind | ProtocolError)
    assert await rig.client().put(b"another client is well") == object_id(b"another client is well")


async def test_a_stalled_upload_is_ended_and_leaves_nothing(rig: Rig, tmp_path: Path) -> None:
    stub = await raw(rig)
    call = stub.Put()
    await call.write(pb.PutUp(epoch=0, object_id=bytes(32), size=100, chunk=b"x"))
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    assert isinstance(error_of(caught.value), UnavailableError)
    assert list((tmp_path / "store" / "tmp").iterdir()) == []


async def test_full_disk_is_not_retried(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(size: int) -> None:
        raise StorageFullError("full; free space")

    monkeypatch.setattr(rig.store, "_check_room", full)
    with pytest.raises(StorageFullError, match="free space"):
        await rig.client().put(b"x")


async def test_the_file_that_is_uploaded_goes_away(rig: Rig, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        await rig.client().put_path(tmp_path / "absent")


async def test_a_model_directory_travels(rig: Rig, tmp_path: Path) -> None:
    source = tmp_path / "model"
    source.mkdir()
    (source / "weights.bin").write_bytes(BIG)
    (source / "config.json").write_text("{}")
    client = rig.client()
    name = await upload(source, client)
    cache = ObjectCache(tmp_path / "cache", 1 << 30, client.fetch)
    made = await materialise(name, cache, tmp_path / "models")
    assert (made / "weights.bin").read_bytes() == BIG
