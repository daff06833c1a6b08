"""Requests to a server: limits a minute, requests in flight, pauses. Time passes only where somebody waits for it."""

from __future__ import annotations

import asyncio

import pytest
from rollout_worker.backends import pacing
from rollout_worker.backends.pacing import Pace


class Clock:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        monkeypatch.setattr(pacing.asyncio, "sleep", self._sleep)

    async def _sleep(self, seconds: float) -> None:
        self.now += seconds

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


async def begun(pace: Pace, count: int, tokens: float = 0) -> list[float]:
    times: list[float] = []
    for _ in range(count):
        times.append(await pace.enter(tokens))
        pace.leave()
    return times


def most_a_minute(times: list[float]) -> int:
    return max(sum(start <= at < start + 60 for at in times) for start in times)


async def test_no_minute_has_more_requests_than_the_limit(clock: Clock) -> None:
    times = await begun(Pace(8, requests_per_minute=50, clock=clock), 200)
    assert most_a_minute(times) <= 51 and times[-1] - times[0] < 4 * 60


async def test_a_pause_saves_nothing_up(clock: Clock) -> None:
    pace = Pace(8, requests_per_minute=50, clock=clock)
    first = await begun(pace, 10)
    clock.now += 600
    assert most_a_minute(first + await begun(pace, 200)) <= 51


async def test_a_process_that_takes_over_does_not_begin_with_a_burst(clock: Clock) -> None:
    times = await begun(Pace(8, requests_per_minute=50, clock=clock), 40)
    times += await begun(Pace(8, requests_per_minute=50, clock=clock), 100)
    assert most_a_minute(times) <= 52


async def test_tokens_that_were_not_used_are_given_back(clock: Clock) -> None:
    pace = Pace(8, tokens_per_minute=1000, clock=clock)
    times: list[float] = []
    for _ in range(40):
        times.append(await pace.enter(500))
        pace.used(500, 100)
        pace.leave()
    assert most_a_minute(times) * 100 <= 1500 and times[-1] - times[0] < 5 * 60


async def test_a_request_larger_than_the_limit_goes_in_the_end(clock: Clock) -> None:
    times = await begun(Pace(8, tokens_per_minute=100, clock=clock), 3, tokens=300)
    assert [round(at - times[0]) for at in times] == [0, 180, 360]


async def test_overload_halves_what_is_in_flight_and_answers_raise_it(clock: Clock) -> None:
    pace = Pace(64, clock=clock)
    began = await pace.enter(0)
    for _ in range(10):
        pace.overloaded(began)  # all of one burst say it
    assert pace.limit == 32
    clock.now += 1
    pace.overloaded(clock.now)
    assert pace.limit == 16
    for _ in range(2000):
        pace.answered()
    assert pace.limit == 64


async def test_no_more_are_in_flight_than_may_be_and_they_come_in_order(clock: Clock) -> None:
    pace, order = Pace(2, clock=clock), list[int]()

    async def one(number: int) -> None:
        await pace.enter(0)
        order.append(number)

    tasks = [asyncio.create_task(one(number)) for number in range(5)]
    for left in (3, 2, 1):
        for _ in range(20):
            await asyncio.wait([asyncio.create_task(_nothing())])
        assert order == list(range(5 - left))
        pace.leave()
    tasks[-1].cancel()
    await asyncio.gather(*tasks[:-1])
    assert order == [0, 1, 2, 3]


async def _nothing() -> None: ...


async def test_what_is_held_begins_when_that_is_taken_back(clock: Clock) -> None:
    pace = Pace(8, clock=clock)
    pace.hold(True)
    waiting = asyncio.create_task(pace.enter(0))
    await asyncio.wait([asyncio.create_task(_nothing())])
    assert not waiting.done()
    pace.hold(False)
    await waiting


async def test_a_pause_holds_everybody(clock: Clock) -> None:
    pace = Pace(8, clock=clock)
    pace.pause(30)
    assert await begun(pace, 3) == [130.0, 130.0, 130.0]
