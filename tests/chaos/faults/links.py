"""Links of one node or of the leader: cut, slow, reset."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from chaos.faults.fault import Aim, Fault
from chaos.links import DOWN, UP, Link, Shape
from chaos.world import TTL_S


class Cut(Fault):
    """A black hole on some links, in both directions or one."""

    links: Sequence[Link]
    one_way = False
    up_to_s = TTL_S + 2.5

    async def strike(self) -> None:
        self.directions = (self.dice.choice((UP, DOWN)),) if self.one_way else (UP, DOWN)
        self.before = [(link.held_bytes, link.held_connections) for link in self.links]
        for link in self.links:
            link.cut(*self.directions)

    async def hold(self) -> None:
        self.held_s = self.dice.uniform(0.5, self.up_to_s)
        await asyncio.sleep(self.held_s)

    async def heal(self) -> None:
        for link in self.links:
            link.heal()

    def effect(self) -> str:
        held = sum(link.held_bytes - b for link, (b, _) in zip(self.links, self.before, strict=True))
        waiting = sum(link.held_connections - c for link, (_, c) in zip(self.links, self.before, strict=True))
        way = (
            "both ways"
            if len(self.directions) == 2
            else "to the server"
            if UP in self.directions
            else "from the server"
        )
        return f"{way}, {held} bytes and {waiting} new connections held" if held or waiting else ""


class OnLinks(Fault):
    """Strikes every link of one worker, or of the leader."""

    async def _aim_at(self, *, leading: bool) -> Aim | None:
        if leading:
            leader, places = self._leader(), await self._all_in_flight()
            if leader is None or not places:
                return None
            self.links = list(self.world.fronts[leader.name].links.values())
            return Aim(leader.name, places)
        found = await self._a_worker()
        if found is None:
            return None
        daemon, places = found
        self.links = [front.link(daemon.name) for front in self.world.fronts.values()]
        return Aim(daemon.name, places)


class Slow(OnLinks):
    """Delay, little bandwidth and stalls."""

    async def aim(self) -> Aim | None:
        return await self._aim_at(leading=self.dice.random() < 0.3)

    async def strike(self) -> None:
        self.before = sum(link.slowed_bytes for link in self.links), sum(link.slowed_s for link in self.links)
        self.shape = Shape(
            delay_s=self.dice.uniform(0.05, 0.3),
            jitter_s=self.dice.uniform(0.0, 0.2),
            bytes_per_s=self.dice.choice((20_000, 100_000, 1_000_000)),
            stall_rate=self.dice.uniform(0.0, 0.1),
            stall_s=self.dice.uniform(0.2, 0.8),
        )
        for link in self.links:
            link.shape = self.shape

    async def hold(self) -> None:
        await asyncio.sleep(self.dice.uniform(2.0, 4.0))

    async def heal(self) -> None:
        for link in self.links:
            link.heal()

    def effect(self) -> str:
        size = sum(link.slowed_bytes for link in self.links) - self.before[0]
        waited = sum(link.slowed_s for link in self.links) - self.before[1]
        return f"{size} bytes delayed, {self.shape.delay_s * 1000:.0f} ms and more each" if size and waited else ""


class Reset(OnLinks):
    """RST on every connection of one worker, or of the leader; where there is none, it does not count."""

    count = 0

    async def aim(self) -> Aim | None:
        return await self._aim_at(leading=self.dice.choice(("worker", "worker", "leader")) == "leader")

    async def strike(self) -> None:
        self.count = sum(link.reset() for link in self.links)

    def effect(self) -> str:
        return f"{self.count} connections reset" if self.count else ""
