"""A step of the core alone with many runs, many workers, many prefixes, rows that come: milliseconds.

Run: python tests/bench/report.py --only scale
"""

from __future__ import annotations

import gc
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from measure import TESTS, Row
from rollout.model.item import ItemSpec
from rollout_coordinator.core.core import Core

sys.path.append(str(TESTS / "core"))
from core_world import FakeWorker, World

AT_ONCE = 4
ROWS = 256  # of one submit


class Timed:
    """A core that says how long each step took."""

    def __init__(self, core: Core) -> None:
        self._core = core
        self.ms: list[float] = []

    def handle(self, *asked: Any) -> Any:
        began = time.perf_counter()
        step = self._core.handle(*asked)
        self.ms.append((time.perf_counter() - began) * 1000)
        return step

    def __getattr__(self, name: str) -> Any:
        return getattr(self._core, name)


def runs(count: int) -> tuple[World, list[FakeWorker]]:
    """So many that are open, 10 items each, and 8 workers."""
    w = World()
    workers = [w.worker(f"w{n}", credit=64, capacity=(("slots", 64.0),)) for n in range(8)]
    for n in range(count):
        w.open(f"R{n}")
        w.submit(10, f"R{n}")
    return w, workers


def mixed(count: int) -> tuple[World, list[FakeWorker]]:
    """So many workers that are busy, and as many that are idle and can run nothing of it."""
    w = World(window_items=40 * count)
    busy = [w.worker(f"gpu{n}", credit=16, labels=(("kind", "gpu"),)) for n in range(count)]
    for n in range(count):
        w.worker(f"cpu{n}", credit=16, labels=(("kind", "cpu"),))
    w.open("R")
    w.submit(40 * count, specs=ItemSpec(require_labels=(("kind", "gpu"),)))
    return w, busy


def full(count: int) -> tuple[World, list[FakeWorker]]:
    """So many workers, all of them busy with one run."""
    w = World(window_items=40 * count)
    workers = [w.worker(f"w{n}", credit=16) for n in range(count)]
    w.open("R")
    w.submit(40 * count)
    return w, workers


def prefixes(count: int) -> tuple[World, list[FakeWorker]]:
    """So many, of which each worker has some warm; 100 workers."""
    w = World(window_items=20 * count)
    workers = [w.worker(f"w{n}", credit=16) for n in range(100)]
    w.open("R")
    specs = [ItemSpec(affinity=f"a{n}") for n in range(count)]
    w.submit(20 * count, specs=specs)
    return w, workers


def timed(w: World) -> list[float]:
    """Milliseconds of each step from now on."""
    core = Timed(w.core)
    w.core = core  # type: ignore[assignment]  # pyright: ignore[reportAttributeAccessIssue]
    gc.collect()
    return core.ms


def submits(count: int, most: int) -> list[float]:
    """So many workers with room, and rows that come a few at a time: milliseconds of each step."""
    w = World(window_items=200 * count)
    for n in range(count):
        w.worker(f"w{n}", credit=128)
    w.open("R")
    ms = timed(w)
    for n in range(min(most, count // 2)):
        w.submit(ROWS, first=n * ROWS)
    return ms


def steps(make: Callable[[int], tuple[World, list[FakeWorker]]], count: int, most: int) -> list[float]:
    """Milliseconds of each."""
    w, workers = make(count)
    ms = timed(w)
    for n in range(most):
        worker = workers[n % len(workers)]
        if worker.held:
            worker.finish(*list(worker.held)[:AT_ONCE])
    return ms


def rows(quick: bool) -> list[Row]:
    found: list[Row] = []
    for measure, counts, what in (
        (partial(steps, runs), (10, 100, 1000), f"core step, {AT_ONCE} results, open runs on 8 workers"),
        (partial(steps, full), (10, 100, 1000), "the same, busy workers"),
        (partial(steps, mixed), (10, 100, 500), "the same, and as many idle, unfit ones"),
        (partial(steps, prefixes), (10, 100, 1000), "the same, prefixes on 100 workers"),
        (submits, (10, 100, 1000), f"core step, {ROWS} new rows, workers with room"),
    ):
        ms = {count: measure(count, 50 if quick else 400) for count in (counts[:2] if quick else counts)}
        each = [f"{count:,}: {statistics.median(found_ms):.2f} ({max(found_ms):.1f})" for count, found_ms in ms.items()]
        found.append(
            Row(
                what,
                f"{', '.join(each)} ms",
                values={f"median_ms_{count}": statistics.median(found_ms) for count, found_ms in ms.items()},
            )
        )
    return found
