"""Faults of one worker that has work in flight."""

from __future__ import annotations

import psutil

from chaos.faults.fault import Aim, Place
from chaos.faults.links import Cut
from chaos.faults.signals import Kill, Stop
from chaos.ledger_reader import in_flight


class KillWorker(Kill):
    async def aim(self) -> Aim | None:
        found = await self._a_worker()
        if found is None:
            return None
        self.daemon, _ = found
        self.choose_victims()
        held = await in_flight(self.world.reader)
        places = held.get(self.daemon.incarnations()[-1], set[Place]())
        self.blames = self.daemon.name
        return Aim(self.daemon.name, places) if places else None


FROZEN = "stopped as a whole"


class StopWorker(Stop):
    """With all its processes, as a machine that stands still; or its daemon alone, whose processes go on."""

    def victims(self) -> list[psutil.Process]:
        self.whole = self.dice.random() < 0.5
        self.longer_s = (1.0, 2.5) if self.whole else (3.0, 6.0)  # what is given to others has begun there by then
        return super().victims() if self.whole else [psutil.Process(self.daemon.pid)]

    def effect(self) -> str:
        if not self.was_stopped:
            return ""
        return FROZEN if self.whole else "its daemon stopped, its processes went on"

    async def aim(self) -> Aim | None:
        found = await self._a_worker()
        if found is None:
            return None
        self.daemon, places = found
        self.blames = self.daemon.name
        return Aim(self.daemon.name, places)


class CutWorker(Cut):
    """One worker from every coordinator."""

    async def aim(self) -> Aim | None:
        found = await self._a_worker()
        if found is None:
            return None
        daemon, places = found
        self.blames = daemon.name
        self.links = [front.link(daemon.name) for front in self.world.fronts.values()]
        return Aim(daemon.name, places)


class CutWorkerOneWay(CutWorker):
    one_way = True


class CutWorkerSomehow(CutWorker):
    async def aim(self) -> Aim | None:
        self.one_way = self.dice.random() < 0.5
        return await super().aim()
