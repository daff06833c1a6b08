"""The soak, and its judge on made-up numbers: a judge that finds nothing proves nothing."""

from __future__ import annotations

import math
import os
import random
from pathlib import Path

import pytest
from soak import Soak, record, soak
from soak_sampling import Series
from soak_verdict import FLOORS, KEEP_ENDED_S, Life, judge, kept_too_long, summary, table

SECONDS = float(os.environ.get("ROLLOUT_SOAK_S", "3600"))


def series(what: str, growth: float, *, start: float = 80.0, noise: float = 0.5, lived: float = 1.0) -> Series:
    """360 samples of an hour; `growth` from the first to the last of them."""
    dice = random.Random(what)
    count = int(360 * lived)
    points = [(10.0 * n, start + growth * n / 360 + dice.uniform(-noise, noise)) for n in range(count)]
    return Series("coordinator", what, "MiB", points)


@pytest.mark.parametrize(
    ("what", "growth", "start", "flat"),
    [
        ("rss", 0.0, 80.0, True),
        ("rss", 15.0, 80.0, True),  # within a fifth between the quarters
        ("rss", 40.0, 80.0, False),
        ("rss", 5.0, 10.0, True),  # half as much again, but below the floor
        ("descriptors", 4.0, 30.0, True),
        ("descriptors", 20.0, 30.0, False),
        ("tasks", 60.0, 40.0, False),
        ("runs kept too long", 5.0, 0.0, False),
        ("runs in memory", 200.0, 3.0, True),  # follows the machine's pace: shown, not judged
        ("database", 300.0, 10.0, True),  # grows with its rows: shown, not judged
    ],
)
def test_growth_is_found(what: str, growth: float, start: float, flat: bool) -> None:
    (found,) = judge([series(what, growth, start=start)], 3600.0)
    assert found.flat is flat
    assert abs(found.slope_h - growth) < 1.0
    assert f"| coordinator | {what} |" in table([found])
    assert ("GREW" in summary([found])) is not flat


def test_short_lives_and_the_warm_up_are_not_judged() -> None:
    warm = Series("worker-1", "rss", "MiB", [(10.0 * n, 40.0 if n < 60 else 90.0) for n in range(360)])
    passing = series("threads", 100.0, lived=0.5)
    (found,) = judge([warm, passing], 3600.0)
    assert (found.who, found.first, found.last) == ("worker-1", 90.0, 90.0)


def test_every_sampled_quantity_has_a_floor() -> None:
    with pytest.raises(KeyError):
        judge([series("unheard of", 50.0)], 3600.0)
    assert all(floor > 0 for floor in FLOORS.values())


def paced(leaks_every: int) -> Series:
    """An hour of runs of 3 s, then of 1 s: each is kept for the minute after its end, every n-th for ever."""
    lives: list[Life] = []
    at = 0.0
    while at < 3600:
        lives.append(Life(at, at + (3.0 if at < 1800 else 1.0), math.inf if len(lives) % 2 else at + 4.0))
        at = lives[-1].ended
    leaks = [life.ended + KEEP_ENDED_S for life in lives[::leaks_every]] if leaks_every else []
    held = Series("coordinator", "runs in memory", "")
    for at in (10.0 * n for n in range(360)):
        due = sum(life.due_in_memory(at) for life in lives)
        held.points.append((at, due + sum(since <= at for since in leaks)))
    return kept_too_long(held, lives)


def test_a_machine_that_gets_faster_leaks_no_runs() -> None:
    (found,) = judge([paced(0)], 3600.0)
    assert (found.first, found.last, found.flat) == (0.0, 0.0, True)


def test_runs_that_stay_are_found_at_any_pace() -> None:
    (found,) = judge([paced(100)], 3600.0)
    assert not found.flat


@pytest.mark.slow
@pytest.mark.timeout(SECONDS + 1200)
def test_an_hour_of_everyday_life(tmp_path: Path) -> None:
    """`ROLLOUT_SOAK_S` seconds (default 3600), written into docs/benchmarks.md from an hour on.

    `python tests/soak/soak.py --postgres URL` does the same on Postgres.
    """
    report = soak(tmp_path / "soak", SECONDS)
    print(report.text())
    if SECONDS >= 3600:
        record(report, "SQLite")
    assert not report.faults
    assert report.counts["workers killed (SIGKILL)"] and report.counts["workers drained (SIGTERM)"]
    if SECONDS >= Soak.JUDGED_FROM_S:
        assert report.judged
