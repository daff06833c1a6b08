"""Views of runs for clients: live ones from the core, ended ones from the ledger, shared between concurrent callers."""

from __future__ import annotations

import asyncio

from rollout.model.errors import NotFoundError
from rollout.model.ids import is_ulid
from rollout.model.run import ENDED

from rollout_coordinator.clock import Clock
from rollout_coordinator.core.views import RunView, WorkerView
from rollout_coordinator.driver import Driver
from rollout_coordinator.ledger.ledger import Ledger

CACHE_MAX = 1000


class RunViews:
    """Asks the driver once for any number of concurrent watchers."""

    def __init__(self, driver: Driver, ledger: Ledger, clock: Clock) -> None:
        self._driver = driver
        self._ledger = ledger
        self._clock = clock
        self._cache: dict[str, tuple[float, RunView]] = {}
        self._asking: dict[str, asyncio.Task[RunView]] = {}

    async def get(self, run_id: str, max_age: float = 0.0) -> RunView:
        """Return a view at most `max_age` seconds old. Raises NotFoundError."""
        cached = self._cache.get(run_id)
        if cached is not None and max_age > 0 and self._clock.now().mono - cached[0] <= max_age:
            return cached[1]
        if max_age <= 0:
            return await self._read(run_id)
        task = self._asking.get(run_id)
        if task is None:
            task = self._asking[run_id] = asyncio.create_task(self._read(run_id))
            task.add_done_callback(lambda done: self._done(run_id, done))
        return await asyncio.shield(task)

    def _done(self, run_id: str, task: asyncio.Task[RunView]) -> None:
        self._asking.pop(run_id, None)
        if not task.cancelled():
            task.exception()  # retrieved, also when every watcher went away meanwhile

    async def _read(self, run_id: str) -> RunView:
        asked = self._clock.now().mono
        view = await self._driver.query(lambda core, now: core.run_view(run_id))
        if view is None and is_ulid(run_id):
            view = await self._ledger.run_view(run_id)
        if view is None:
            raise NotFoundError(
                f"there is no run {run_id!r} in this cluster, or it was deleted; `rollout run list`, with the same "
                "options, lists the runs"
            )
        if len(self._cache) >= CACHE_MAX:
            self._cache.clear()
        self._cache[run_id] = (asked, view)
        return view

    async def newest(self, states: tuple[str, ...], limit: int) -> list[RunView]:
        """Return views, the newest first, including ended runs."""
        live = {v.spec.run_id: v for v in await self._driver.query(lambda core, now: core.run_views())}
        stored = await self._ledger.run_views(states, limit)
        views = {v.spec.run_id: v for v in stored if v.spec.run_id not in live or v.state in ENDED}
        views.update({run_id: v for run_id, v in live.items() if not states or str(v.state) in states})
        return sorted(views.values(), key=lambda v: (v.created_ms, v.spec.run_id), reverse=True)[:limit]

    async def workers(self) -> list[WorkerView]:
        return await self._driver.query(lambda core, now: core.worker_views(now))

    def forget(self, run_id: str) -> None:
        self._cache.pop(run_id, None)
