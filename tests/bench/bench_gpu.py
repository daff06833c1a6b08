"""On a GPU: overhead of `rollout infer batch` over the bare backend on a model of 0.5 B parameters with random weights in
bf16, and what bounds a step of it. transformers, and vLLM where it is installed.

Run: python tests/bench/bench_gpu.py [--device cuda|cpu] [--quick] [--repeats N] [--sequences N]

A step of decoding can take no less than the longest of two: its weights and keys and values read from memory, and its
arithmetic, at the rates that a copy and a product of matrices reach on the same device in the same run. What it takes
beyond that is kernels that do not reach these rates, and time in which the device waits for its host.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

from measure import Row
from overhead import Comparison, JsonObject, compare, end_cleanly, report
from rollout_worker.backends.tiny import Shape, make_random

HALF_BILLION = Shape(
    layers=24,
    hidden=896,
    intermediate=4864,
    heads=14,
    kv_heads=2,
    head_dim=64,
    vocabulary=151_936,
    tied=True,
    std=0.02,
    dtype="bfloat16",
)
"""The shape of Qwen2.5-0.5B (its config.json on Hugging Face), as a Llama: 0.49 B parameters."""

SMALL = replace(HALF_BILLION, layers=2, hidden=128, intermediate=256, heads=2, kv_heads=1, vocabulary=4096)
"""For --quick: whether all of this works, also without a GPU."""

PROMPT = "The quick brown fox jumps over the lazy dog. "
SHORT, LONG = 16, 144
"""Tokens of the two runs whose difference is the time of a step."""


# ---- the floor of a step


@dataclass(frozen=True)
class Rates:
    """What the device reaches: bytes read and written, and floating-point operations, a second."""

    bytes_s: float
    flops_s: float


@dataclass(frozen=True)
class Step:
    """One step of decoding: `sequences` rows get a token each, with `length` tokens of each behind them. Seconds;
    `working` is the time of the device's kernels, None where it is not known."""

    sequences: int
    length: float
    seconds: float
    working: float | None = None
    kernels: float | None = None


def least_bytes(shape: Shape, step: Step, size: int = 2) -> float:
    """Every weight once (of embeddings that are not tied only the rows in use, which are left out), every key and value
    that is there once."""
    weights = shape.parameters - (0 if shape.tied else shape.vocabulary * shape.hidden)
    held = 2 * shape.layers * shape.kv_heads * shape.head_dim * step.length * step.sequences
    return size * (weights + held)


def least_flops(shape: Shape, step: Step) -> float:
    """A multiplication and an addition for each weight that is not a lookup, and for each key and value of each head."""
    lookup = 0 if shape.tied else shape.vocabulary * shape.hidden
    attention = 2 * shape.layers * shape.heads * shape.head_dim * step.length
    return 2 * step.sequences * (shape.parameters - lookup + attention)


def bound(shape: Shape, step: Step, rates: Rates) -> str:
    """What a step takes, what it could take, and which of the bounds holds it."""
    memory = least_bytes(shape, step) / rates.bytes_s
    arithmetic = least_flops(shape, step) / rates.flops_s
    floor = max(memory, arithmetic)
    name = "memory" if memory >= arithmetic else "arithmetic"
    said = (
        f"{step.seconds * 1e3:.3g} ms a step of {step.sequences} sequences; least by memory {memory * 1e3:.2g} ms "
        f"({least_bytes(shape, step) / 1e9:.3g} GB at {rates.bytes_s / 1e9:,.0f} GB/s), by arithmetic {arithmetic * 1e3:.2g} "
        f"ms ({least_flops(shape, step) / 1e9:.3g} GFLOP at {rates.flops_s / 1e12:.3g} TFLOP/s)"
    )
    if step.working is None or step.kernels is None:
        return f"{said}; {step.seconds / floor:.1f} times the floor, {name}"
    busy = step.working / step.seconds
    said += f"; the device works {step.working * 1e3:.3g} ms of it ({100 * busy:.0f} %) in {step.kernels:.0f} kernels"
    if busy < 0.5:
        return f"{said}: bound by the host, which launches them"
    if step.working > 2 * floor:
        return f"{said}: bound by kernels that reach {100 * floor / step.working:.0f} % of what {name} allows"
    return f"{said}: bound by {name}"


# ---- measuring it, in a process of its own


