"""What every key-value storage must do; run over SQLite and PostgreSQL."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
from rollout.config.settings import StorageSection
from rollout.model.errors import InputError, NotFoundError, StateError, TransactionConflictError
from rollout.storage import Change, Storage, kv, open_storage
from rollout.storage.kv import upper_bound

ODD_KEYS = [
    "",
    "a",
    "a%b",
    "a_b",
    "axb",
    "a\\b",
    "a/b",
    "ab",
    "é",
    "éa",
    "zz",
    "\U0001f600",
    "\uffff",
    "a\nb",
    "A",
    "_",
]


@pytest.fixture
async def storage(storage_section: StorageSection) -> AsyncIterator[Storage]:
    opened = open_storage(storage_section)
    await opened.open()
    yield opened
    await opened.close()


@pytest.fixture
async def other(storage_section: StorageSection, storage: Storage) -> AsyncIterator[Storage]:
    """Another process on the same database."""
    opened = open_storage(storage_section)
    await opened.open()
    yield opened
    await opened.close()


async def test_put_get_delete(storage: Storage) -> None:
    assert await storage.get("n", "k") is None
    await storage.put("n", "k", b"1")
    await storage.put("n", "k", b"\x00\xff")
    assert await storage.get("n", "k") == b"\x00\xff"
    assert await storage.get("other", "k") is None
    assert await storage.delete("n", "k")
    assert not await storage.delete("n", "k")
    assert await storage.get("n", "k") is None


@pytest.mark.parametrize(
    ("stored", "expected", "value", "swapped"),
    [
        (None, None, b"new", True),
        (None, b"x", b"new", False),
        (b"old", None, b"new", False),
        (b"old", b"old", b"new", True),
        (b"old", b"olD", b"new", False),
        (b"old", b"old", None, True),
        (b"", b"", b"new", True),
        (b"", None, b"new", False),
        (None, None, None, True),
    ],
)
async def test_compare_and_swap(
    storage: Storage, stored: bytes | None, expected: bytes | None, value: bytes | None, swapped: bool
) -> None:
    if stored is not None:
        await storage.put("n", "k", stored)
    assert await storage.cas("n", "k", expected, value) is swapped
    assert await storage.get("n", "k") == (value if swapped else stored)


async def test_one_of_many_swaps_wins(storage: Storage, other: Storage) -> None:
    stores = [storage, other] * 10
    won = await asyncio.gather(*(store.cas("n", "k", None, b"%d" % n) for n, store in enumerate(stores)))
    assert sum(won) == 1
    assert await storage.get("n", "k") == b"%d" % won.index(True)


async def test_scan_is_in_byte_order(storage: Storage) -> None:
    for key in ODD_KEYS:
        await storage.put("n", key, key.encode())
    await storage.put("n2", "a", b"elsewhere")
    found = await storage.scan("n")
    assert found == [(key, key.encode()) for key in sorted(ODD_KEYS, key=str.encode)]


@pytest.mark.parametrize("prefix", ["a", "a%", "a_", "é", "\U0001f600", "\uffff", "A", "nothing", "a\\"])
async def test_scan_by_prefix_takes_it_literally(storage: Storage, prefix: str) -> None:
    for key in ODD_KEYS:
        await storage.put("n", key, b"")
    expected = sorted((key for key in ODD_KEYS if key.startswith(prefix)), key=str.encode)
    assert [key for key, _ in await storage.scan("n", prefix)] == expected
    assert [key for key, _ in await storage.scan("n", prefix, limit=1)] == expected[:1]


@pytest.mark.parametrize(
    ("prefix", "bound"),
    [("", None), ("a", "b"), ("a\U0010ffff", "b"), ("\U0010ffff", None), ("\ud7ff", "\ue000"), ("\x7f", "\x80")],
)
def test_the_bound_above_a_prefix(prefix: str, bound: str | None) -> None:
    assert upper_bound(prefix) == bound


@pytest.mark.parametrize("key", ["a\x00b", "\ud800"])
async def test_keys_that_not_both_databases_hold(storage: Storage, key: str) -> None:
    with pytest.raises(InputError):
        await storage.put("n", key, b"")
    with pytest.raises(InputError):
        await storage.scan("n", key)


# ---- transactions


async def test_a_transaction_commits_all_its_writes(storage: Storage) -> None:
    await storage.put("n", "old", b"0")
    async with storage.transaction() as txn:
        await txn.put("n", "a", b"1")
        assert await txn.delete("n", "old")
        assert not await txn.delete("n", "absent")
        assert await txn.cas("n", "b", None, b"2")
        assert not await txn.cas("n", "b", None, b"3")
        assert await storage.get("n", "a") is None
    assert await storage.scan("n") == [("a", b"1"), ("b", b"2")]


async def test_an_exception_rolls_back(storage: Storage) -> None:
    revision = await storage.revision()
    with pytest.raises(KeyError):
        async with storage.transaction() as txn:
            await txn.put("n", "a", b"1")
            raise KeyError
    assert await storage.get("n", "a") is None
    assert await storage.revision() == revision


async def test_a_transaction_sees_its_own_writes(storage: Storage) -> None:
    for key in "abc":
        await storage.put("n", key, b"0")
    async with storage.transaction() as txn:
        await txn.put("n", "b", b"1")
        await txn.put("n", "aa", b"1")
        await txn.delete("n", "a")
        assert await txn.get("n", "a") is None
        assert await txn.get("n", "b") == b"1"
        assert await txn.scan("n") == [("aa", b"1"), ("b", b"1"), ("c", b"0")]
        assert await txn.scan("n", limit=2) == [("aa", b"1"), ("b", b"1")]


async def test_transactions_of_one_process_take_turns(storage: Storage) -> None:
    await storage.put("n", "count", b"0")

    async def add() -> None:
        async with storage.transaction() as txn:
            await txn.put("n", "count", b"%d" % (int(await txn.get("n", "count") or b"") + 1))

    await asyncio.gather(*(add() for _ in range(20)))
    assert await storage.get("n", "count") == b"20"


@pytest.mark.parametrize("read", ["get", "scan"])
async def test_what_another_process_changed_fails_the_transaction(storage: Storage, other: Storage, read: str) -> None:
    with pytest.raises(TransactionConflictError):
        async with storage.transaction() as txn:
            if read == "get":
                await txn.get("n", "k")
            else:
                await txn.scan("n")
            await other.put("n", "k", b"theirs")
            await txn.put("n", "mine", b"1")
    assert await storage.get("n", "mine") is None


async def test_write_skew_is_not_possible(storage: Storage, other: Storage) -> None:
    """Each takes the other's key as a reason to go off duty; one of them must lose."""
    await storage.put("duty", "a", b"on")
    await storage.put("duty", "b", b"on")
    with pytest.raises(TransactionConflictError):
        async with storage.transaction() as one:
            assert len(await one.scan("duty")) == 2
            async with other.transaction() as two:
                assert len(await two.scan("duty")) == 2
                await two.delete("duty", "b")
            await one.delete("duty", "a")
    assert await storage.scan("duty") == [("a", b"on")]


