"""Overhead of `rollout infer batch` over the bare transformers backend, on the tiny model.

Run: python tests/bench/bench_overhead_transformers.py [--rows N] [--repeats N]
"""

from __future__ import annotations

import tempfile
from pathlib import Path

from overhead import compare, make_model, parser

if __name__ == "__main__":
    given = parser(__doc__ or "", rows=400, tokens=64).parse_args()
    with tempfile.TemporaryDirectory() as root:
        backend = {"kind": "transformers", "max_num_seqs": given.sequences, "device": "cpu"}
        compare("transformers", given, make_model(Path(root) / "tiny"), backend)
