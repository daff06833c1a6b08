"""Which replica gets a request: that whose engine has seen the prompt's beginning, unless it has much more to do than
others.

Pure: no clock, no I/O. The counts are the gateway's own, of requests that it sent and that have not ended.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

Replica = tuple[int, int, int]
"""Log, seq and attempt of the item that answers (`rollout.client.relay.Replica`)."""
REMEMBERED = 1 << 15
"""Beginnings of prompts whose engine is remembered."""
SLACK = 4
"""Requests that an engine may have more than the least busy one, and half as many again, and is still preferred for the
beginning that it has seen."""


@dataclass(slots=True)
class Place:
    """A replica that is up. Replicas with the same `engine` share one process."""

    engine: str
    draining: bool = False
    in_flight: int = 0


class Router:
    """`most`: requests of an engine at once."""

    def __init__(self, most: int) -> None:
        self.most = most
        self._places: dict[Replica, Place] = {}
        self._seen: OrderedDict[int, str] = OrderedDict()
        self._turn = 0

    @property
    def replicas(self) -> list[Replica]:
        """Those that take requests."""
        return [replica for replica, place in self._places.items() if not place.draining]

    @property
    def up_count(self) -> int:
        """Replicas that are up, draining ones included."""
        return len(self._places)

    @property
    def engines(self) -> dict[str, int]:
        """Requests of each engine that takes some."""
        counts: dict[str, int] = {}
        for place in self._places.values():
            counts[place.engine] = counts.get(place.engine, 0) + place.in_flight
        taking = {place.engine for place in self._places.values() if not place.draining}
        return {engine: count for engine, count in counts.items() if engine in taking}

    def up(self, replica: Replica, engine: str) -> None:
        self._places[replica] = Place(engine)

    def takes(self, replica: Replica) -> str | None:
        """Its engine, if it takes requests."""
        place = self._places[replica]
        return None if place.draining else place.engine

    def drain(self, replica: Replica) -> None:
        """It gets no further requests, and finishes those that it has."""
        if replica in self._places:
            self._places[replica].draining = True

    def down(self, replica: Replica) -> None:
        """Its requests count no longer."""
        gone = self._places.pop(replica, None)
        if gone is not None and all(place.engine != gone.engine for place in self._places.values()):
            for block in [block for block, engine in self._seen.items() if engine == gone.engine]:
                del self._seen[block]

    def choose(self, blocks: Sequence[int] = (), avoid: Replica | None = None) -> Replica | None:
        """Where a request goes whose prompt has these running hashes (`infer.prefix.blocks_of`); `begin` counts it.
        `avoid`: not to its engine, if there is another. None: every engine has all that it may, or there is none."""
        counts = {engine: count for engine, count in self.engines.items() if count < self.most}
        if not counts:
            return None
        if avoid in self._places and len(counts) > 1:
            counts.pop(self._places[avoid].engine, None)
        least = min(counts.values())
        for block in reversed(blocks):
            engine = self._seen.get(block)
            if engine is not None and engine in counts and counts[engine] <= least + max(SLACK, least // 2):
                return self._of(engine)
        idle = sorted(engine for engine, count in counts.items() if count == least)
        self._turn += 1
        return self._of(idle[self._turn % len(idle)])

    def begin(self, replica: Replica, blocks: Sequence[int] = ()) -> None:
        place = self._places[replica]
        place.in_flight += 1
        for block in blocks:
            self._seen[block] = place.engine
            self._seen.move_to_end(block)
        while len(self._seen) > REMEMBERED:
            self._seen.popitem(last=False)

    def end(self, replica: Replica) -> None:
        """A request of it has ended; one of a replica that is down is no longer counted."""
        if replica in self._places:
            self._places[replica].in_flight -= 1

    def _of(self, engine: str) -> Replica:
        taking = [(place.in_flight, key) for key, place in self._places.items() if place.engine == engine]
        return min((count, key) for count, key in taking if not self._places[key].draining)[1]
