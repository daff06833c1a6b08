"""Looks at the ledger several times a second while faults strike: what one look tells and what two must agree on."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from typing import Any

from chaos.checker.looks import compare, consistent
from chaos.clients import Client
from chaos.ledger_reader import AwayError, Snapshot, snapshot
from chaos.world import World

EVERY_S = 0.1


class Watcher:
    """`latest`, and `moved_at`: when the commit log was last seen to grow. Objections go to the world."""

    def __init__(self, world: World, clients: list[Client]) -> None:
        self.latest: Snapshot | None = None
        self.looks = 0
        self.moved_at = time.monotonic()
        self.longest_pause_s = 0.0
        self._world = world
        self._clients = clients
        self._claimed: set[str] = set()

    async def run(self) -> None:
        self.moved_at = time.monotonic()
        while True:
            await asyncio.sleep(EVERY_S)
            claims = self._claims()  # read before the ledger: what they claim must already be there
            try:
                seen = await snapshot(self._world.reader)
            except AwayError:
                continue
            if seen is None:
                continue
            self.looks += 1
            for objection in [*consistent(seen), *(compare(self.latest, seen) if self.latest else [])]:
                self._world.object_to(f"at look {self.looks}: {objection}")
            for run_id, claim in claims:
                if seen.states.get(run_id) != claim["state"]:
                    self._world.object_to(
                        f"summary.json of {run_id} says {claim['state']}, the ledger {seen.states.get(run_id)}"
                    )
            now, idle = time.monotonic(), "running" not in seen.states.values()
            if idle or self.latest is None or seen.committed > self.latest.committed:
                if not idle and self.latest is not None and self.latest.committed:
                    self.longest_pause_s = max(self.longest_pause_s, now - self.moved_at)
                self.moved_at = now
            self.latest = seen

    def _claims(self) -> list[tuple[str, dict[str, Any]]]:
        """Summaries of batches under way that were not there before."""
        found: list[tuple[str, dict[str, Any]]] = []
        for client in self._clients:
            batch = client.batches[-1] if client.batches else None
            if batch is None or batch.run_id in self._claimed:
                continue
            path = batch.output / "summary.json"
            if path.exists():
                claim = json.loads(path.read_text())
                if claim["state"] == "completed":
                    self._claimed.add(batch.run_id)
                found.append((batch.run_id, claim))
        return found

    @property
    def committed(self) -> int:
        return self.latest.committed if self.latest else 0

    @property
    def epoch(self) -> int:
        return self.latest.epoch if self.latest else -1

    async def until(self, condition: Callable[[], bool], timeout_s: float) -> bool:
        """Whether it came true in time."""
        deadline = time.monotonic() + timeout_s
        while not condition():
            if time.monotonic() > deadline:
                return False
            await asyncio.sleep(EVERY_S / 2)
        return True
