"""`rollout infer batch` of a million mock rows: time to submit them, with and without workers that run them meanwhile,
and the memory of every process as the run grows."""

from __future__ import annotations

import json
import subprocess
import threading
import time
from pathlib import Path
from typing import Any

import psutil
from cluster import Cluster, binary, write_toml
from measure import Row, directory, rss_mib

PHASES = (10_000, 100_000)
"""Rows committed at which memory is looked at anew."""
SAMPLE_S = 0.2


def name_of(process: psutil.Process) -> str:
    """coordinator, objects server, worker, or a worker's engine."""
    words = " ".join(process.cmdline())
    for part, name in (
        ("objects_server", "objects server"), ("rollout_coordinator", "coordinator"), ("runner", "engine"),
        ("rollout_worker", "worker"),
    ):  # fmt: skip
        if part in words:
            return name
    return "other"


class Memory:
    """The largest resident size of each kind of process in each phase; `peaks[-1]` is the present one's."""

    def __init__(self, client: int) -> None:
        self._client = client
        self._over = threading.Event()
        self.peaks: list[dict[str, float]] = [{}]
        self._names: dict[int, str] = {client: "client"}
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def _watch(self) -> None:
        while not self._over.wait(SAMPLE_S):
            into = self.peaks[-1]
            try:
                for child in psutil.Process(self._client).children(recursive=True):
                    if child.pid not in self._names:
                        self._names[child.pid] = name_of(child)
            except psutil.NoSuchProcess:
                continue
            for pid, name in self._names.items():
                into[name] = max(into.get(name, 0.0), rss_mib(pid))

    def stop(self) -> None:
        self._over.set()
        self._thread.join()


def prepared(root: Path, rows: int) -> Path:
    """The configuration of a batch of so many rows."""
    root.mkdir(exist_ok=True)
    source = root / "rows.jsonl"
    with source.open("w") as out:
        for n in range(rows):
            out.write(f'{{"prompt":"row {n}","n":{n}}}\n')
    return write_toml(
        root / "batch.toml",
        {
            "model": {"uri": "mock"},
            "backend": {"kind": "mock", "concurrency": 256},
            "input": {"glob": str(source)},
            "output": {"dir": str(root / "out")},
            "workers": {"count": 2},
        },
    )


def run(root: Path, rows: int) -> tuple[Memory, float, float, dict[str, Any]]:
    """Memory, seconds until everything was submitted and until the end, and the summary."""
    config = prepared(root, rows)
    command = [binary("rollout"), "infer", "batch", "--config", str(config), "--json"]
    opened = submitted = 0.0
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        memory = Memory(process.pid)
        assert process.stdout is not None
        for text in process.stdout:
            event = json.loads(text)
            now = time.monotonic()
            if event["event"] == "run_opened":
                opened = now
            elif event["event"] == "progress":
                if event["submitted"] >= rows and not submitted:
                    submitted = now
                if len(memory.peaks) <= len(PHASES) and event["committed"] >= PHASES[len(memory.peaks) - 1]:
                    memory.peaks.append({})
            elif event["event"] == "summary":
                memory.stop()
                return memory, (submitted or now) - opened, now - opened, event
    raise RuntimeError(f"rollout infer batch ended with {process.returncode}")


def detached(root: Path, rows: int) -> float:
    """Seconds from the run's opening until `--detach` returns, with no worker at the coordinator."""
    config = prepared(root, rows)
    with Cluster(root / "cluster") as cluster:
        cluster.add_coordinator().wait_event("coordinator_ready")
        command = [binary("rollout"), "infer", "batch", "--config", str(config), "--json", "--detach"]
        opened = 0.0
        with subprocess.Popen([*command, *cluster.operator()], stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            for text in process.stdout:
                if json.loads(text)["event"] == "run_opened":
                    opened = time.monotonic()
        if process.returncode or not opened:
            raise RuntimeError(f"rollout infer batch --detach ended with {process.returncode}")
        return time.monotonic() - opened


def rows(quick: bool) -> list[Row]:
    count = 200_000 if quick else 1_000_000
    with directory() as root:
        alone = detached(root / "alone", count)
        memory, submitted, total, summary = run(root / "grown", count)
    if summary["rows"]["completed"] != count:
        raise RuntimeError(f"rows failed: {summary['rows']}")
    first, middle, last = memory.peaks
    kinds = [kind for kind in ("coordinator", "client", "worker", "engine") if kind in last]
    growth = {kind: 100 * (max(middle[kind], last[kind]) / first[kind] - 1) for kind in kinds}
    figure = ", ".join(f"{k} {first[k]:.0f}, {middle[k]:.0f}, {last[k]:.0f} MiB ({growth[k]:+.0f} %)" for k in kinds)
    return [
        Row(
            f"submit of {count:,} rows, no worker",
            f"{alone:.0f} s ({count / alone:,.0f} rows/s)",
            "≤60 s" if not quick else "",
            alone <= 60 if not quick else None,
            {"seconds": alone, "rows_per_s": count / alone},
        ),
        Row(
            "with 2 mock workers, collected",
            f"submitted after {submitted:.0f} s, written after {total:.0f} s ({count / total:,.0f} rows/s)",
            values={"seconds": submitted, "rows_per_s": count / total},
        ),
        Row(
            f"peak memory at {PHASES[0]:,}, {PHASES[1]:,}, {count:,} rows",
            figure,
            "flat (± 20 %)",
            all(abs(value) <= 20 for value in growth.values()),
            growth,
        ),
    ]
