"""Overhead of `rollout infer batch` over bare vLLM, on the CPU and the tiny model (make bench-vllm).

Run: python tests/bench/bench_overhead_vllm.py [--rows N] [--repeats N]
"""

from __future__ import annotations

import os
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path

from overhead import compare, make_model, parser

if __name__ == "__main__":
    given = parser(__doc__ or "", rows=1000, tokens=64).parse_args()
    if find_spec("vllm") is None:
        print("bench_overhead_vllm: skipped, vLLM is not installed here (make bench-vllm has it)")
        sys.exit(0)
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    with tempfile.TemporaryDirectory() as root:
        backend = {
            "kind": "vllm", "dtype": "float32", "device": "cpu", "max_model_len": 512,
            "max_num_seqs": given.sequences,
        }  # fmt: skip
        compare("vllm", given, make_model(Path(root) / "tiny"), backend)
