"""`map` over functions of a millisecond, beside `concurrent.futures.ProcessPoolExecutor` with as many processes.

The pool loses everything with its first crash and keeps nothing; here every row is in the ledger before it runs and its
result before it is seen. Both start warm and get the same rows. The pool is measured as it comes (a row at a time) and
with chunks of 64; the target is of the first. Run: python tests/bench/report.py --only map
"""

from __future__ import annotations

import multiprocessing
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor

import map_functions
import rollout
from measure import Row, spread

PROCESSES = 2


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
        f"`map` of a function that {'waits' if name == 'wait' else 'computes'} for 1 ms, {PROCESSES} workers, "
        f"{rows:,} rows, durable, beside ProcessPoolExecutor({PROCESSES})",
        f"{spread(ratios)} of its rows/s: ours {spread(rates['ours'], 0)}, the pool {spread(rates['pool'], 0)} "
        f"({spread(rates['chunks'], 0)} in chunks of 64)",
        "≥ 0.8",
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
        return [case(cluster, pool, name, count, repeats) for name in ("wait", "work")]
