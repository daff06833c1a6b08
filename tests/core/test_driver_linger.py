"""When a worker tells its news: alone at once, in company together, to a busy coordinator less often."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest
from rollout_worker import session_events as ev
from rollout_worker.driver import Driver
from rollout_worker.linger import ENOUGH, LINGER_FED_S, LINGER_MAX_S, LINGER_S, SLOW_S, linger


class Told:
    """A session with an engine of width 2 that has news from every event; what is flushed is noted."""

    def __init__(self, kind: str = "engine") -> None:
        self.child = SimpleNamespace(in_hand=[1, 2, 3, 4], width=2, plan=SimpleNamespace(kind=kind))
        self.place = SimpleNamespace(children={1: self.child})
        self.credit = SimpleNamespace(answer_s=0.0)
        self.news = 1
        self.wants_flush = False
        self.flushes = 0

    def handle(self, event: ev.Event, now: float) -> list[Any]:
        self.wants_flush = not isinstance(event, ev.Flush)
        self.flushes += not self.wants_flush
        return []


def _driver(session: Told) -> Any:
    """As right after a flush: what comes next has company."""
    driver = cast(Any, Driver.__new__(Driver))
    driver._session, driver._parts = session, SimpleNamespace(clock=lambda: 0.0)
    driver._tracing = None
    driver._flush_due, driver._flushed_at = None, asyncio.get_running_loop().time()
    return driver


def _waits(driver: Any) -> float:
    return driver._flush_due.when() - asyncio.get_running_loop().time()


async def test_news_of_engines_that_have_rows_in_hand_waits_for_company() -> None:
    driver = _driver(Told())
    driver.event(ev.Tick())
    first = driver._flush_due
    assert LINGER_S < _waits(driver) <= LINGER_FED_S
    driver.event(ev.Tick())
    assert driver._flush_due is first


async def test_news_of_slots_waits_a_moment_only() -> None:
    driver = _driver(Told("slot"))
    driver.event(ev.Tick())
    assert _waits(driver) <= LINGER_S


async def test_news_alone_goes_at_once() -> None:
    driver = _driver(Told())
    driver._flushed_at -= 3 * LINGER_FED_S
    driver.event(ev.Tick())
    assert _waits(driver) <= 0


async def test_an_engine_that_runs_out_of_rows_waits_no_longer() -> None:
    session = Told()
    driver = _driver(session)
    driver.event(ev.Tick())
    first = driver._flush_due
    session.child.in_hand = [1, 2]
    driver.event(ev.Tick())
    assert first.cancelled() and _waits(driver) <= LINGER_S
    await asyncio.sleep(2 * LINGER_FED_S)
    assert session.flushes == 1 and driver._flush_due is None


async def test_a_coordinator_that_answers_late_is_told_less_often() -> None:
    session = Told("slot")
    driver = _driver(session)
    session.credit.answer_s = 0.8
    driver.event(ev.Tick())
    assert LINGER_FED_S < _waits(driver) <= 0.4
    session.news = ENOUGH  # it is worth a message by now
    driver.event(ev.Tick())
    assert _waits(driver) <= LINGER_S


@pytest.mark.parametrize(("fed", "answer_s", "seconds"), [
    (False, 0.0, LINGER_S), (False, SLOW_S / 2, LINGER_S), (True, 0.0, LINGER_FED_S), (True, SLOW_S, LINGER_FED_S),
    (True, 0.6, 0.3), (False, 0.6, 0.3), (True, 30.0, LINGER_MAX_S),
])  # fmt: skip
def test_news_waits_half_the_time_of_a_slow_answer_and_a_second_at_most(
    fed: bool, answer_s: float, seconds: float
) -> None:
    assert linger(fed, answer_s, 1) == seconds
    assert linger(fed, answer_s, ENOUGH) == (LINGER_FED_S if fed else LINGER_S)
