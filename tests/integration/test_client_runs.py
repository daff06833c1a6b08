"""The Runs client against real coordinators over mTLS: packing, failover, errors, commands."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from itertools import islice
from pathlib import Path

import pytest
from coordinator_peers import FakeWorker, Held, item
from coordinator_places import Node, config, free_addr, spawn
from rollout.client import Runs, connection
from rollout.client.runs import from_seq, new_ulid
from rollout.model.errors import (
    AuthError,
    ConfigError,
    ConflictError,
    InputError,
    NotFoundError,
    StateError,
    UnavailableError,
)
from rollout.model.item import ItemSpec, NewItem, ObjectSlice
from rollout.model.run import RunSpec
from rollout.workloads.commit import CommitEntry


def payload(n: int) -> bytes:
    """Every seventh is too large to travel inline."""
    return f"row {n} ".encode() * (1200 if n % 7 == 0 else 1)


def rows(count: int) -> Iterator[NewItem]:
    return (item(payload(n), n) for n in range(count))


def spec(**fields: object) -> RunSpec:
    return RunSpec(**({"run_id": new_ulid(), "workload": "test", "config": b'{"a":1}'} | fields))  # type: ignore[arg-type]


def answer(held: Held) -> bytes | ObjectSlice:
    return held.payload if isinstance(held.payload, ObjectSlice) else b"done " + held.payload


@asynccontextmanager
async def cluster(directory: Path, *, workers: int = 1) -> AsyncIterator[tuple[Node, str]]:
    address = free_addr()
    node = await spawn(config(directory, address))
    fakes: list[FakeWorker] = []
    try:
        await node.event("coordinator_ready")
        fakes = [await FakeWorker([address], directory / "tls", work=answer).start() for _ in range(workers)]
        yield node, address
    finally:
        for fake in fakes:
            await fake.stop()
        await node.kill()


async def collect(runs: Runs, run_id: str) -> list[CommitEntry]:
    found: list[CommitEntry] = []
    async for page in runs.watch(run_id, payloads=True):
        found += page.entries
    return found


def check(found: list[CommitEntry], count: int) -> None:
    assert [entry.position for entry in found] == list(range(count))
    assert [entry.seq for entry in found] == list(range(count))
    assert [entry.payload for entry in found] == [payload(n) for n in range(count)]
    assert all(entry.data == (payload(n) if n % 7 == 0 else b"done " + payload(n)) for n, entry in enumerate(found))
    assert all(len(entry.id) == 32 and entry.worker for entry in found)


async def test_submit_and_watch_with_large_payloads(tmp_path: Path) -> None:
    async with cluster(tmp_path) as (_, address), await Runs.connect([address], tls_dir=tmp_path / "tls") as runs:
        seen: list[int] = []
        run = spec()
        assert await runs.submit(run, from_seq(rows(2000)), progress=seen.append) == 2000
        assert seen == sorted(seen) and seen[-1] == 2000
        check(await collect(runs, run.run_id), 2000)
        status = await runs.get(run.run_id)
        assert (status.state, status.done) == ("completed", 2000)
        assert await runs.submit(run, from_seq(rows(2000))) == 2000  # again: nothing to do
        assert not runs._objects, "a client that lives long keeps nothing of the runs it is done with"


async def test_a_coordinator_killed_while_submitting_and_watching(tmp_path: Path) -> None:
    async with cluster(tmp_path) as (node, address):
        half = asyncio.Event()

        def progress(durable: int) -> None:
            if durable >= 5000:
                half.set()

        async with await Runs.connect([address], tls_dir=tmp_path / "tls") as runs:
            run = spec()
            submitting = asyncio.create_task(runs.submit(run, from_seq(rows(20_000)), progress=progress))
            collecting: asyncio.Task[list[CommitEntry]] | None = None
            await half.wait()
            collecting = asyncio.create_task(collect(runs, run.run_id))
            await node.kill()
            again = await spawn(config(tmp_path, address))
            try:
                assert await submitting == 20_000
                check(await collecting, 20_000)
            finally:
                await again.kill()


async def test_the_leader_is_found_among_several_addresses(tmp_path: Path) -> None:
    async with cluster(tmp_path) as (_, address):
        addresses = [free_addr(), address, free_addr()]
        async with await Runs.connect(addresses, tls_dir=tmp_path / "tls") as runs:
            assert list(await runs.list()) == []
            assert runs.address == address


async def test_calls_that_fail_together_move_on_once(tmp_path: Path) -> None:
    """With two addresses, two streams that each moved on would come back to the dead coordinator for ever."""
    async with cluster(tmp_path) as (_, address):
        dead = free_addr()
        async with await Runs.connect([dead, address], tls_dir=tmp_path / "tls", patience_s=20) as runs:
            at_once = await asyncio.gather(*(runs.list() for _ in range(4)))
            assert at_once == [[]] * 4 and runs.address == address
            turn = runs._connection.turn
            for _ in range(2):
                runs._connection.leave(turn)
            assert runs.address == dead


async def test_nobody_there_is_said_in_time(tmp_path: Path) -> None:
    async with cluster(tmp_path):
        pass
    troubles: list[str] = []
    runs = await Runs.connect(
        [free_addr()],
        tls_dir=tmp_path / "tls",
        patience_s=0.5,
        on_trouble=lambda error, _: troubles.append(str(error)),
    )
    async with runs:
        with pytest.raises(UnavailableError, match="refuses connections: no coordinator listens there"):
            await runs.list()
    assert troubles


async def test_another_authority_is_refused(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    async with (
        cluster(tmp_path / "b", workers=0),
        cluster(tmp_path / "a") as (_, address),
        await Runs.connect([address], tls_dir=tmp_path / "b" / "tls") as runs,
    ):
        with pytest.raises(AuthError, match="another cluster"):
            await runs.list()
    with pytest.raises(ConfigError, match="join --coordinator"):
        await Runs.connect(["127.0.0.1:1"], tls_dir=tmp_path / "none")


async def test_errors_keep_their_kind(tmp_path: Path) -> None:
    async with (
        cluster(tmp_path, workers=0) as (_, address),
        await Runs.connect([address], tls_dir=tmp_path / "tls") as runs,
    ):
        run = spec()
        assert (await runs.open(run)).submitted == 0
        await runs.submit(run, from_seq(rows(10)), seal=False)
        with pytest.raises(ConflictError):
            await runs.open(spec(run_id=run.run_id, config=b'{"a":2}'))
        with pytest.raises(NotFoundError):
            await runs.get(new_ulid())

        def broken(start: int) -> Iterator[NewItem]:
            assert start == 10
            yield from (item(payload(n), n) for n in range(start, start + 700))
            raise InputError("file.jsonl:711: the file changed")

        with pytest.raises(InputError, match="711"):
            await runs.submit(run, broken)
        assert (await runs.get(run.run_id)).sealed is False


async def test_a_client_hears_what_a_run_waits_for(tmp_path: Path) -> None:
    """And is told at once of an executor that is no name."""
    async with cluster(tmp_path) as (node, address), await Runs.connect([address], tls_dir=tmp_path / "tls") as runs:
        await node.event("worker_ready")
        run = spec()
        await runs.submit(run, from_seq(item(b"x", n, ItemSpec(executor="other")) for n in range(3)))
        waits = (await runs.get(run.run_id)).waits
        assert [(wait.reason, wait.items, wait.impossible) for wait in waits] == [("executor", 3, True)]
        with pytest.raises(InputError, match="is no name"):
            await runs.submit(spec(), from_seq(iter([item(b"x", 0, ItemSpec(executor="no name"))])))


async def test_commands(tmp_path: Path) -> None:
    async with (
        cluster(tmp_path, workers=0) as (_, address),
        await Runs.connect([address], tls_dir=tmp_path / "tls") as runs,
    ):
        run = spec(name="mine")
        await runs.submit(run, from_seq(rows(10)))
        assert (await runs.command(run.run_id, "pause")).state == "paused"
        assert (await runs.command(run.run_id, "resume")).state == "running"
        assert [(s.spec.run_id, s.spec.name) for s in await runs.list(["running"])] == [(run.run_id, "mine")]
        with pytest.raises(StateError):
            await runs.delete(run.run_id)
        for place in ([1 << 63], [1 << 63, 0]):
            with pytest.raises(InputError):
                await runs.item(run.run_id, place)
        await runs.events(run.run_id, after=1 << 63)
        await runs.output(run.run_id, after=1 << 63)
        killed = await runs.command(run.run_id, "kill", reason="test")
        assert killed.state == "killed"
        pages = [page async for page in runs.watch(run.run_id, status_only=True)]
        assert pages[-1].last and pages[-1].status is not None and pages[-1].status.state == "killed"
        assert (await runs.delete(run.run_id)).items == 10
        assert (await runs.workers()).leader
        with pytest.raises(NotFoundError):
            await runs.worker_command(new_ulid(), "drain")


async def test_streams_outlive_the_channel_they_began_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A certificate renewed by one call closes the channel under the others, which go on with the next."""
    monkeypatch.setattr(connection, "RETIRE_GRACE_S", 0.1)
    async with (
        cluster(tmp_path) as (_, address),
        await Runs.connect([address], tls_dir=tmp_path / "tls", lifetime_s=4.0) as runs,
    ):
        run = spec()
        await runs.submit(run, from_seq(rows(50)), seal=False)
        watching = asyncio.create_task(collect(runs, run.run_id))

        def slowly(seq: int) -> Iterator[NewItem]:
            for row in islice(rows(200), seq, None):
                time.sleep(0.02)
                yield row

        submitting = asyncio.create_task(runs.submit(run, slowly))
        async with asyncio.timeout(90):
            while runs._connection.credentials.generation < 2:
                await asyncio.sleep(0.2)
                await runs.get(run.run_id)
            assert await submitting == 200
            check(await watching, 200)
        assert runs.address == address


async def test_a_directory_travels(tmp_path: Path) -> None:
    (tmp_path / "model" / "sub").mkdir(parents=True)
    (tmp_path / "model" / "config.json").write_text("{}")
    (tmp_path / "model" / "sub" / "weights.bin").write_bytes(bytes(range(256)) * 8192)
    async with (
        cluster(tmp_path, workers=0) as (_, address),
        await Runs.connect([address], tls_dir=tmp_path / "tls") as runs,
    ):
        run = spec()
        await runs.open(run)
        told: list[tuple[int, int]] = []
        manifest = await runs.upload_tree(
            run.run_id, tmp_path / "model", lambda done, total: told.append((done, total))
        )
        assert told[-1][0] == told[-1][1] > 2_000_000
        await runs.download(run.run_id, manifest, tmp_path / "manifest.json")
        assert b"sub/weights.bin" in (tmp_path / "manifest.json").read_bytes()
