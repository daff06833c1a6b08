"""Real engines on the CPU: overhead over the bare backend, and what order gives (make bench-vllm).

Run: python tests/bench/engines.py [--quick] [--record]      in an environment with vLLM; --record: into docs/benchmarks.md
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from importlib.util import find_spec
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import bench_order
import bench_overhead_transformers
import bench_overhead_vllm
from overhead import Comparison, end_cleanly, machine, spread
from results_page import write_section


def report(quick: bool) -> list[str]:
    small = {"count": 150, "repeats": 1} if quick else {}
    compared = [bench_overhead_transformers.measured(**small)]
    kind = "transformers"
    if find_spec("vllm"):
        kind = "vllm"
        compared.append(bench_overhead_vllm.measured(**small))
    return [
        f"{machine()}; {time.strftime('%Y-%m-%d', time.gmtime())}.",
        "",
        "engine | rows | bare, tokens/s | `rollout infer batch`, tokens/s | overhead of pairs, %",
        "---|---|---|---|---",
        *map(overhead_line, compared),
        "",
        *bench_order.measured(kind, *((1, 1) if quick else (2, 5))),
    ]


def overhead_line(one: Comparison) -> str:
    bare, ours = (f"{one.tokens / statistics.median(seconds):,.0f}" for seconds in (one.bare, one.ours))
    return f"{one.kind} | {one.rows} | {bare} | {ours} | {spread(one.overhead, 1)}"


if __name__ == "__main__":
    end_cleanly()
    made = argparse.ArgumentParser(description=__doc__)
    made.add_argument("--quick", action="store_true")
    made.add_argument("--record", action="store_true", help="write the section of docs/benchmarks.md")
    given = made.parse_args()
    lines = report(given.quick)
    print("\n".join(lines))
    if given.record:
        write_section("engines", lines)
