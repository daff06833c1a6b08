"""What the engine costs on top of an inference backend: the same rows bare and through `rollout infer batch`.

Bare: the backend in a process made as the worker makes its child, every row given to it at once, from the first row
given to the last completion. Ours: a coordinator on SQLite with synchronous=FULL and one worker, from the run's
opening to the last row written. Both sides have their model loaded and warm; they take turns, and each overhead is that
of two neighbouring runs in processes of their own, so that what else the machine does weighs on both.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "smoke"))

from cluster import Cluster, binary, write_toml
from measure import Row

JsonObject = dict[str, Any]
T = TypeVar("T")


# ---- rows


def write_rows(path: Path, rows: list[JsonObject]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def varied(count: int, tokens: int, seed: int = 0) -> list[JsonObject]:
    """Short prompts; completions of half to one and a half times `tokens`."""
    draw = random.Random(seed)
    return [
        {"prompt": f"Question {n}: what is {n} times 8?", "sampling": {"max_tokens": draw.randint(tokens // 2, tokens * 3 // 2)}}
        for n in range(count)
    ]  # fmt: skip


# ---- bare


async def serve_bare(options: JsonObject) -> None:
    """Loads the backend, then for each line on standard input, a JSONL file, prints {seconds, tokens, rows}."""
    from rollout.workloads.infer.config import SamplingSection
    from rollout.workloads.infer.payload import encode_result
    from rollout.workloads.infer.request import parse_row
    from rollout_worker.backends.opening import open_backend
    from rollout_worker.backends.port import BackendOptions, Request
    from rollout_worker.executors.infer_requests import row_result, to_sampling

    backend = dict(options["backend"])
    opened = open_backend(BackendOptions(model=options["model"], kind=str(backend.pop("kind")), options=backend))
    await opened.start()
    defaults = SamplingSection.model_validate(options["sampling"])
    print(json.dumps({"ready": opened.concurrency}), flush=True)
    runs = 0
    while path := (await asyncio.to_thread(sys.stdin.readline)).strip():
        requests: list[Request] = []
        for n, line in enumerate(Path(path).read_text().splitlines()):
            row = parse_row(json.loads(line), defaults, "vllm")
            prompt = next((one for one in row.prompts if isinstance(one, str)), None)
            requests.append(Request(f"{runs}-{n}", to_sampling(row.sampling, n), prompt, row.messages))
        runs += 1
        began = time.perf_counter()
        done = await asyncio.gather(*(opened.generate(request) for request in requests))
        for completion in done:
            encode_result(row_result(completion))
        seconds = time.perf_counter() - began
        tokens = sum(choice.tokens for completion in done for choice in completion.choices)
        print(json.dumps({"seconds": seconds, "tokens": tokens, "rows": len(done)}), flush=True)
    await opened.close()


class Bare:
    """The backend in a process of its own, with the environment the worker's child would have."""

    def __init__(self, model: str, backend: JsonObject, sampling: JsonObject) -> None:
        from rollout_worker.backends.environment import engine_environment

        options = {"model": model, "backend": backend, "sampling": sampling}
        self._process = subprocess.Popen(
            [sys.executable, __file__, "--bare", json.dumps(options)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | engine_environment(backend, local_model=True),
        )
        self.concurrency = int(self._answer()["ready"])

    def _answer(self) -> JsonObject:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("{"):
                return json.loads(line)
        raise RuntimeError(f"the bare backend ended with {self._process.wait()}")

    def run(self, rows: Path) -> JsonObject:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{rows}\n")
        self._process.stdin.flush()
        return self._answer()

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(timeout=60)


# ---- ours


class Ours:
    """A coordinator and workers that stay up; each run is a `rollout infer batch` of its own."""

    def __init__(self, root: Path, model: str, backend: JsonObject, sampling: JsonObject, workers: int = 1) -> None:
        self._root, self._model, self._backend, self._sampling = root, model, backend, sampling
        self._runs = 0
        self.cluster = Cluster(root)
        self.cluster.add_coordinator().wait_event("coordinator_ready")
        for _ in range(workers):
            self.cluster.add_worker(worker={"slots": 1}).wait_event("worker_ready")
        self._options = self.cluster.operator()

    def run(self, rows: Path, **sections: JsonObject) -> JsonObject:
        self._runs += 1
        out = self._root / f"out-{self._runs}"
        config = write_toml(
            self._root / f"batch-{self._runs}.toml",
            {
                "model": {"uri": self._model},
                "backend": self._backend,
                "sampling": self._sampling,
                "input": {"glob": str(rows)},
                "output": {"dir": str(out)},
            }
            | sections,
        )
        command = [binary("rollout"), "infer", "batch", "--config", str(config), "--json", *self._options]
        opened = 0.0
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            for line in process.stdout:
                event = json.loads(line)
                if event["event"] == "run_opened":
                    opened = time.perf_counter()
                elif event["event"] == "summary":
                    seconds = time.perf_counter() - opened
                    if event["rows"]["completed"] != event["rows"]["total"]:
                        raise RuntimeError(f"rows failed: {event['rows']}, see {out}")
                    return {
                        "seconds": seconds,
                        "tokens": event["tokens"]["completion"],
                        "rows": event["rows"]["completed"],
                    }
        raise RuntimeError(f"rollout infer batch ended with {process.returncode}")

    def close(self) -> None:
        self.cluster.close()


# ---- the comparison


def end_cleanly() -> None:
    """SIGTERM ends what was started as Ctrl-C does."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))


def machine() -> str:
    import psutil

    memory = psutil.virtual_memory().total >> 30
    return f"{os.cpu_count()} cores, {memory} GiB, {platform.system()}, Python {platform.python_version()}"


def turned(sides: dict[str, T], n: int) -> list[tuple[str, T]]:
    """The sides of the `n`th round: their order is turned round every time."""
    return list(sides.items()) if n % 2 == 0 else list(reversed(sides.items()))


def alternate(sides: dict[str, Callable[[], JsonObject]], repeats: int) -> dict[str, list[JsonObject]]:
    """Each side in turn."""
    found: dict[str, list[JsonObject]] = {name: [] for name in sides}
    for n in range(repeats):
        for name, run in turned(sides, n):
            found[name].append(run())
    return found


def spread(values: list[float], digits: int = 2) -> str:
    return f"{statistics.median(values):.{digits}f} ({min(values):.{digits}f}..{max(values):.{digits}f})"


@dataclass
class Comparison:
    """The two sides' seconds, run by run in pairs."""

    kind: str
    rows: int
    tokens: int
    sequences: int
    bare: list[float]
    ours: list[float]

    @property
    def overhead(self) -> list[float]:
        """Per cent, of each pair."""
        return [100 * (o / b - 1) for b, o in zip(self.bare, self.ours, strict=True)]

    def lines(self) -> list[str]:
        def rate(seconds: list[float]) -> str:
            return f"{self.tokens / statistics.median(seconds):.0f}"

        return [
            f"{self.kind}, tiny model on the CPU: {self.rows} rows, {self.tokens} tokens, {self.sequences} sequences at once",
            "",
            "| | seconds, median (min..max) | tokens/s |",
            "|---|---|---|",
            f"| bare backend, everything at once | {spread(self.bare)} | {rate(self.bare)} |",
            f"| `rollout infer batch`, coordinator and one worker | {spread(self.ours)} | {rate(self.ours)} |",
            "",
            f"Overhead of {len(self.bare)} neighbouring pairs: {spread(self.overhead, 1)} %",
        ]


def compare(kind: str, count: int, length: int, repeats: int, model: str, backend: JsonObject) -> Comparison:
    """`count` rows of about `length` tokens. Each pair is of new processes: the same rows take one of them up to a
    tenth more processor time than another, all its life."""
    sampling: JsonObject = {"temperature": 0.0, "max_tokens": 64, "ignore_eos": True}
    found: dict[str, list[JsonObject]] = {"bare": [], "ours": []}
    concurrency = 0
    with tempfile.TemporaryDirectory() as directory:
        root = Path(directory)
        rows = write_rows(root / "rows.jsonl", varied(count, length))
        warm = write_rows(root / "warm.jsonl", varied(2 * int(backend.get("max_num_seqs", 32)), 8))
        for n in range(repeats):
            with (
                closing(Bare(model, backend, sampling)) as bare,
                closing(Ours(root / f"cluster-{n}", model, backend, sampling)) as ours,
            ):
                bare.run(warm)
                ours.run(warm)
                for name, side in turned({"bare": bare, "ours": ours}, n):
                    found[name].append(side.run(rows))
                concurrency = bare.concurrency
    tokens = {name: {run["tokens"] for run in runs} for name, runs in found.items()}
    if len(tokens["bare"] | tokens["ours"]) != 1:
        raise RuntimeError(f"the two sides made different tokens: {tokens}")
    seconds = {name: [float(run["seconds"]) for run in runs] for name, runs in found.items()}
    return Comparison(kind, count, tokens["bare"].pop(), concurrency, seconds["bare"], seconds["ours"])


def report(kind: str, comparison: Comparison) -> list[Row]:
    """For report.py."""
    median = statistics.median(comparison.overhead)
    return [
        Row(
            f"over bare {kind}",
            f"{spread(comparison.overhead, 1)} %, {len(comparison.bare)} pairs of {comparison.rows} rows",
            "≤3 %",
            median <= 3.0,
            {"overhead_percent": median},
        )
    ]


def parser(description: str, rows: int, tokens: int) -> argparse.ArgumentParser:
    end_cleanly()
    made = argparse.ArgumentParser(description=description)
    made.add_argument("--rows", type=int, default=rows)
    made.add_argument("--tokens", type=int, default=tokens, help="mean length of a completion")
    made.add_argument("--repeats", type=int, default=5)
    made.add_argument("--sequences", type=int, default=32, help="[backend] max_num_seqs")
    return made


def make_model(directory: Path) -> str:
    from rollout_worker.backends.tiny import make_tiny

    make_tiny(directory)
    return str(directory)


if __name__ == "__main__":
    if sys.argv[1:2] != ["--bare"]:
        sys.exit("this module is used by bench_overhead_transformers.py and bench_overhead_vllm.py")
    asyncio.run(serve_bare(json.loads(sys.argv[2])))