async def test_a_transaction_is_over_after_its_block(storage: Storage) -> None:
    async with storage.transaction() as txn:
        pass
    with pytest.raises(StateError):
        await txn.put("n", "a", b"")


# ---- watch


async def take(watch: AsyncIterator[Change], n: int) -> list[Change]:
    return [await asyncio.wait_for(anext(watch), 60) for _ in range(n)]


async def test_watch_sees_commits_in_their_order(storage: Storage) -> None:
    start = await storage.revision()
    watch = storage.watch("n", after=start)
    async with storage.transaction() as txn:
        await txn.put("n", "b", b"1")
        await txn.put("n", "a", b"2")
    await storage.delete("n", "b")
    changes = await take(watch, 3)
    assert [(c.key, c.value) for c in changes] == [("b", b"1"), ("a", b"2"), ("b", None)]
    assert [c.revision for c in changes] == [start + 1, start + 1, start + 2]


async def test_watch_never_sees_what_was_rolled_back(storage: Storage) -> None:
    watch = storage.watch("n", after=await storage.revision())
    with pytest.raises(KeyError):
        async with storage.transaction() as txn:
            await txn.put("n", "gone", b"1")
            raise KeyError
    assert not await storage.cas("n", "gone", b"x", b"y")
    assert not await storage.delete("n", "gone")
    await storage.put("n", "kept", b"1")
    assert [c.key for c in await take(watch, 1)] == ["kept"]


@pytest.mark.parametrize("prefix", ["a%", "a_", "é"])
async def test_watch_by_prefix(storage: Storage, prefix: str) -> None:
    watch = storage.watch("n", prefix, after=await storage.revision())
    for key in ("ax", "a%1", "a_1", "é1", "e"):
        await storage.put("n", key, b"")
    await storage.put("other", prefix, b"")
    await storage.put("n", f"{prefix}end", b"")
    assert [c.key for c in await take(watch, 2)] == [f"{prefix}1", f"{prefix}end"]


async def test_a_waiting_watcher_hears_of_another_process(storage: Storage, other: Storage) -> None:
    watch = storage.watch("n", after=await storage.revision())
    waiting = asyncio.ensure_future(anext(watch))
    await other.put("n", "k", b"theirs")
    assert (await asyncio.wait_for(waiting, 60)).value == b"theirs"


async def test_watch_without_a_revision_begins_now(storage: Storage) -> None:
    await storage.put("n", "before", b"")
    watch = storage.watch("n")
    waiting = asyncio.ensure_future(anext(watch))
    while not waiting.done():
        await storage.put("n", "after", b"")
        await asyncio.sleep(0)
    assert waiting.result().key == "after"


async def test_every_watcher_gets_every_change(storage: Storage) -> None:
    start = await storage.revision()
    watches = [storage.watch("n", after=start) for _ in range(3)]
    for n in range(5):
        await storage.put("n", str(n), b"")
    for watch in watches:
        assert [c.key for c in await take(watch, 5)] == ["0", "1", "2", "3", "4"]


async def test_a_watcher_that_comes_too_late_is_told(storage: Storage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv, "KEEP_REVISIONS", 2)
    monkeypatch.setattr(kv, "PRUNE_EVERY", 1)
    for n in range(5):
        await storage.put("n", str(n), b"")
    with pytest.raises(NotFoundError, match="scan again"):
        await anext(storage.watch("n", after=0))
    assert (await take(storage.watch("n", after=4), 1))[0].key == "4"


async def test_closing_ends_the_watchers(storage: Storage) -> None:
    watch = storage.watch("n", after=await storage.revision())
    waiting = asyncio.ensure_future(anext(watch))
    await storage.put("n", "k", b"")
    await waiting
    ending = asyncio.ensure_future(anext(watch))
    await asyncio.sleep(0)
    await storage.close()
    with pytest.raises(StopAsyncIteration):
        await asyncio.wait_for(ending, 60)


async def test_it_is_all_there_after_reopening(storage: Storage, storage_section: StorageSection) -> None:
    await storage.put("n", "k", b"v")
    await storage.close()
    again = open_storage(storage_section)
    await again.open()
    try:
        assert await again.get("n", "k") == b"v"
        await again.ping()
    finally:
        await again.close()
