"""Leases are kept for as long as messages are held, and what is lost is told."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import replace
from typing import Any

import pytest
from rollout.model.errors import ConfigError, UnavailableError
from rollout.queues import Message, Outgoing
from rollout.queues.keeper import Keeper, Loss
from rollout.queues.local import LocalQueue
from test_queues import Clock, MemoryStorage

LEASE_S = 80.0


class Watched(LocalQueue):
    """Counts calls of `extend`; `fail` is raised by the next ones; `meanwhile` runs in each."""

    def __init__(self, clock: Clock) -> None:
        storage: Any = MemoryStorage()
        super().__init__(storage, now=clock)
        self.clock = clock
        self.calls: list[tuple[int, float]] = []
        self.fail: Exception | None = None
        self.meanwhile: Any = lambda: None

    async def extend(self, messages: list[Message], lease_s: float) -> list[Message]:
        self.calls.append((len(messages), lease_s))
        self.meanwhile()
        if self.fail is not None:
            raise self.fail
        return await super().extend(messages, lease_s)


class Rig:
    def __init__(self) -> None:
        self.clock = Clock()
        self.queue = Watched(self.clock)
        self.lost: list[tuple[list[bytes], Loss]] = []
        self.keeper = self.make()

    def make(self) -> Keeper:
        return Keeper(self.queue, LEASE_S, lambda m, why: self.lost.append(([x.body for x in m], why)), now=self.clock)

    async def take(self, count: int) -> list[Message]:
        await self.queue.enqueue([Outgoing(b"%d" % n) for n in range(count)])
        got = await self.queue.dequeue(count, LEASE_S)
        self.keeper.hold(got)
        return got

    async def pass_time(self, seconds: float) -> None:
        for _ in range(int(seconds // 10)):
            self.clock.s += 10
            await self.keeper.look()


@pytest.fixture
def rig() -> Rig:
    return Rig()


async def test_held_messages_stay_ours_for_hours(rig: Rig) -> None:
    got = await rig.take(5)
    await rig.pass_time(7200)
    assert await rig.queue.dequeue(9, 1.0) == []
    assert rig.lost == []
    assert all(call == (5, LEASE_S) for call in rig.queue.calls)
    assert len(rig.queue.calls) <= 7200 / (LEASE_S * 3 / 8)  # looks are an eighth of a lease apart
    assert await rig.queue.ack(got) == []


async def test_released_ones_are_not_extended(rig: Rig) -> None:
    got = await rig.take(3)
    rig.keeper.release(got[:2])
    rig.keeper.release(got[:1])
    await rig.pass_time(100)
    assert {count for count, _ in rig.queue.calls} == {1}
    assert [m.body for m in await rig.queue.dequeue(9, 1.0)] == [b"0", b"1"]


async def test_an_outage_is_survived_while_the_lease_runs(rig: Rig) -> None:
    await rig.take(2)
    rig.queue.fail = UnavailableError()
    await rig.pass_time(60)
    rig.queue.fail = None
    await rig.pass_time(200)
    assert rig.lost == []
    assert await rig.queue.dequeue(9, 1.0) == []


async def test_an_outage_beyond_the_lease_tells_what_is_lost(rig: Rig) -> None:
    await rig.take(2)
    rig.queue.fail = UnavailableError()
    await rig.pass_time(100)
    assert rig.lost == [([b"0", b"1"], "outage")]
    assert rig.keeper.held == 0


async def test_a_lease_that_somebody_else_has_is_told_once(rig: Rig) -> None:
    got = await rig.take(2)
    await rig.queue.nack(got[:1])
    await rig.pass_time(300)
    assert rig.lost == [([b"0"], "taken")]


async def test_what_is_released_while_it_is_extended_is_not_lost(rig: Rig) -> None:
    got = await rig.take(2)

    def acknowledge() -> None:
        rig.keeper.release(got)
        rig.queue._leased.clear()

    rig.queue.meanwhile = acknowledge
    await rig.pass_time(100)
    assert rig.lost == []


async def test_no_message_is_held_beyond_the_limit_of_the_service(rig: Rig) -> None:
    rig.queue.facts = replace(rig.queue.facts, max_held_s=600.0)
    rig.keeper = rig.make()
    start = rig.clock.s
    await rig.take(2)
    first = rig.queue.calls
    rig.queue.meanwhile = lambda: rig.clock.s - start + first[-1][1] <= 600.0 or pytest.fail("beyond the limit")
    await rig.pass_time(700)
    assert rig.lost == [([b"0", b"1"], "limit")]


async def test_a_permission_that_is_missing_ends_it(rig: Rig) -> None:
    await rig.take(1)
    rig.queue.fail = ConfigError("sqs:ChangeMessageVisibility")
    rig.clock.s += 50
    with pytest.raises(ConfigError):
        await rig.keeper.run()


async def test_it_ends_when_cancelled_and_begins_when_something_is_held(rig: Rig) -> None:
    task = asyncio.create_task(rig.keeper.run())
    await asyncio.sleep(0)
    assert not task.done()
    extended = asyncio.Event()
    rig.queue.meanwhile = extended.set
    await rig.take(1)
    rig.clock.s += 50
    await extended.wait()
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task
    assert task.cancelled()
