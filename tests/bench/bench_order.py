"""Tokens per second of two engines on rows that share prefixes and on rows of skewed length, with and without the hints
of the plan, against one bare engine that is given everything at once. vLLM where it is installed, else transformers.

Run: python tests/bench/bench_order.py [--backend vllm|transformers] [--repeats N] [--scale N]
"""

from __future__ import annotations

import os
import random
import statistics
import tempfile
from importlib.util import find_spec
from pathlib import Path

from overhead import Bare, JsonObject, Ours, alternate, machine, make_model, parser, spread, write_rows

HINTS = {"with": {"workers": {}}, "without": {"workers": {"prefix_affinity": False, "longest_first": False}}}


def shared_prefixes(scale: int) -> list[JsonObject]:
    """Questions about 16 documents of some 900 tokens, in turn, with short answers: reading is most of the work."""
    draw = random.Random(1)
    words = ["worker", "lease", "epoch", "answer", "number", "sum", "result", "text", "item", "coordinator"]
    documents = [" ".join(draw.choice(words) + str(draw.randint(0, 9)) for _ in range(280)) for _ in range(16)]
    return [
        {"prompt": f"{documents[n % 16]}\nQuestion {n}: what is {n}?", "sampling": {"max_tokens": 8}}
        for n in range(96 * scale)
    ]


def skewed(scale: int) -> list[JsonObject]:
    """One row in twenty generates ten times as much as the others; a third of those come last."""
    rows = [{"prompt": f"What is {n} times 8?", "sampling": {"max_tokens": 32}} for n in range(190 * scale)]
    long = [{"prompt": f"Tell me all of {n}.", "sampling": {"max_tokens": 320}} for n in range(10 * scale)]
    draw = random.Random(2)
    last = long[: len(long) // 3]
    for row in long[len(last) :]:
        rows.insert(draw.randrange(len(rows)), row)
    return rows + last


if __name__ == "__main__":
    made = parser(__doc__ or "", rows=0, tokens=0)
    made.add_argument(
        "--backend", choices=("vllm", "transformers"), default="vllm" if find_spec("vllm") else "transformers"
    )
    made.add_argument("--scale", type=int, default=2, help="96 rows with shared prefixes and 200 of skewed length each")
    given = made.parse_args()
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    backend: JsonObject = {"kind": given.backend, "device": "cpu", "dtype": "float32", "max_num_seqs": 16}
    backend["max_model_len"] = 1536
    sampling: JsonObject = {"temperature": 0.0, "max_tokens": 32, "ignore_eos": True}
    print(f"{given.backend}: {machine()}; 16 sequences an engine, both engines on these cores, median (min to max)")
    with tempfile.TemporaryDirectory() as directory:
        root = Path(directory)
        model = make_model(root / "tiny")
        bare = Bare(model, backend, sampling)
        ours = Ours(root / "cluster", model, backend, sampling, workers=2)
        try:
            warm = write_rows(root / "warm.jsonl", skewed(1)[:64])
            bare.run(warm)
            ours.run(warm)
            for name, rows in (
                ("shared prefixes", shared_prefixes(given.scale)),
                ("skewed lengths", skewed(given.scale)),
            ):
                path = write_rows(root / "rows.jsonl", rows)
                found = alternate(
                    {
                        "one bare engine": lambda: bare.run(path),  # noqa: B023
                        "two, with": lambda: ours.run(path, **HINTS["with"]),  # noqa: B023
                        "two, without": lambda: ours.run(path, **HINTS["without"]),  # noqa: B023
                    },
                    given.repeats,
                )
                print(f"\n{name}: {len(rows)} rows, {found['two, with'][0]['tokens']} tokens generated")
                rates = {side: [run["tokens"] / run["seconds"] for run in runs] for side, runs in found.items()}
                for side, rate in rates.items():
                    ratio = statistics.median(r / b for r, b in zip(rate, rates["one bare engine"], strict=True))
                    print(f"{side:>18} {spread(rate, 0):>24} tokens/s  {ratio:5.2f} of one bare engine")
                gain = [w / o for w, o in zip(rates["two, with"], rates["two, without"], strict=True)]
                print(f"{'with / without':>18} {spread(gain):>24}")
        finally:
            ours.close()
            bare.close()
