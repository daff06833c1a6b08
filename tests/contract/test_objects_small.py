"""Small calls: what many add to one object, and parts of objects."""

from __future__ import annotations

import asyncio
import os

import grpc.aio
import pytest
from objects_rig import Rig, raw
from rollout.model.errors import (
    FencedError,
    InputError,
    NotFoundError,
    ObjectCorruptError,
    ProtocolError,
    StorageFullError,
)
from rollout.model.item import ObjectSlice
from rollout.objects.digest import CHUNK, object_id
from rollout.objects.pack import ADD_MAX
from rollout.wire.errors import error_of
from rollout.wire.v1 import objects_pb2 as pb

BIG = os.urandom(3 * CHUNK + 12345)


async def test_what_many_add_shares_objects(rig: Rig) -> None:
    clients = [rig.client(pin=f"worker-{n}") for n in range(5)]
    blobs = [os.urandom(5000 + n) for n in range(5)]
    places = await asyncio.gather(*(c.add_pieces([b[:9], b[9:]]) for c, b in zip(clients, blobs, strict=True)))
    names = {place.object_id for place in places}
    assert len(names) < len(blobs), "the first goes at once, the others together"
    assert [await clients[0].get(*place) for place in places] == blobs
    assert await rig.store.pinned(list(names)) == names
    large = await clients[0].add_pieces([bytes(ADD_MAX), b"1"])
    assert large == ObjectSlice(object_id(bytes(ADD_MAX) + b"1"), 0, ADD_MAX + 1)
    for client in clients:
        await client.close()


@pytest.mark.parametrize(
    ("data", "digest", "epoch", "kind"),
    [
        pytest.param(b"x", object_id(b"y"), 0, ObjectCorruptError, id="damaged"),
        pytest.param(b"x", b"", 0, ObjectCorruptError, id="without-digest"),
        pytest.param(bytes(ADD_MAX + 1), object_id(bytes(ADD_MAX + 1)), 0, InputError, id="large"),
        pytest.param(b"x", object_id(b"x"), 1, FencedError, id="newer-leader"),
        pytest.param(b"x", object_id(b"x"), None, ProtocolError, id="no-epoch"),
    ],
)
async def test_what_is_refused(rig: Rig, data: bytes, digest: bytes, epoch: int | None, kind: type[Exception]) -> None:
    stub = await raw(rig)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stub.Add(pb.AddRequest(epoch=epoch, data=data, digest=digest))
    assert isinstance(error_of(caught.value), kind)
    assert [meta async for meta in rig.store.list()] == []


async def test_a_full_store_is_told_to_all_who_added(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(size: int) -> None:
        raise StorageFullError("full; free space")

    client = rig.client()
    with monkeypatch.context() as patch:
        patch.setattr(rig.store, "_check_room", full)
        told = await asyncio.gather(client.add_pieces([b"a"]), client.add_pieces([b"b"]), return_exceptions=True)
    assert [type(one) for one in told] == [StorageFullError, StorageFullError]
    place = await client.add_pieces([b"c"])
    assert await client.get(*place) == b"c"
    await client.close()


async def test_parts_of_an_object(rig: Rig) -> None:
    client = rig.client()
    name = await client.put(BIG)
    many = [(n * 100, 10) for n in range(1000)]
    for wanted in ([], [(3, 5)], [(9, CHUNK + 1), (0, 2 * CHUNK), (7, 0)], many):
        assert await client.read(name, wanted) == [BIG[at : at + length] for at, length in wanted]
    assert await client.read(name, [(len(BIG) - 3, 10), (len(BIG) + 1, 1)]) == [BIG[-3:], b""]
    with pytest.raises(NotFoundError):
        await client.read(object_id(b"no"), [(0, 1)])
    await client.close()


@pytest.mark.parametrize(
    ("request_", "kind"),
    [
        pytest.param(pb.ReadRequest(object_id=bytes(32)), ProtocolError, id="no-epoch"),
        pytest.param(pb.ReadRequest(epoch=0, object_id=b"short"), InputError, id="id"),
        pytest.param(pb.ReadRequest(epoch=0, object_id=bytes(32), offset=[1]), InputError, id="no-length"),
        pytest.param(
            pb.ReadRequest(epoch=0, object_id=bytes(32), offset=[0, 0], length=[CHUNK, 1]), InputError, id="large"
        ),
        pytest.param(
            pb.ReadRequest(epoch=0, object_id=bytes(32), offset=[(1 << 64) - 1], length=[1]), InputError, id="far"
        ),
        pytest.param(
            pb.ReadRequest(epoch=0, object_id=bytes(32), offset=[0] * 300, length=[1] * 300), InputError, id="many"
        ),
    ],
)
async def test_reads_that_are_refused(rig: Rig, request_: pb.ReadRequest, kind: type[Exception]) -> None:
    stub = await raw(rig)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stub.Read(request_)
    assert isinstance(error_of(caught.value), kind)
