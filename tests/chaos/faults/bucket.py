"""The coordinators' way to the bucket: cut, slow, reset."""

from __future__ import annotations

from chaos.faults.fault import Aim, Fault
from chaos.faults.links import Cut, Reset, Slow


async def _aim(fault: Cut | Slow | Reset) -> Aim | None:
    assert isinstance(fault, Fault) and fault.world.bucket is not None
    fault.links = fault.world.bucket.links
    places = await fault._all_in_flight()  # pyright: ignore[reportPrivateUsage]
    return Aim("bucket", places) if places and fault.links else None


class CutBucket(Cut):
    """A black hole, in both directions or one: requests that arrive and are never answered, too."""

    async def aim(self) -> Aim | None:
        self.one_way = self.dice.random() < 0.5
        return await _aim(self)


class SlowBucket(Slow):
    async def aim(self) -> Aim | None:
        return await _aim(self)


class ResetBucket(Reset):
    async def aim(self) -> Aim | None:
        return await _aim(self)
