"""Faults of the coordinators: the one that leads, the one that stands by."""

from __future__ import annotations

import asyncio

from chaos.faults.fault import Aim
from chaos.faults.links import Cut
from chaos.faults.signals import Kill, Stop
from chaos.world import FENCED

TAKEOVER_S = 30.0
FENCED_EXIT_S = 30.0
STOOD_DOWN = ("coordinator_fenced", "lease_lost", "coordinator_standby")


class KillLeader(Kill):
    async def aim(self) -> Aim | None:
        leader = self._leader()
        if leader is None or (len(self.world.coordinators) > 1 and self._standby() is None):
            return None
        self.daemon = leader
        self.choose_victims()
        places = await self._all_in_flight()
        return Aim(leader.name, places) if places else None


class KillStandby(Kill):
    async def aim(self) -> Aim | None:
        standby = self._standby()
        if standby is None:
            return None
        self.daemon = standby
        self.choose_victims()
        places = await self._all_in_flight()
        return Aim(standby.name, places) if places else None


class StopCoordinator(Stop):
    """The only one there is: everybody waits for it."""

    async def aim(self) -> Aim | None:
        leader = self._leader()
        if leader is None:
            return None
        self.daemon = leader
        places = await self._all_in_flight()
        return Aim(leader.name, places) if places else None


class StopLeader(StopCoordinator):
    """Until the standby has taken over; the old leader must then fence itself."""

    took_over = fenced = False

    async def aim(self) -> Aim | None:
        return await super().aim() if self._standby() is not None else None

    async def strike(self) -> None:
        self.epoch = self.watcher.epoch
        await super().strike()

    async def hold(self) -> None:
        self.took_over = await self.watcher.until(lambda: self.watcher.epoch > self.epoch, TAKEOVER_S)
        await asyncio.sleep(self.dice.uniform(0, 1))

    async def heal(self) -> None:
        known, events = len(self.world.exits), len(self.daemon.read_log())
        await super().heal()
        if not self.took_over:
            self.world.object_to(f"nobody took over from {self.daemon.name} within {TAKEOVER_S:.0f} s")
            return

        def gone() -> bool:
            if any(e["name"] == self.daemon.name and e["code"] == FENCED for e in self.world.exits[known:]):
                return True
            # One that could not ask its database yet gives up by its own clock, and stands by.
            return any(e["event"] in STOOD_DOWN for e in self.daemon.read_log()[events:])

        self.fenced = await self.watcher.until(gone, FENCED_EXIT_S)
        if not self.fenced:
            self.world.object_to(f"{self.daemon.name} was deposed and did not step down within {FENCED_EXIT_S:.0f} s")

    def effect(self) -> str:
        return "deposed, stepped down" if self.was_stopped and self.took_over and self.fenced else ""


class CutCoordinator(Cut):
    """The coordinator from everybody, in both directions or one."""

    blames = ""

    async def aim(self) -> Aim | None:
        leader = self._leader()
        if leader is None:
            return None
        self.one_way = self.dice.random() < 0.5
        self.links = list(self.world.fronts[leader.name].links.values())
        places = await self._all_in_flight()
        return Aim(leader.name, places) if places else None
