"""Faults of PostgreSQL, and of the leader's way to it."""

from __future__ import annotations

import asyncio

import psutil

from chaos.faults.fault import Aim, Fault
from chaos.faults.links import Cut
from chaos.world import TTL_S


class KillDatabase(Fault):
    """SIGKILL of every process of PostgreSQL; started again within two seconds."""

    async def aim(self) -> Aim | None:
        if self.world.database_down:
            return None
        places = await self._all_in_flight()
        return Aim("database", places) if places else None

    async def strike(self) -> None:
        self.pids = await self.world.kill_database()

    async def hold(self) -> None:
        await asyncio.sleep(self.dice.uniform(0.0, 2.0))

    async def heal(self) -> None:
        self.gone = not any(psutil.pid_exists(pid) for pid in self.pids[:1])
        await self.world.start_database()

    def effect(self) -> str:
        return f"SIGKILL of {len(self.pids)} processes" if self.gone else ""


class CutDatabase(Cut):
    """The leader from its database, in both directions or one."""

    up_to_s = TTL_S + 3.0

    async def aim(self) -> Aim | None:
        leader = self._leader()
        if leader is None or self._standby() is None or self.world.database_down:
            return None
        self.one_way = self.dice.random() < 0.5
        self.links = list(self.world.database_fronts[leader.name].links.values())
        places = await self._all_in_flight()
        return Aim(f"{leader.name} - database", places) if places else None
