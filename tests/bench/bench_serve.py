"""`rollout serve` beside one bare vLLM server; two engines against one; a thousand streams at once.

Run: python tests/bench/report.py --only serve      (vLLM: make bench-vllm has it installed)
     python tests/bench/bench_serve.py --soak MINUTES
"""

from __future__ import annotations

import argparse
import asyncio
import json
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import psutil
from measure import TESTS, Row, directory, rss_mib, spread, wait_for

sys.path.insert(0, str(TESTS / "acceptance"))

from bare_vllm import answers, bare_vllm, free_port

VLLM = {"kind": "vllm", "dtype": "float32", "device": "cpu", "max_model_len": 512, "max_num_seqs": 16}


@dataclass(frozen=True)
class Load:
    """`at_once` clients that stream `each` completions of `tokens` tokens one after the other. `words`: of a prompt; a
    mock engine's answer has as many tokens."""

    at_once: int
    each: int
    tokens: int
    words: int = 8


@dataclass(frozen=True)
class Found:
    """Of one load: seconds to the first token of each request, and tokens a second of all."""

    first_s: list[float]
    tokens_s: float


@contextmanager
def ours(root: Path, model: dict[str, Any], backend: dict[str, Any], workers: int = 1, **serve: Any) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:  # fmt: skip
    """The base URL of a `rollout serve` with a cluster of its own, and its process."""
    address = f"127.0.0.1:{free_port()}"
    sections = {
        "model": model,
        "backend": backend,
        "serve": {"listen_addr": address, "served_name": "m", **serve},
        "workers": {"count": workers},
    }
    text = "".join(
        f"[{name}]\n" + "".join(f"{key} = {json.dumps(value)}\n" for key, value in section.items())
        for name, section in sections.items()
    )
    root.mkdir(parents=True, exist_ok=True)
    (root / "serve.toml").write_text(text)
    command = [sys.executable, "-m", "rollout.cli", "serve", "--config", "serve.toml"]
    with (root / "log").open("w") as log:
        process = subprocess.Popen(command, cwd=root, stdout=log, stderr=log)
        try:
            wait_for(lambda: process.poll() is not None or answers(f"http://{address}/health"), 300, "the server")
            if process.poll() is not None:
                raise RuntimeError((root / "log").read_text()[-2000:])
            yield f"http://{address}/v1", process
        finally:
            process.send_signal(signal.SIGINT)
            process.wait(timeout=60)


async def stream(session: Any, url: str, name: str, prompt: str, tokens: int) -> tuple[float, int]:
    """Seconds to the first token, and how many came."""
    body = {"model": name, "prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True, "stream": True}
    body["stream_options"] = {"include_usage": True}
    began, first, count = time.perf_counter(), 0.0, 0
    async with session.post(f"{url}/completions", json=body) as response:
        response.raise_for_status()
        async for line in response.content:
            if not line.startswith(b"data: {"):
                continue
            first = first or time.perf_counter() - began
            chunk = json.loads(line[6:])
            if "error" in chunk:
                raise RuntimeError(chunk)
            count = (chunk.get("usage") or {}).get("completion_tokens", count)
    return first, count


async def drive(url: str, name: str, load: Load, salt: int) -> Found:
    import aiohttp

    firsts: list[float] = []

    async def client(session: aiohttp.ClientSession, n: int) -> int:
        tokens = 0
        for k in range(load.each):
            prompt = f"{salt}-{n}-{k}" + " word" * (load.words - 1)
            first, count = await stream(session, url, name, prompt, load.tokens)
            firsts.append(first)
            tokens += count
        return tokens

    timeout = aiohttp.ClientTimeout(total=None)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=timeout) as session:
        began = time.perf_counter()
        tokens = await asyncio.gather(*(client(session, n) for n in range(load.at_once)))
        return Found(firsts, sum(tokens) / (time.perf_counter() - began))


def alternate(sides: dict[str, tuple[str, str]], load: Load, repeats: int) -> dict[str, list[Found]]:
    """Of (url, model name) by side, in turns."""
    found: dict[str, list[Found]] = {side: [] for side in sides}
    for salt in range(-1, repeats):  # the first warms up
        for side, (url, name) in sides.items():
            one = asyncio.run(drive(url, name, load, salt))
            if salt >= 0:
                found[side].append(one)
    return found


