"""Overhead of `rollout infer batch` over bare vLLM, on the CPU and the tiny model (make bench-vllm).

Run: python tests/bench/bench_overhead_vllm.py [--rows N] [--repeats N]
"""

from __future__ import annotations

import os
import tempfile
from importlib.util import find_spec
from pathlib import Path

from measure import Row
from overhead import Comparison, compare, make_model, parser, report


def measured(count: int = 1000, length: int = 64, repeats: int = 9, sequences: int = 32) -> Comparison:
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    with tempfile.TemporaryDirectory() as root:
        backend = {
            "kind": "vllm", "dtype": "float32", "device": "cpu", "max_model_len": 512, "max_num_seqs": sequences,
        }  # fmt: skip
        return compare("vllm", count, length, repeats, make_model(Path(root) / "tiny"), backend)


def rows(quick: bool) -> list[Row]:
    if find_spec("vllm") is None:
        return [Row("over bare vLLM", "`make bench-vllm`", "≤3 %")]
    return report("vLLM", measured(count=300, repeats=1) if quick else measured())


if __name__ == "__main__":
    given = parser(__doc__ or "", rows=1000, tokens=64).parse_args()
    if find_spec("vllm") is None:
        print("bench_overhead_vllm: skipped, vLLM is not installed here (make bench-vllm has it)")
    else:
        print("\n".join(measured(given.rows, given.tokens, given.repeats, given.sequences).lines()))
