"""Faults of one worker that has work in flight."""

from __future__ import annotations

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


class StopWorker(Stop):
    longer_s = (1.0, 2.5)

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