def measured_rates(device: str, quick: bool) -> Rates:
    import torch

    size = 1 << (24 if quick else 30)
    source = torch.randn(size // 4, device=device)
    target = torch.empty_like(source)
    edge = 512 if quick else 8192
    left, right = (torch.randn(edge, edge, device=device, dtype=torch.bfloat16) for _ in range(2))
    copied = _timed(device, lambda: target.copy_(source))
    multiplied = _timed(device, lambda: left @ right)
    return Rates(2 * size / copied, 2 * edge**3 / multiplied)


def _timed(device: str, call: Callable[[], object]) -> float:
    """Seconds of one call: the median of five groups of ten, after three to warm up."""
    for _ in range(3):
        call()
    found: list[float] = []
    for _ in range(5):
        _wait(device)
        began = time.perf_counter()
        for _ in range(10):
            call()
        _wait(device)
        found.append((time.perf_counter() - began) / 10)
    return statistics.median(found)


def _wait(device: str) -> None:
    import torch

    if device == "cuda":
        torch.cuda.synchronize()


async def measured_step(model: str, backend: JsonObject, sequences: int) -> Step:
    """Equal rows, as many as the engine holds, generate SHORT and then LONG tokens: all steps but the first are alike."""
    from rollout_worker.backends.opening import open_backend
    from rollout_worker.backends.port import BackendOptions, Request, Sampling

    options = dict(backend)
    opened = open_backend(BackendOptions(model=model, kind=str(options.pop("kind")), options=options))
    await opened.start()
    runs = 0

    async def run(tokens: int) -> tuple[float, int]:
        """Seconds, and the tokens of a prompt."""
        nonlocal runs
        runs += 1
        sampling = Sampling(temperature=0.0, max_tokens=tokens, ignore_eos=True, seed=0)
        requests = [Request(f"{runs}-{n}", sampling, f"{runs} {n} {PROMPT * 4}", None) for n in range(sequences)]
        began = time.perf_counter()
        done = await asyncio.gather(*(opened.generate(request) for request in requests))
        return time.perf_counter() - began, done[0].prompt_tokens

    await run(SHORT)
    pairs = [((await run(SHORT))[0], await run(LONG)) for _ in range(3)]
    prompt = pairs[0][1][1]
    seconds = statistics.median((long - short) / (LONG - SHORT) for short, (long, _) in pairs)
    working = kernels = None
    if backend["kind"] == "transformers" and backend["device"] == "cuda":  # vLLM's kernels run in a process of its own
        short, long = [await _kernels(run(tokens)) for tokens in (SHORT, LONG)]
        working, kernels = ((long[n] - short[n]) / (LONG - SHORT) for n in range(2))
    await opened.close()
    return Step(sequences, prompt + (SHORT + LONG) / 2, seconds, working, kernels)


async def _kernels(running: Any) -> tuple[float, int]:
    """Seconds in kernels and copies of the device while `running` is awaited, and how many there were."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as found:
        await running
        torch.cuda.synchronize()
    events = [event for event in found.events() or [] if event.device_type.name == "CUDA"]
    return sum(event.time_range.elapsed_us() for event in events) / 1e6, len(events)


def probe(given: JsonObject) -> JsonObject:
    rates = measured_rates(given["backend"]["device"], given["quick"])
    step = asyncio.run(measured_step(given["model"], given["backend"], given["sequences"]))
    return {"rates": asdict(rates), "step": asdict(step)}


def probed(model: str, backend: JsonObject, sequences: int, quick: bool) -> tuple[Rates, Step]:
    """In a process of its own, which leaves nothing on the device."""
    from rollout_worker.backends.environment import engine_environment

    given = json.dumps({"model": model, "backend": backend, "sequences": sequences, "quick": quick})
    environment = os.environ | engine_environment(backend, local_model=True)
    command = [sys.executable, __file__, "--probe", given]
    said = subprocess.run(command, stdout=subprocess.PIPE, text=True, env=environment, check=True).stdout
    found = json.loads(next(line for line in said.splitlines() if line.startswith("{")))
    return Rates(**found["rates"]), Step(**found["step"])


# ---- the rows


def device_name() -> str:
    """Empty where there is no GPU."""
    import torch

    if not torch.cuda.is_available():
        return ""
    found = torch.cuda.get_device_properties(0)
    return f"{found.name}, {found.total_memory / 2**30:.0f} GiB, torch {torch.__version__}"


def measured(kind: str, device: str, quick: bool, repeats: int, sequences: int) -> list[Row]:
    shape = SMALL if quick else HALF_BILLION
    backend: JsonObject = {
        "kind": kind, "device": device, "dtype": "bfloat16", "max_model_len": 1024, "max_num_seqs": sequences,
    }  # fmt: skip
    if kind == "vllm" and device == "cuda":
        backend["engine"] = {"gpu_memory_utilization": 0.4}  # both sides hold their engines at once
    with tempfile.TemporaryDirectory() as root:
        model = Path(root) / "model"
        make_random(model, shape)
        found: Comparison = compare(kind, (2 if quick else 6) * sequences, LONG, repeats, str(model), backend)
        rates, step = probed(str(model), backend, sequences, quick)
    what = f"{kind}, {shape.parameters / 1e6:,.0f} M parameters in bf16 on {device_name() or 'the CPU'}"
    rate = found.tokens / statistics.median(found.ours)
    [overhead] = report(what, found)
    overhead.figure += f"; {rate:,.0f} tokens/s, bare {found.tokens / statistics.median(found.bare):,.0f}"
    tokens = step.sequences / step.seconds
    return [
        overhead,
        Row(f"what bounds decoding with {what}", f"{bound(shape, step, rates)}; {tokens:,.0f} tokens/s while full"),
    ]


def rows(quick: bool, device: str = "cuda", repeats: int = 3, sequences: int = 256) -> list[Row]:
    """For report.py."""
    if device == "cuda" and not device_name():
        return [
            Row(
                "decoding, 494 M parameters, bf16",
                "no GPU here",
                "≤3 %",
            )
        ]
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    kinds = ["transformers", *(["vllm"] if find_spec("vllm") else [])]
    repeats, sequences = (1, min(sequences, 16)) if quick else (repeats, sequences)
    return [row for kind in kinds for row in measured(kind, device, quick, repeats, sequences)]


if __name__ == "__main__":
    if sys.argv[1:2] == ["--probe"]:
        print(json.dumps(probe(json.loads(sys.argv[2]))))
        sys.exit()
    end_cleanly()
    made = argparse.ArgumentParser(description=__doc__)
    made.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    made.add_argument("--quick", action="store_true", help="a small model and one pair: whether all of it works")
    made.add_argument("--repeats", type=int, default=3)
    made.add_argument("--sequences", type=int, default=256, help="[backend] max_num_seqs")
    given = made.parse_args()
    for row in rows(given.quick, given.device, given.repeats, given.sequences):
        print(f"{row.what}: {row.figure}{f' (target {row.target}: {row.verdict})' if row.target else ''}")
