"""Overhead of `rollout infer batch` over the bare transformers backend, on the tiny model.

Run: python tests/bench/bench_overhead_transformers.py [--rows N] [--repeats N]
"""

from __future__ import annotations

import tempfile
from pathlib import Path

from measure import Row
from overhead import Comparison, compare, make_model, parser, report


def measured(count: int = 400, length: int = 64, repeats: int = 9, sequences: int = 32) -> Comparison:
    with tempfile.TemporaryDirectory() as root:
        backend = {"kind": "transformers", "max_num_seqs": sequences, "device": "cpu"}
        return compare("transformers", count, length, repeats, make_model(Path(root) / "tiny"), backend)


def rows(quick: bool) -> list[Row]:
    return report("transformers", measured(count=150, repeats=1) if quick else measured())


if __name__ == "__main__":
    given = parser(__doc__ or "", rows=400, tokens=64).parse_args()
    print("\n".join(measured(given.rows, given.tokens, given.repeats, given.sequences).lines()))
