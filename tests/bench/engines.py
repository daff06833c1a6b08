"""Real engines on the CPU: overhead over the bare backend, and what order gives. Writes docs/engines.md (make bench-vllm).

Run: python tests/bench/engines.py [--quick] [--record docs/engines.md]      in an environment with vLLM
"""

from __future__ import annotations

import argparse
import sys
import time
from importlib.util import find_spec
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

import bench_order
import bench_overhead_transformers
import bench_overhead_vllm
from overhead import end_cleanly, machine


def report(quick: bool) -> list[str]:
    small = {"count": 150, "repeats": 1} if quick else {}
    out = [
        "# Real engines",
        "",
        f"Written by `make bench-vllm` on {time.strftime('%Y-%m-%d', time.gmtime())}: {machine()}. The model is the tiny one "
        "of `rollout model make-tiny` (2 layers, 128 wide), float32, on the CPU, with OMP_NUM_THREADS=1: steps are short, so "
        "that every row's cost outside the engine shows.",
        "",
        "## Overhead over the bare backend",
        "",
        "The same rows, greedy, 32 to 96 tokens each. Bare: the backend in a process made as the worker makes its child, all "
        "rows given to it at once. Ours: `rollout infer batch` at a coordinator on SQLite (synchronous=FULL) and one worker, "
        "from the run's opening to the last row written. Models are loaded and warm on both sides, which take turns, in new "
        "processes for each pair. Client, coordinator and worker share the cores with the engine.",
        "",
    ]
    out += [*bench_overhead_transformers.measured(**small).lines(), ""]
    kind = "vllm" if find_spec("vllm") else "transformers"
    if kind == "vllm":
        out += [*bench_overhead_vllm.measured(**small).lines(), ""]
    else:
        out += ["vLLM: not installed in this environment.", ""]
    out += [
        "## Order and full batches",
        "",
        "Shared prefixes: questions about 16 documents of some 900 tokens, in turn, 8 tokens each; every run has documents that "
        "no engine has read. Skewed lengths: one row in twenty generates ten times as much as the others, and a third of those "
        "come last.",
        "",
    ]
    return out + bench_order.measured(kind, *((1, 1) if quick else (2, 5)))


if __name__ == "__main__":
    end_cleanly()
    made = argparse.ArgumentParser(description=__doc__)
    made.add_argument("--quick", action="store_true")
    made.add_argument("--record", type=Path)
    given = made.parse_args()
    text = "\n".join(report(given.quick)).rstrip() + "\n"
    print(text)
    if given.record:
        given.record.write_text(text)
