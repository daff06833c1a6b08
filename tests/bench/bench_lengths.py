"""Tokens a second of the transformers backend with prompts of very different lengths, which it batches by length.

Run: python tests/bench/bench_lengths.py
"""

from __future__ import annotations

import asyncio
import random
import tempfile
import time
from pathlib import Path

from measure import Row, spread

AT_ONCE, TOKENS = 16, 16


def prompts(count: int, seed: int = 0) -> list[tuple[int, ...]]:
    """Three of four have 16 to 64 tokens, the others 256 to 1,024."""
    draw = random.Random(seed)
    lengths = [draw.randint(256, 1024) if draw.random() < 0.25 else draw.randint(16, 64) for _ in range(count)]
    return [tuple(draw.randrange(10, 500) for _ in range(length)) for length in lengths]


async def seconds(model: Path, given: list[tuple[int, ...]]) -> float:
    """Of all rows, of which as many wait as are in the batch: what a worker gives its engine."""
    from rollout_worker.backends.opening import open_backend
    from rollout_worker.backends.port import BackendOptions, Request, Sampling

    options = {"device": "cpu", "max_num_seqs": AT_ONCE}
    backend = open_backend(BackendOptions(model=str(model), kind="transformers", options=options))
    await backend.start()
    room = asyncio.Semaphore(2 * AT_ONCE)
    sampling = Sampling(temperature=0.0, max_tokens=TOKENS, ignore_eos=True)

    async def one(at: int, ids: tuple[int, ...]) -> None:
        async with room:
            await backend.generate(Request(str(at), sampling, prompt_ids=ids))

    began = time.perf_counter()
    await asyncio.gather(*(one(at, ids) for at, ids in enumerate(given)))
    took = time.perf_counter() - began
    await backend.close()
    return took


def rows(quick: bool) -> list[Row]:
    from rollout_worker.backends.tiny import Shape, make_random

    shape = Shape(4, 256, 768, 4, 4, 64, 512, tied=False, std=0.05, dtype="float32")
    with tempfile.TemporaryDirectory() as root:
        make_random(Path(root) / "model", shape)
        given = prompts(96)
        total = sum(map(len, given)) + TOKENS * len(given)
        rates = [total / asyncio.run(seconds(Path(root) / "model", given)) for _ in range(1 if quick else 3)]
    what = f"transformers, {len(given)} prompts of 16 to 1,024 tokens, {AT_ONCE} at once, {TOKENS} generated"
    return [Row(what, f"{spread(rates, 0)} tokens/s with prompts", values={"tokens_s": rates[0]})]


if __name__ == "__main__":
    print("\n".join(f"{row.what}: {row.figure}" for row in rows(quick=True)))
