"""Tokens per second of two engines on rows that share prefixes and on rows of skewed length, with and without the hints
of the plan, against one bare engine that is given everything at once. vLLM where it is installed, else transformers.

Run: python tests/bench/bench_order.py [--backend vllm|transformers] [--repeats N] [--scale N]
"""

from __future__ import annotations

import os
import random
import tempfile
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from pathlib import Path

from overhead import Bare, JsonObject, Ours, alternate, make_model, parser, spread, write_rows

WITHOUT: dict[str, JsonObject] = {"workers": {"prefix_affinity": False, "longest_first": False}}
HEAD = [
    "tokens/s | one bare engine | two workers, `prefix_affinity` and `longest_first` | two workers, neither | both/neither",
    "---|---|---|---|---",
]


def shared_prefixes(scale: int, draw: random.Random) -> list[JsonObject]:
    """Questions about 16 documents of some 900 tokens, in turn, with short answers: reading is most of the work. Every run
    draws documents of its own, for an engine keeps what it read in the runs before."""
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


def row(title: str, found: dict[str, list[JsonObject]]) -> str:
    rates = {side: [run["tokens"] / run["seconds"] for run in runs] for side, runs in found.items()}
    gain = [w / o for w, o in zip(rates["two, with"], rates["two, without"], strict=True)]
    cells = [f"{title}, {found['bare'][0]['rows']} rows", *(spread(rates[side], 0) for side in found), spread(gain)]
    return " | ".join(cells)


def written(path: Path, rows: Callable[[], list[JsonObject]], run: Callable[[Path], JsonObject]) -> JsonObject:
    return run(write_rows(path, rows()))


def measured(kind: str, scale: int, repeats: int, sequences: int = 16) -> list[str]:
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    backend: JsonObject = {"kind": kind, "device": "cpu", "dtype": "float32", "max_num_seqs": sequences}
    backend["max_model_len"] = 2048
    sampling: JsonObject = {"temperature": 0.0, "max_tokens": 32, "ignore_eos": True}
    out = [f"{kind}: {sequences} sequences an engine, all on the same cores, {repeats} times", "", *HEAD]
    with tempfile.TemporaryDirectory() as directory:
        root = Path(directory)
        model = make_model(root / "tiny")
        bare = Bare(model, backend, sampling)
        ours = Ours(root / "cluster", model, backend, sampling, workers=2)
        try:
            warm = write_rows(root / "warm.jsonl", skewed(1)[:64])
            bare.run(warm)
            ours.run(warm)
            draw = random.Random(1)
            for title, rows in (
                ("Shared prefixes", partial(shared_prefixes, scale, draw)),
                ("Skewed lengths", partial(skewed, scale)),
            ):
                given = partial(written, root / "rows.jsonl", rows)
                sides = {
                    "bare": partial(given, bare.run),
                    "two, with": partial(given, ours.run),
                    "two, without": partial(given, partial(ours.run, **WITHOUT)),
                }
                out.append(row(title, alternate(sides, repeats)))
        finally:
            ours.close()
            bare.close()
    return out


if __name__ == "__main__":
    made = parser(__doc__ or "", rows=0, tokens=0)
    installed = "vllm" if find_spec("vllm") else "transformers"
    made.add_argument("--backend", choices=("vllm", "transformers"), default=installed)
    made.add_argument("--scale", type=int, default=2, help="96 rows with shared prefixes and 200 of skewed length each")
    given = made.parse_args()
    print("\n".join(measured(given.backend, given.scale, given.repeats)))
