"""Those who submit and read, and those who give orders: production `Runs` on both."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Any, cast

from rollout.client.runs import Runs
from rollout.model.errors import RolloutError, StateError, StorageFullError, UnavailableError
from rollout.model.item import NewItem
from rollout.model.run import Order, RunSpec
from sim_certificates import SimCredentials, ulid
from sim_executors import EXECUTORS, section
from sim_node import Node
from sim_scenario import RunPlan

if TYPE_CHECKING:
    from sim_world import World

CONFIG = json.dumps({"executors": {name: section(name) for name in EXECUTORS}}).encode()


class ClientNode(Node):
    """Submits its runs and reads their commit logs; what it has read is on its disk and survives it."""

    def __init__(self, world: World, name: str) -> None:
        super().__init__(world, name, 1.0)
        self.plans: list[tuple[str, RunPlan]] = []
        self.cursors: dict[str, int] = {}
        self.done: set[str] = set()

    def _begin(self) -> None:
        credentials = cast(Any, SimCredentials("operator", ulid(1)))
        runs = Runs(
            self.world.addresses,
            credentials,
            patience_s=1000.0,
            dial=self.world.dial(self.loop),
            jitter=self.world.jitter,
        )
        for run_id, how in self.plans:
            if run_id not in self.done:
                self.spawn(self._submit(runs, run_id, how))
                self.spawn(self._watch(runs, run_id))

    async def _submit(self, runs: Runs, run_id: str, how: RunPlan) -> None:
        await asyncio.sleep(max(0.0, how.at - self.world.scheduler.now))
        ids = self.world.ids(run_id)
        items = [
            NewItem(ids[n], act.payload(), how.specs[index]) for n, (act, index) in enumerate(how.items)
        ]  # fmt: skip
        spec = run_spec(run_id, how)
        while True:
            try:
                await runs.submit(
                    spec, lambda seq: items[seq:], progress=lambda n: self.world.checker.acknowledged_submit(run_id, n)
                )
                return
            except StateError as error:  # the run has ended meanwhile: killed, failed or stopped early
                if not self.world.is_known(run_id):
                    raise self.world.violation("submit", f"{run_id}: {error}") from error
                if self.world.final(run_id):
                    return
                await asyncio.sleep(0.5)  # somebody will continue it
            except StorageFullError:
                await asyncio.sleep(1.0)  # the user makes room and gives the same command again

    async def _watch(self, runs: Runs, run_id: str) -> None:
        await asyncio.sleep(max(0.0, self.world.opened_at(run_id) + 0.2 - self.world.scheduler.now))
        while run_id not in self.done:
            try:
                async for page in runs.watch(run_id, self.cursors.get(run_id, 0), payloads=False):
                    self.world.checker.page(run_id, page.entries)
                    self.cursors[run_id] = self.cursors.get(run_id, 0) + len(page.entries)
                    if page.last and self.world.final(run_id):
                        self.done.add(run_id)
                        self.world.finished(run_id)
            except UnavailableError:
                raise
            except RolloutError as error:
                if error.code not in ("not_found", "storage_full"):
                    raise
            await asyncio.sleep(0.5)


class OperatorNode(Node):
    """Gives the scenario's commands."""

    def __init__(self, world: World) -> None:
        super().__init__(world, "op", 1.0)
        self.runs: Runs = cast(Any, None)

    def _begin(self) -> None:
        credentials = cast(Any, SimCredentials("operator", ulid(2)))
        self.runs = Runs(
            self.world.addresses,
            credentials,
            patience_s=1000.0,
            dial=self.world.dial(self.loop),
            jitter=self.world.jitter,
        )

    async def verb(self, run_id: str, verb: str, priority: int = 0) -> bool:
        """Whether it was obeyed; a run in another state says no."""
        while True:
            try:
                await self.runs.command(run_id, verb, priority=priority)
            except StorageFullError:
                await asyncio.sleep(1.0)
            except RolloutError as error:
                if error.code in ("wrong_state", "not_found"):
                    return False
                raise
            else:
                return True


def run_spec(run_id: str, how: RunPlan) -> RunSpec:
    return RunSpec(
        run_id, how.kind, CONFIG if how.mixed else b"{}", order=Order(how.order), priority=how.priority, max_in_flight=how.max_in_flight,
        lanes=how.lanes, policies=how.policies, pause_timeout_ms=how.pause_timeout_ms,
        one_worker=how.one_worker,
    )  # fmt: skip
