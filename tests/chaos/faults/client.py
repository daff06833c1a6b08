"""Faults of a client in the middle of its batch."""

from __future__ import annotations

import signal
import time

from chaos.clients import Client
from chaos.faults.fault import Aim, Fault, Place
from chaos.ledger_reader import in_flight


class KillClient(Fault):
    """SIGKILL of `rollout infer batch` while its run is under way; the same command is typed again."""

    async def aim(self) -> Aim | None:
        latest = self.watcher.latest
        held = await in_flight(self.world.reader)
        candidates: list[tuple[Client, set[Place]]] = []
        for client in self.clients:
            run = client.batch.run_id if client.batch and client.process else ""
            log = latest.logs.get(run) if latest else None
            places = {(at, seq) for keys in held.values() for at, seq in keys if at == log}
            # One that has only just begun again is left to connect.
            if places and time.monotonic() - client.started_at > 1.0 and latest and latest.states.get(run) == "running":
                candidates.append((client, places))
        if not candidates:
            return None
        self.client, places = self.dice.choice(candidates)
        return Aim(self.client.name, places)

    async def strike(self) -> None:
        assert self.client.process is not None
        process = self.client.process
        self.starts = self.client.batch.starts if self.client.batch else 0
        self.client.kill()
        self.code = await process.wait()

    async def heal(self) -> None:
        batch = self.client.batch
        assert batch is not None
        if not await self.watcher.until(lambda: batch.starts > self.starts, 10.0):
            self.world.object_to(f"{self.client.name} was not started again")

    def effect(self) -> str:
        return "SIGKILL, started again" if self.code == -signal.SIGKILL else ""