def beside_vllm(repeats: int) -> list[Row]:
    what = "first token beside bare vLLM, tiny model, CPU"
    if find_spec("vllm") is None:
        return [Row(what, "vLLM is not installed here: `make bench-vllm`")]
    rows: list[Row] = []
    with directory() as root:
        tiny = root / "tiny"
        subprocess.run([sys.executable, "-m", "rollout.cli", "model", "make-tiny", str(tiny)], check=True)
        with (
            bare_vllm(tiny, root / "bare.log", VLLM) as bare,
            ours(root / "ours", {"uri": str(tiny)}, VLLM) as (url, _),
        ):
            sides = {"bare": (bare, str(tiny)), "ours": (url, "m")}
            one = alternate(sides, Load(1, 20, 16), repeats)
            firsts = {side: [1000 * statistics.median(run.first_s) for run in runs] for side, runs in one.items()}
            added = [o - b for b, o in zip(firsts["bare"], firsts["ours"], strict=True)]
            rows.append(
                Row(
                    what,
                    f"+{spread(added, 1)} ms (bare {spread(firsts['bare'], 1)})",
                    "≤5 ms",
                    statistics.median(added) <= 5,
                    {"added_ms": statistics.median(added)},
                )
            )
            many = alternate(sides, Load(16, 6, 64), repeats)
            rates = {side: [run.tokens_s for run in runs] for side, runs in many.items()}
            ratio = [o / b for b, o in zip(rates["bare"], rates["ours"], strict=True)]
            rows.append(
                Row(
                    "tokens/s of 16 streams",
                    f"{spread(ratio)} x (bare {spread(rates['bare'], 0)}, ours {spread(rates['ours'], 0)})",
                    "≥0.97 x",
                    statistics.median(ratio) >= 0.97,
                    {"ratio": statistics.median(ratio)},
                )
            )
    return rows


def two_engines(repeats: int) -> Row:
    """Mock engines: what a second one adds is the gateway's to give, not the processor's."""
    backend = {"kind": "mock", "token_ms": 10, "concurrency": 8}
    load, rates = Load(32, 2, 20, words=20), dict[int, list[float]]()
    with directory() as root:
        for engines in (1, 2):
            served = {"max_replicas": engines, "max_in_flight": 64}
            with ours(root / str(engines), {"uri": "mock"}, backend, workers=engines, **served) as (url, _):
                found = [asyncio.run(drive(url, "m", load, salt)) for salt in range(repeats + 1)][1:]
                rates[engines] = [run.tokens_s for run in found]
    ratio = statistics.median(rates[2]) / statistics.median(rates[1])
    return Row(
        "two mock engines of 8 streams over one, 10 ms a token, 32 streams",
        f"{ratio:.2f} x ({spread(rates[2], 0)} against {spread(rates[1], 0)} tokens/s)", "", None, {"ratio": ratio},
    )  # fmt: skip


def soak(minutes: float, streams: int = 1000) -> Row:
    """A thousand streams at once, over and over: what the gateway, the coordinator and the worker hold."""
    backend = {"kind": "mock", "token_ms": 400, "concurrency": streams}
    sizes: list[float] = []
    with directory() as root, ours(root, {"uri": "mock"}, backend, max_in_flight=streams) as (url, process):
        until, count = time.monotonic() + 60 * minutes, 0
        while time.monotonic() < until:
            asyncio.run(drive(url, "m", Load(streams, 1, 100, words=100), count))
            count += streams
            family = [process.pid, *(child.pid for child in psutil.Process(process.pid).children(recursive=True))]
            sizes.append(sum(rss_mib(pid) for pid in family))
    late, early = statistics.median(sizes[-3:]), statistics.median(sizes[1:4])
    return Row(
        f"{streams:,} streams, {minutes:g} minutes, {count:,} requests of 100 tokens",
        f"{early:,.0f} MiB in the second round, {late:,.0f} at the end", "flat (+5 %)",
        late <= 1.05 * early, {"early_mib": early, "late_mib": late},
    )  # fmt: skip


def rows(quick: bool) -> list[Row]:
    repeats = 1 if quick else 5
    return [*beside_vllm(repeats), two_engines(repeats)]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--soak", type=float, metavar="MINUTES")
    given = parser.parse_args()
    for row in [soak(given.soak)] if given.soak else rows(quick=True):
        print(row.what, row.figure, row.verdict, sep=" | ")
