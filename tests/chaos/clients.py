"""The work: people who run one `rollout infer batch` after another, and type the same command again when it was killed."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cluster import binary, write_toml

from chaos.bucket import BucketUnderTest
from chaos.world import MARK, World

POISON = "poison"
MAX_ATTEMPTS = 3
BACKEND: dict[str, Any] = {
    "kind": "mock",
    "delay_ms": 400,
    "jitter_ms": 400,
    "concurrency": 24,
    "fail_rate": 0.004,
    "fail_match": POISON,
}
RETYPE_S = (0.1, 1.0)
GIVE_UP = 3


@dataclass(frozen=True)
class Flavour:
    """What a batch looks like: rows, the order of its results, letters per prompt, rows that must fail."""

    name: str
    rows: int
    order: str
    letters: int = 20
    poisoned: int = 0
    queue: bool = False


FLAVOURS = (
    Flavour("in order", 1500, "schedule"),
    Flavour("as they finish, some fail", 1200, "arrival", poisoned=3),
    Flavour("as objects", 300, "schedule", letters=6000),
)
FROM_QUEUE = Flavour("from a queue", 400, "arrival", queue=True)
LEASE_S, EMPTY_S = 10, 30
"""What a killed client had leased comes again long before its successor takes the queue for empty."""


@dataclass
class Batch:
    """One output directory and what must be in it."""

    directory: Path
    flavour: Flavour
    rows: list[dict[str, Any]]
    finished: bool = False
    starts: int = 0
    codes: list[int] = field(default_factory=list[int])
    queue_url: str = ""
    claims: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])  # summaries seen while it ran

    @property
    def output(self) -> Path:
        return self.directory / "out"

    @property
    def run_id(self) -> str:
        path = self.output / "run-id"
        return path.read_text().strip() if path.exists() else ""


def make_batch(directory: Path, flavour: Flavour, dice: random.Random, bucket: BucketUnderTest | None = None) -> Batch:
    poisoned = set(dice.sample(range(flavour.rows // 2), flavour.poisoned))
    rows: list[dict[str, Any]] = []
    for n in range(flavour.rows):
        word = "".join(dice.choices("abcdefghijklmnopqrstuvwxyz", k=flavour.letters))
        rows.append({"prompt": f"{POISON if n in poisoned else 'row'} {n} {word}", "n": n})
    directory.mkdir(parents=True)
    source: dict[str, Any] = {"glob": str(directory / "in.jsonl")}
    queue_url, cloud = "", dict[str, dict[str, Any]]()
    if flavour.queue:
        assert bucket is not None, "rows from a queue need the cloud"
        source = {"queue": True, "stop_when_empty_s": EMPTY_S}
        queue_url = bucket.queue_of(rows)
        cloud = bucket.intake(queue_url, LEASE_S)
    else:
        (directory / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    write_toml(
        directory / "batch.toml",
        {
            "model": {"uri": "mock"},
            "sampling": {"temperature": 0.0},
            "backend": BACKEND,
            "input": source,
            "output": {"dir": str(directory / "out")},
            # Whoever loses a row to so many killed workers has found a fault of ours, not a deadly row.
            "run": {"order": flavour.order, "max_attempts": MAX_ATTEMPTS, "max_worker_lost": 50},
        }
        | cloud,
    )
    return Batch(directory, flavour, rows, queue_url=queue_url)


class Client:
    """One person at one terminal."""

    def __init__(self, name: str, world: World, flavours: list[Flavour], dice: random.Random) -> None:
        self.name = name
        self.batches: list[Batch] = []
        self.killed = False
        self.leaving = False
        self.kills = 0
        self.not_connected = 0
        self.started_at = 0.0
        self._world = world
        self._flavours = flavours
        self._dice = dice
        self._process: asyncio.subprocess.Process | None = None
        self._log_at = 0

    @property
    def batch(self) -> Batch | None:
        """The one that runs."""
        return self.batches[-1] if self.batches and not self.batches[-1].finished else None

    @property
    def process(self) -> asyncio.subprocess.Process | None:
        """While a command runs."""
        return self._process if self._process is not None and self._process.returncode is None else None

    async def run(self) -> None:
        """Batch after batch until `leaving`; the last one is finished."""
        while not self.leaving:
            number = len(self.batches)
            flavour = self._flavours[number % len(self._flavours)]
            directory = self._world.root / self.name / f"batch-{number + 1}"
            batch = await asyncio.to_thread(make_batch, directory, flavour, self._dice, self._world.bucket)
            self.batches.append(batch)
            await self._finish(batch)

    async def _finish(self, batch: Batch) -> None:
        gave_up = 0
        while not batch.finished:
            code = await self._command(batch)
            batch.codes.append(code)
            if code == 0:
                batch.finished = True
            elif self.killed:
                self.killed = False
                await asyncio.sleep(self._dice.uniform(*RETYPE_S))
            elif self._found_nobody(batch):
                self.not_connected += 1
            else:
                gave_up += 1
                said = (batch.directory / "log").read_text(errors="replace")[-600:]
                self._world.object_to(f"{self.name}: `rollout infer batch` ended with {code} by itself: {said}")
                if gave_up >= GIVE_UP:
                    return
                await asyncio.sleep(1)

    def _found_nobody(self, batch: Batch) -> bool:
        """The last command ended, as documented, because no coordinator answered a new batch for 20 s."""
        said = (batch.directory / "log").read_bytes()[self._log_at :]
        return b'"run_opened"' not in said and b'"code": "unavailable"' in said

    async def _command(self, batch: Batch) -> int:
        batch.starts += 1
        log_path = batch.directory / "log"
        self._log_at = log_path.stat().st_size if log_path.exists() else 0
        config = str(batch.directory / "batch.toml")
        with log_path.open("ab") as log:
            self._process = await asyncio.create_subprocess_exec(
                *self._world.behind, binary("rollout"), "infer", "batch", "--config", config, "--json", *self._world.operator,
                stdin=asyncio.subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
                env=os.environ | {MARK: self._world.mark},
            )  # fmt: skip
        self.started_at = time.monotonic()
        self._world.clients[self.name] = self._process.pid
        code = await self._process.wait()
        self._world.clients.pop(self.name, None)
        return code

    def kill(self) -> int:
        """SIGKILL to the command; its pid."""
        assert self._process is not None
        self.killed = True
        self.kills += 1
        self._process.send_signal(signal.SIGKILL)
        return self._process.pid
