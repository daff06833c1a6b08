"""One embedded `rollout infer batch` of a million mock rows: submit time, and memory of every process as it grows."""

from __future__ import annotations

import json
import subprocess
import threading
import time
from pathlib import Path
from typing import Any

import psutil
from cluster import binary, write_toml
from measure import Row, directory, rss_mib

EARLY = 10_000
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
    """The largest resident size of each kind of process, before and after `grown` is set."""

    def __init__(self, client: int) -> None:
        self._client = client
        self.grown = False
        self._over = threading.Event()
        self.early: dict[str, float] = {}
        self.late: dict[str, float] = {}
        self._names: dict[int, str] = {client: "client"}
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def _watch(self) -> None:
        while not self._over.wait(SAMPLE_S):
            into = self.late if self.grown else self.early
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


def run(root: Path, rows: int) -> tuple[Memory, float, float, dict[str, Any]]:
    """Memory, seconds until everything was submitted and until the end, and the summary."""
    source = root / "rows.jsonl"
    with source.open("w") as out:
        for n in range(rows):
            out.write(f'{{"prompt":"row {n}","n":{n}}}\n')
    config = write_toml(
        root / "batch.toml",
        {
            "model": {"uri": "mock"},
            "backend": {"kind": "mock", "concurrency": 256},
            "input": {"glob": str(source)},
            "output": {"dir": str(root / "out")},
            "workers": {"count": 2},
        },
    )
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
                if event["committed"] >= EARLY:
                    memory.grown = True
            elif event["event"] == "summary":
                memory.stop()
                return memory, (submitted or now) - opened, now - opened, event
    raise RuntimeError(f"rollout infer batch ended with {process.returncode}")


def rows(quick: bool) -> list[Row]:
    count = 100_000 if quick else 1_000_000
    with directory() as root:
        memory, submitted, total, summary = run(root, count)
    if summary["rows"]["completed"] != count:
        raise RuntimeError(f"rows failed: {summary['rows']}")
    kinds = [kind for kind in ("coordinator", "client", "worker", "engine") if kind in memory.late]
    growth = {kind: 100 * (memory.late[kind] / memory.early[kind] - 1) for kind in kinds}
    figure = ", ".join(f"{k} {memory.early[k]:.0f} to {memory.late[k]:.0f} MiB ({growth[k]:+.0f} %)" for k in kinds)
    return [
        Row(
            f"submit of {count:,} rows by `rollout infer batch`, durable, while two mock workers run them",
            f"{submitted:.0f} s; all committed and written after {total:.0f} s ({count / total:,.0f} rows/s)",
            "≤ 60 s" if not quick else "",
            submitted <= 60 if not quick else None,
            {"seconds": submitted, "rows_per_s": count / total},
        ),
        Row(
            f"peak memory up to {EARLY:,} rows committed, and after that up to {count:,}",
            figure,
            "flat (± 20 %)",
            all(abs(value) <= 20 for value in growth.values()),
            growth,
        ),
    ]
