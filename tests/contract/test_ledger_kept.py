"""Objects that results name in their data: referred to until they are let go, then freed, over SQLite and PostgreSQL."""

from __future__ import annotations

import dataclasses
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from ledger_rows import RUN, WORKER, Writer, result_rows
from rollout.model.errors import FencedError
from rollout.model.item import HANDED_OVER, AttemptEnd
from rollout.objects.digest import object_id
from rollout.objects.fs import FsObjectStore
from rollout_coordinator.core.step import HELD, AttemptRow, Evidence, HeldRow, Writes
from rollout_coordinator.freeing import free_let_go
from rollout_coordinator.ledger import Ledger

ONE, TWO, THREE = (bytes([n]) * 32 for n in (1, 2, 3))


async def keep(writer: Writer) -> None:
    await writer.run(3)
    rows = dataclasses.replace(result_rows([0, 2]), keeps={0: (ONE,), 1: (TWO, THREE)})
    await writer.commit(Writes(results=[rows]))


async def test_they_are_listed_and_referred_to_until_they_are_let_go(writer: Writer, ledger: Ledger) -> None:
    await keep(writer)
    assert await ledger.kept(RUN) == [(0, ONE, 0), (2, TWO, 0), (2, THREE, 0)]
    assert await ledger.referenced([ONE, TWO, THREE]) == {ONE, TWO, THREE}
    await writer.commit(Writes(released=[(1, 0)]))
    assert await ledger.kept(RUN) == [(2, TWO, 0), (2, THREE, 0)]
    await ledger.release(writer.fence.epoch, RUN, [2])
    assert await ledger.kept(RUN) == []
    assert await ledger.referenced([ONE, TWO, THREE]) == set()
    rows = await ledger.to_free(10)
    assert rows == [(1, 0, ONE, WORKER), (1, 2, TWO, WORKER), (1, 2, THREE, WORKER)]
    await ledger.freed(writer.fence.epoch, rows[:1])
    assert await ledger.to_free(10) == rows[1:] and await ledger.to_free(1) == rows[1:2]


async def test_what_is_spared_is_never_let_go(writer: Writer, ledger: Ledger) -> None:
    await writer.run(1)
    rows = dataclasses.replace(result_rows([0]), keeps={0: (ONE, TWO, THREE)}, spared=1)
    await writer.commit(Writes(results=[rows], released=[(1, 0)]))
    await ledger.release(writer.fence.epoch, RUN, [0])
    assert await ledger.kept(RUN) == [(0, THREE, 0)]
    assert await ledger.referenced([ONE, TWO, THREE]) == {THREE}
    assert [row[2] for row in await ledger.to_free(10)] == [ONE, TWO]


async def test_what_one_attempt_handed_over_is_let_go_alone(writer: Writer, ledger: Ledger) -> None:
    await writer.run(1)
    rows = [
        AttemptRow(1, 0, n, WORKER, AttemptEnd.RELEASED, HANDED_OVER, "", 1, left=Evidence(b"so far", (one,)))
        for n, one in ((1, ONE), (2, TWO))
    ]
    await writer.commit(Writes(attempts=rows))
    assert await ledger.kept(RUN) == [(0, ONE, 1), (0, TWO, 2)]
    await writer.commit(Writes(released_attempts=[(1, 0, 1)]))
    assert await ledger.kept(RUN) == [(0, TWO, 2)]
    # The result names what was handed over last: it is kept for that.
    result = dataclasses.replace(result_rows([0]), keeps={0: (TWO, THREE)})
    await writer.commit(Writes(results=[result], released_attempts=[(1, 0, 2)]))
    assert await ledger.kept(RUN) == [(0, TWO, 0), (0, THREE, 0)]


async def test_what_a_parent_keeps_for_its_children_is_let_go_one_by_one(writer: Writer, ledger: Ledger) -> None:
    await writer.run(1)
    await writer.commit(Writes(held=[HeldRow(1, 0, one, WORKER) for one in (ONE, TWO, THREE)]))
    assert await ledger.referenced([ONE, TWO, THREE]) == {ONE, TWO, THREE}
    assert await ledger.kept(RUN) == [], "no result names it"
    await writer.commit(Writes(released_held=[(1, 0, ONE)]))
    assert await ledger.to_free(10) == [(1, 0, ONE, WORKER)], "whose pin ends before there is a result"
    result = dataclasses.replace(result_rows([0]), keeps={0: (THREE,)})
    await writer.commit(Writes(results=[result], released_attempts=[(1, 0, HELD)], released_held=[(1, 0, THREE)]))
    assert await ledger.kept(RUN) == [(0, THREE, 0)]
    assert [row.object_id for row in await ledger.to_free(10)] == [ONE, TWO]


async def test_who_leads_no_longer_lets_nothing_go(writer: Writer, ledger: Ledger) -> None:
    await keep(writer)
    with pytest.raises(FencedError):
        await ledger.release(writer.fence.epoch - 1, RUN, [0, 2])
    assert len(await ledger.kept(RUN)) == 3
    with pytest.raises(FencedError):
        await ledger.freed(writer.fence.epoch - 1, [])


async def test_what_was_let_go_is_deleted_unless_somebody_needs_it(
    writer: Writer, ledger: Ledger, tmp_path: Path
) -> None:
    store = FsObjectStore(tmp_path / "objects")
    await store.open()
    loose, pinned, named = [await put(store, text) for text in (b"loose", b"pinned", b"named")]
    await store.pin([loose, pinned, named], WORKER, 3600)  # with which their worker stored them
    await store.pin([pinned], "another run", 3600)
    await writer.run(2)
    rows = dataclasses.replace(result_rows([0, 1]), keeps={0: (loose, pinned, named), 1: (named,)})
    await writer.commit(Writes(results=[rows], released=[(1, 0)]))
    forgotten: list[bytes] = []
    assert await free_let_go(store, ledger, writer.fence.epoch, forgotten.extend) == {loose}
    assert await store.has([loose, pinned, named]) == [False, True, True] and forgotten == [loose]
    assert await ledger.to_free(10) == [] and await ledger.kept(RUN) == [(1, named, 0)]
    await store.close()


async def put(store: FsObjectStore, data: bytes) -> bytes:
    async def pieces() -> AsyncIterator[bytes]:
        yield data

    name = object_id(data)
    await store.put(name, pieces(), len(data))
    return name


async def test_a_deleted_run_refers_to_nothing(writer: Writer, ledger: Ledger) -> None:
    await keep(writer)
    await writer.commit(Writes(deleted_runs=[RUN]))
    assert await ledger.referenced([ONE, TWO, THREE]) == set()
