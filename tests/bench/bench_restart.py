"""A coordinator that starts on a ledger of a million items, of which 100,000 are open, after its predecessor crashed."""

from __future__ import annotations

import asyncio
import statistics
import time
from pathlib import Path

from cluster import Cluster, Node
from ledger_rows import Writer
from measure import NoPostgresError, Row, directory, peak_mib, postgres, rss_mib, spread
from rollout.client import Runs
from rollout.client.runs import new_ulid
from rollout.model.item import DEFAULT_SPEC, Outcome
from rollout.model.run import RunSpec, RunState
from rollout.model.worker import Inventory, WorkerState
from rollout_coordinator.core.events import Keys
from rollout_coordinator.core.step import (
    AssignmentRow,
    ItemRows,
    LogRow,
    ResultRows,
    RunRow,
    SpecRow,
    WorkerRow,
    Writes,
)
from rollout_coordinator.ledger import Ledger

CHUNK = 5_000
BATCH = 256  # items of an assignment
WORKERS = 20


async def fill(ledger: Ledger, total: int, open_items: int, in_flight: int) -> str:
    """A run whose last `open_items` have no result; the first `in_flight` of these are assigned to lost workers."""
    await ledger.open()
    try:
        writer = Writer(ledger)
        await writer.lead()
        run, done, now = new_ulid(), total - open_items, int(time.time() * 1000)
        workers = [new_ulid() for _ in range(WORKERS)]
        first = Writes()
        first.runs[run] = RunRow(RunSpec(run, "script", b"{}"), RunState.RUNNING, "", 1, now, now, 0)
        first.specs.append(SpecRow(run, 0, DEFAULT_SPEC))
        for worker in workers:
            first.workers[worker] = WorkerRow(worker, "host", Inventory(), WorkerState.READY, now, 0, "")
        await writer.commit(first)
        payload, result = b"x" * 256, b"y" * 64
        for at in range(0, total, CHUNK):
            n = min(CHUNK, total - at)
            writes = Writes()
            ids = [s.to_bytes(32, "big") for s in range(at, at + n)]
            writes.items.append(ItemRows(1, at, ids, [payload] * n, [0] * n))
            m = max(0, min(n, done - at))
            if m:
                writes.results.append(
                    ResultRows(
                        1, list(range(at, at + m)), [1] * m, [Outcome.DONE] * m, [result] * m, {}, [5] * m, [1] * m,
                        [1] * m, workers[0], now,
                    )
                )  # fmt: skip
            await writer.commit(writes)
        last = Writes()
        # The next leader counts from these: written with the last batch, as the coordinator does with every one.
        last.logs[1] = LogRow(1, run, 0, 0, total, True, done, done, 0, 0, 0, done, 0, 0, 0, done, done)
        for number, at in enumerate(range(done, done + in_flight, BATCH)):
            seqs = list(range(at, min(at + BATCH, done + in_flight)))
            last.assignments.append(
                AssignmentRow(number + 1, workers[number % WORKERS], now, [Keys(1, seqs, [1] * len(seqs))])
            )
        await writer.commit(last)
    finally:
        await ledger.close()
    return run


async def counts(cluster: Cluster, node: Node, run: str) -> tuple[int, int]:
    async with await Runs.connect(cluster.addresses, tls_dir=node.directory / "data/tls") as client:
        status = await client.get(run)
        return status.submitted, status.cursor


def restarts(
    root: Path, url: str, total: int, open_items: int, in_flight: int, repeats: int
) -> tuple[list[float], list[float], list[float]]:
    """Seconds from exec to serving, peak MiB until then, and resident MiB two seconds later."""
    from rollout_coordinator.ledger.postgres import PostgresLedger
    from rollout_coordinator.ledger.sqlite import SqliteLedger

    seconds: list[float] = []
    peaks: list[float] = []
    settled: list[float] = []
    with Cluster(root, postgres_url=url) as cluster:
        node = cluster.add_coordinator(start=False)
        ledger = PostgresLedger(url, ttl=60.0) if url else SqliteLedger(node.directory / "data/rollout.db")
        run = asyncio.run(fill(ledger, total, open_items, in_flight))
        for n in range(repeats):
            began = time.monotonic()
            node.start()
            node.wait_event("coordinator_ready", 120, count=n + 1)
            seconds.append(time.monotonic() - began)
            assert node.process is not None
            if asyncio.run(counts(cluster, node, run)) != (total, total - open_items):
                raise RuntimeError("the restarted coordinator does not serve the run it was left")
            peaks.append(peak_mib(node.process.pid))
            time.sleep(2.0)
            settled.append(rss_mib(node.process.pid))
            node.kill()
    return seconds, peaks, settled


def line(what: str, seconds: list[float], peaks: list[float], settled: list[float], target: bool = True) -> Row:
    time_s, memory = statistics.median(seconds), max(*peaks, *settled)
    return Row(
        what,
        f"{spread(seconds)} s, peak {spread(peaks, 0)} MiB, settled {spread(settled, 0)}",
        "≤5 s, ≤300 MiB" if target else "",
        (time_s <= 5 and memory <= 300) if target else None,
        {"seconds": time_s, "mib": memory},
    )


def rows(quick: bool) -> list[Row]:
    total, open_items = (100_000, 10_000) if quick else (1_000_000, 100_000)
    repeats = 2 if quick else 3
    found: list[Row] = []
    what = f"{total:,} items, {open_items:,} {{}}"
    for in_flight, words in ((0, "pending"), (open_items, "at 20 lost workers")):
        with directory() as root:
            found.append(
                line(what.format(f"{words}, SQLite"), *restarts(root, "", total, open_items, in_flight, repeats))
            )
    try:
        with postgres() as url, directory() as root:
            total, open_items = total // 5, open_items // 5
            what = f"{total:,} items, {open_items:,} {{}}"
            words = "in flight, PostgreSQL (5 s: old lease)"
            found.append(line(what.format(words), *restarts(root, url, total, open_items, open_items, 1), target=False))
    except NoPostgresError as error:
        found.append(Row("the same on PostgreSQL", f"not run: {error}"))
    return found
