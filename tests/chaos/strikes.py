"""Strikes one fault after another, each while work is in flight, and measures what comes of it."""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections import Counter, deque
from collections.abc import Callable

from chaos.faults import KINDS
from chaos.faults.fault import Aim, Fault, Scene
from chaos.ledger_reader import AwayError, snapshot, without_result
from chaos.report import Report, Struck

OVERLAP = 0.2
AIM_S = 45.0
STALL_S = 60.0
REPEATS = 10


def plan(kinds: list[str], faults: int, seed: int) -> list[tuple[str, bool]]:
    """(kind, whether it strikes before the last one is over): round after round of every kind, in random order."""
    dice = random.Random(seed)
    drawn: list[str] = []
    while len(drawn) < faults:
        drawn += dice.sample(kinds, len(kinds))
    return [(kind, n > 0 and dice.random() < OVERLAP) for n, kind in enumerate(drawn[:faults])]


class Strikes:
    """`run`, then `close` however that ended. `check` is called before each strike and raises what ends the campaign."""

    def __init__(
        self,
        scene: Scene,
        report: Report,
        faults: int,
        minutes: float,
        say: Callable[[str], None],
        check: Callable[[], None],
    ) -> None:
        self._scene = scene
        self._world, self._watcher = scene.world, scene.watcher
        self._report = report
        self._plan = plan(list(KINDS[report.database]), faults, report.seed)
        self._faults = faults
        self._minutes = minutes
        self._say = say
        self._check = check
        self._going: set[asyncio.Task[None]] = set()
        self._again: list[str] = []
        self._repeats: Counter[str] = Counter()

    async def run(self) -> None:
        """Returns when every fault of the plan has counted or was tried too often, or time is up."""
        waiting = deque(self._plan)
        number = 0
        until = time.monotonic() + 60 * self._minutes
        while time.monotonic() < until:
            if not waiting:
                await self._quiet()
                waiting.extend((kind, False) for kind in self._again)
                self._again.clear()
            if not waiting:
                break
            self._check()
            kind, overlaps = waiting.popleft()
            number += 1
            await self._strike(number, kind, overlaps)
            if not overlaps and not (waiting and waiting[0][1]):
                await self._quiet()
        await self._quiet()

    async def _strike(self, number: int, kind: str, overlaps: bool) -> None:
        """Returns once it struck; what holds, heals and measures goes on in `_going`."""
        dice = random.Random(f"{self._report.seed}/{number}")
        if overlaps and self._going:
            await asyncio.sleep(dice.uniform(0.2, 1.0))
        else:
            await self._quiet()
        fault = KINDS[self._report.database][kind](self._scene, dice)
        aim = await self._aim(fault)
        if aim is None:
            self._say(f"{self._report.database}: {kind}: nothing in flight to strike")
            self._repeat(kind)
            return
        hit = asyncio.Event()
        struck = Struck(number, kind, overlaps=bool(self._going))
        task = asyncio.create_task(self._carry_out(fault, aim, struck, hit))
        self._going.add(task)
        task.add_done_callback(self._done)
        await hit.wait()

    def _repeat(self, kind: str) -> None:
        """One that did not count is tried again, not for ever."""
        self._repeats[kind] += 1
        if self._repeats[kind] <= REPEATS:
            self._again.append(kind)
        else:
            self._world.object_to(f"{kind}: {REPEATS} tries did not count")

    def _done(self, task: asyncio.Task[None]) -> None:
        self._going.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._world.object_to(f"a fault of the campaign itself: {error!r}")

    async def _quiet(self) -> None:
        while self._going:
            await asyncio.wait(self._going)

    async def _aim(self, fault: Fault) -> Aim | None:
        deadline = time.monotonic() + AIM_S
        while time.monotonic() < deadline:
            with contextlib.suppress(AwayError):
                if (aim := await fault.aim()) is not None:
                    return aim
            await asyncio.sleep(0.1)
        return None

    async def _carry_out(self, fault: Fault, aim: Aim, struck: Struck, hit: asyncio.Event) -> None:
        struck.target, struck.at = aim.target, time.time()
        committed, began = self._watcher.committed, time.monotonic()
        try:
            await fault.strike()
            hit.set()
            struck.in_flight = len(aim.places)
            with contextlib.suppress(AwayError):
                # What still has no result now was in flight when it struck.
                struck.in_flight = len(await without_result(self._world.reader, aim.places))
                seen = await snapshot(self._world.reader)
                committed = max(committed, seen.committed if seen else 0)
            moving = asyncio.create_task(self._first_commit(committed, began))
            await fault.hold()
        finally:
            hit.set()
            await asyncio.shield(fault.heal())
        struck.held_s = time.monotonic() - began
        struck.first_commit_s = await moving
        struck.settled_s = await self._settled(aim.places, began)
        struck.effect, struck.blames = fault.effect(), fault.blames
        struck.counted = bool(struck.effect) and struck.in_flight > 0
        struck.overlaps = struck.overlaps or len(self._going) > 1
        self._report.faults.append(struck)
        if not struck.counted:
            self._repeat(struck.kind)
        counted = sum(1 for f in self._report.faults if f.counted)
        self._say(
            f"{self._report.database:8} {counted:3}/{self._faults} {struck.kind:24} {struck.target:24} "
            f"{struck.in_flight:3} in flight, held {struck.held_s:4.1f} s, first commit {struck.first_commit_s:4.1f} s, "
            f"settled {struck.settled_s:4.1f} s; {struck.effect or 'NO EFFECT, does not count'}"
            f"{' (overlapping)' if struck.overlaps else ''}"
        )

    async def _first_commit(self, committed: int, began: float) -> float:
        if not await self._watcher.until(lambda: self._watcher.committed > committed, STALL_S):
            self._world.object_to(f"nothing was committed for {STALL_S:.0f} s after a fault at {committed} rows")
        return time.monotonic() - began

    async def _settled(self, places: set[tuple[int, int]], began: float) -> float:
        """Seconds until every row that was in flight has its result."""
        left = places
        while left:
            if time.monotonic() - began > 2 * STALL_S:
                self._world.object_to(f"{len(left)} rows that a fault struck have no result, e.g. {min(left)}")
                break
            await asyncio.sleep(0.1)
            with contextlib.suppress(AwayError):
                left = await without_result(self._world.reader, left)
        return time.monotonic() - began

    async def close(self) -> None:
        """Ends what still holds; each fault heals what it struck."""
        for task in self._going:
            task.cancel()
        await asyncio.gather(*self._going, return_exceptions=True)
