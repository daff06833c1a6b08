"""Overhead of `rollout infer batch` over the bare mock backend at the delays of real engines.

Run: python tests/bench/report.py --only overhead-mock
"""

from __future__ import annotations

import random
import statistics
from pathlib import Path

from measure import Row, cpu_s, directory, spread
from overhead import Bare, JsonObject, Ours, alternate, write_rows

CASES = ((500, 64), (100, 32))
"""(milliseconds a row, rows at once): a long completion in a large batch, a short one in a small batch."""


def case(root: Path, delay_ms: int, concurrency: int, seconds: float, repeats: int) -> Row:
    backend: JsonObject = {"kind": "mock", "delay_ms": delay_ms, "jitter_ms": delay_ms, "concurrency": concurrency}
    sampling: JsonObject = {"temperature": 0.0, "max_tokens": 64}
    count = int(seconds * concurrency / (1.5 * delay_ms / 1000))
    draw = random.Random(0)
    source = write_rows(root / "rows.jsonl", [{"prompt": f"row {n} {draw.random()}"} for n in range(count)])
    warm = write_rows(root / "warm.jsonl", [{"prompt": f"warm {n}"} for n in range(2 * concurrency)])
    bare = Bare("mock", backend, sampling)
    try:
        ours = Ours(root / "cluster", "mock", backend, sampling)
        try:
            bare.run(warm)
            ours.run(warm)
            coordinator = ours.cluster.coordinators[0].process
            assert coordinator is not None
            before = cpu_s(coordinator.pid)
            found = alternate({"bare": lambda: bare.run(source), "ours": lambda: ours.run(source)}, repeats)
            cost = (cpu_s(coordinator.pid) - before) / (count * repeats) * 1e6
        finally:
            ours.close()
    finally:
        bare.close()
    times = {name: [float(r["seconds"]) for r in runs] for name, runs in found.items()}
    overhead = [100 * (o / b - 1) for b, o in zip(times["bare"], times["ours"], strict=True)]
    median = statistics.median(overhead)
    return Row(
        f"{count:,} rows of {delay_ms} to {2 * delay_ms} ms, {concurrency} at once",
        f"{spread(overhead, 1)} %, {repeats} pairs (bare {spread(times['bare'])} s, ours {spread(times['ours'])}); "
        f"{cost:.0f} µs",
        "≤3 %",
        median <= 3,
        {"percent": median},
    )


def rows(quick: bool) -> list[Row]:
    seconds, repeats = (4.0, 2) if quick else (12.0, 3)
    found: list[Row] = []
    for delay_ms, concurrency in CASES:
        with directory() as root:
            found.append(case(root, delay_ms, concurrency, seconds, repeats))
    return found
