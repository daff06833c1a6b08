"""Chooses the replica for a request: the one whose engine has cached the prompt's prefix, unless it is much busier than
others.

Pure: no clock, no I/O. The counts are the gateway's own, of requests that it sent and that have not ended.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

Replica = tuple[int, int, int]
"""Log, seq and attempt of the replica's item (`rollout.client.relay.Replica`)."""
REMEMBERED = 1 << 15
"""Number of prompt prefixes whose engine is remembered."""
SLACK = 4
"""An engine is preferred for a known prefix while it has at most this many requests more than the least busy engine, or
half as many again if that is more."""


@dataclass(slots=True)
class Place:
    """A running replica. Replicas with the same `engine` share one process."""

    engine: str
    draining: bool = False
    in_flight: int = 0


class Router:
    """Chooses replicas. `most` is the maximum number of requests of an engine at once."""

    def __init__(self, most: int) -> None:
        self.most = most
        self._places: dict[Replica, Place] = {}
        self._seen: OrderedDict[int, str] = OrderedDict()
        self._turn = 0

    @property
    def replicas(self) -> list[Replica]:
        """Replicas that take requests."""
        return [replica for replica, place in self._places.items() if not place.draining]

    @property
    def up_count(self) -> int:
        """Number of running replicas, including draining ones."""
        return len(self._places)

    @property
    def engines(self) -> dict[str, int]:
        """Number of requests at each engine that takes some."""
        counts: dict[str, int] = {}
        for place in self._places.values():
            counts[place.engine] = counts.get(place.engine, 0) + place.in_flight
        taking = {place.engine for place in self._places.values() if not place.draining}
        return {engine: count for engine, count in counts.items() if engine in taking}

    def up(self, replica: Replica, engine: str) -> None:
        self._places[replica] = Place(engine)

    def takes(self, replica: Replica) -> str | None:
        """Return the replica's engine if it takes requests."""
        place = self._places[replica]
        return None if place.draining else place.engine

    def drain(self, replica: Replica) -> None:
        """Send the replica no further requests; it finishes those it has."""
        if replica in self._places:
            self._places[replica].draining = True

    def down(self, replica: Replica) -> None:
        """Forget a replica and its requests."""
        gone = self._places.pop(replica, None)
        if gone is not None and all(place.engine != gone.engine for place in self._places.values()):
            for block in [block for block, engine in self._seen.items() if engine == gone.engine]:
                del self._seen[block]

    def choose(self, blocks: Sequence[int] = (), avoid: Replica | None = None) -> Replica | None:
        """Choose a replica for a prompt with these running hashes (`infer.prefix.blocks_of`); `begin` counts the
        request. The engine of `avoid` is used only if there is no other. Returns None if all engines are full or there
        is none."""
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
        """Count a request out. Requests of a replica that is down are not counted any more."""
        if replica in self._places:
            self._places[replica].in_flight -= 1

    def _of(self, engine: str) -> Replica:
        taking = [(place.in_flight, key) for key, place in self._places.items() if place.engine == engine]
        return min((count, key) for count, key in taking if not self._places[key].draining)[1]
