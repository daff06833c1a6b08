"""A host of the simulated cluster: each life of its process has an event loop of its own."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import TYPE_CHECKING, Any

from sim_loop import DEAD, NodeLoop

if TYPE_CHECKING:
    from sim_world import World

TTL = 5.0
HEARTBEAT = 1.0
SELF_FENCE = 4.0
ORPHAN_GRACE = 20.0


class Node:
    """A host. `start` begins a life of its process; `crash` ends it; `suspend_clock` is what a boot clock adds."""

    def __init__(self, world: World, name: str, rate: float) -> None:
        self.world = world
        self.name = name
        self.rate = rate
        self.wall_offset_ms = 0
        self.lives = 0
        self.lag = 0.0
        self.woke_at = float("-inf")
        self.loop = NodeLoop(world.scheduler, name)
        self.loop.kill()

    @property
    def alive(self) -> bool:
        return self.loop.state != DEAD

    def start(self) -> None:
        if self.alive or self.world.over:
            return
        self.lives += 1
        self.loop = self.world.scheduler.loop(self.name, start=100.0 * self.lives, rate=self.rate)
        self.loop.lag = self.lag
        self.loop.call_soon(self._begin)

    def _begin(self) -> None:
        raise NotImplementedError

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """A task whose failure is a finding."""
        self.loop.create_task(work).add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        error = None if task.cancelled() else task.exception()
        if error is not None:
            self.world.crashed(self.name, error)

    def crash(self) -> None:
        self.loop.kill()
        self.world.network.gone(self.name)

    def restart_in(self, seconds: float) -> None:
        self.world.later(seconds, self.start)

    def set_lag(self, seconds: float) -> None:
        self.lag = self.loop.lag = seconds
