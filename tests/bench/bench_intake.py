"""Rows from a queue to the result file, beside the same rows from a file.

The queue is in this process and costs next to nothing, so what is measured is the intake: bounded prefetch, the index of
what was taken, a deletion for each row. A real queue's round trips come on top: SQS gives ten messages a call.
Run: python tests/bench/report.py --only intake
"""

from __future__ import annotations

import contextlib
import json
import tempfile
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any
from unittest import mock

from measure import Row
from rollout.cli.progress import Display, Snapshot
from rollout.cli.session import run_workload
from rollout.cli.work_options import Options
from rollout.client import intake_queues
from rollout.config.cloud import CloudSection
from rollout.queues.local import LocalQueue
from rollout.queues.port import Outgoing, Place
from rollout.storage.port import Storage
from rollout.workloads.map.config import MapConfig
from rollout.workloads.map.workload import Map


class Memory:
    """Key-value in memory, for the queue's bodies."""

    def __init__(self) -> None:
        self.rows: dict[str, bytes] = {}

    @contextlib.asynccontextmanager
    async def transaction(self) -> AsyncIterator[Any]:
        yield self

    async def get(self, namespace: str, key: str) -> bytes | None:
        return self.rows.get(key)

    async def put(self, namespace: str, key: str, value: bytes) -> None:
        self.rows[key] = value

    async def delete(self, namespace: str, key: str) -> bool:
        return self.rows.pop(key, None) is not None

    async def scan(self, namespace: str, prefix: str = "", limit: int | None = None) -> list[tuple[str, bytes]]:
        return []


class Filled(LocalQueue):
    def __init__(self, count: int) -> None:
        super().__init__(Memory(), name="rows", hot=count)  # type: ignore[arg-type]
        self._count = count

    async def open(self) -> None:
        for start in range(0, self._count, 1000):
            await self.enqueue([Outgoing(_row(n)) for n in range(start, min(start + 1000, self._count))])


def _row(n: int) -> bytes:
    return json.dumps({"n": n, "text": "x" * 200}).encode()


class Watch(Display):
    """When the first rows were under way, and when all were in the file."""

    def __init__(self, count: int) -> None:
        self._count = count
        self.began = self.ended = 0.0
        self.first = 0

    def note(self, message: str) -> None:
        return

    def event(self, name: str, message: str, /, **fields: Any) -> None:
        return

    def progress(self, snapshot: Snapshot) -> None:
        if not self.began and snapshot.committed:
            self.began, self.first = time.perf_counter(), snapshot.committed
        if not self.ended and snapshot.committed >= self._count:
            self.ended = time.perf_counter()

    @property
    def per_s(self) -> float:
        return (self._count - self.first) / (self.ended - self.began)


def rate(count: int, directory: Path, *, queue: bool) -> float:
    rows = directory / "rows.jsonl"
    if not queue:
        rows.write_bytes(b"".join(_row(n) + b"\n" for n in range(count)))
    given: dict[str, Any] = {
        "function": {"name": "json:dumps"},
        "input": {"queue": True, "stop_when_empty_s": 1.0} if queue else {"glob": str(rows)},
        "output": {"dir": str(directory / "out")},
        "workers": {"count": 2},
    }
    if queue:
        given["cloud"] = {"provider": "aws", "region": "us-east-1", "sqs": {"queue_url": "http://queue/rows"}}
    watch = Watch(count)

    def opened(backend: str, place: Place, cloud: CloudSection, storage: Storage | None = None) -> LocalQueue:
        return Filled(count)

    with mock.patch.object(intake_queues, "open_queue", opened):
        code = run_workload(
            Map(), MapConfig.model_validate(given), Options(words=("rollout", "map"), local=True), watch
        )
    assert code == 0
    return watch.per_s


def rows(quick: bool) -> list[Row]:
    count = 20_000 if quick else 100_000
    found: dict[bool, float] = {}
    for queue in (False, True):
        with tempfile.TemporaryDirectory() as directory:
            found[queue] = rate(count, Path(directory), queue=queue)
    ratio = found[True] / found[False]
    return [
        Row(
            f"{count:,} no-op rows of 230 B from a queue in the process beside a file",
            f"{ratio:.2f} x: {found[True]:,.0f} of {found[False]:,.0f} rows/s",
            "≥0.5",
            ratio >= 0.5,
            {"ratio": ratio, "rows_per_s": found[True]},
        )
    ]
