"""`map` over functions of a millisecond, beside `concurrent.futures.ProcessPoolExecutor` with as many processes; and over
an `async def` of 20 ms, beside bare asyncio with as many rows at once.

The pool loses everything with its first crash and keeps nothing; here every row is in the ledger before it runs and its
result before it is seen. Both start warm and get the same rows. The pool is measured as it comes (a row at a time) and
with chunks of 64; the target is of the first. Run: python tests/bench/report.py --only map
"""

from __future__ import annotations

import asyncio
import multiprocessing
import statistics
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor

import map_functions
import rollout
from measure import Row, spread

PROCESSES = 2
AT_ONCE = 16


def seconds(call: Callable[[], list[int]], rows: int) -> float:
    began = time.perf_counter()
    assert call() == list(range(rows))
    return time.perf_counter() - began


def case(cluster: rollout.Cluster, pool: ProcessPoolExecutor, name: str, rows: int, repeats: int) -> Row:
    function = getattr(map_functions, name)
    work = range(rows)
    ways: dict[str, Callable[[], list[int]]] = {
        "pool": lambda: list(pool.map(function, work)),
        "chunks": lambda: list(pool.map(function, work, chunksize=64)),
        "ours": lambda: [outcome.result for outcome in cluster.map(function, work)],
    }
    found: dict[str, list[float]] = {way: [] for way in ways}
    for _ in range(repeats):
        for way, call in ways.items():
            found[way].append(seconds(call, rows))
    rates = {way: [rows / s for s in times] for way, times in found.items()}
    ratios = [pool_s / ours_s for pool_s, ours_s in zip(found["pool"], found["ours"], strict=True)]
    ratio = statistics.median(ratios)
    return Row(
        f"{rows:,} rows that {'wait' if name == 'wait' else 'compute'} 1 ms beside ProcessPoolExecutor({PROCESSES})",
        f"{spread(ratios)} x: {spread(rates['ours'], 0)} of {spread(rates['pool'], 0)} rows/s; "
        f"chunks of 64: {spread(rates['chunks'], 0)}",
        "≥0.8",
        ratio >= 0.8,
        {"ratio": ratio},
    )


def bare(rows: int) -> list[int]:
    """As many rows at once as both processes run, in one event loop that keeps nothing."""
    results = [-1] * rows

    async def drain(left: Iterator[int]) -> None:
        for row in left:
            results[row] = await map_functions.later(row)

    async def whole() -> None:
        left = iter(range(rows))
        await asyncio.gather(*[drain(left) for _ in range(PROCESSES * AT_ONCE)])

    asyncio.run(whole())
    return results


def async_case(cluster: rollout.Cluster, rows: int, repeats: int) -> Row:
    def ours() -> list[int]:
        outcomes = cluster.map(map_functions.later, range(rows), concurrency_per_process=AT_ONCE)
        return [outcome.result for outcome in outcomes]

    times = [(seconds(lambda: bare(rows), rows), seconds(ours, rows)) for _ in range(repeats)]
    ratios = [bare_s / ours_s for bare_s, ours_s in times]
    ratio = statistics.median(ratios)
    return Row(
        f"{rows:,} `async def` rows of 20 ms, {PROCESSES} x {AT_ONCE} at once, beside asyncio's {PROCESSES * AT_ONCE}",
        f"{spread(ratios)} x: {spread([rows / s for _, s in times], 0)} of {spread([rows / s for s, _ in times], 0)} rows/s",
        "≥0.8",
        ratio >= 0.8,
        {"ratio": ratio},
    )


def rows(quick: bool) -> list[Row]:
    count, repeats = (3_000, 2) if quick else (10_000, 3)
    # Not forked: this process has threads.
    with (
        ProcessPoolExecutor(PROCESSES, mp_context=multiprocessing.get_context("spawn")) as pool,
        rollout.local(workers=PROCESSES) as cluster,
    ):
        for name in ("wait", "work"):
            list(pool.map(getattr(map_functions, name), range(100)))
            list(cluster.map(getattr(map_functions, name), range(1000)))
        found = [case(cluster, pool, name, count, repeats) for name in ("wait", "work")]
        return [*found, async_case(cluster, 5_000, repeats)]
