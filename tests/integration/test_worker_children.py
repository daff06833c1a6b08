"""A child process that is to end before it has started."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from rollout_worker import session_events as ev
from rollout_worker.attempts import Plan
from rollout_worker.executors.port import Run
from rollout_worker.processes.child import KILLED_EARLY, ChildProcess, Guard, Handlers

PLAN = Plan(Run("01JD0000000000000000000000", "script", {}), "slot", "script", ())


@pytest.fixture
def guard(tmp_path: Path) -> Iterator[Guard]:
    guard = Guard(tmp_path / "scratch")
    yield guard
    guard.close()


def child_of(guard: Guard, tmp_path: Path, gate: asyncio.Event, events: list[ev.Event]) -> ChildProcess:
    async def secrets() -> dict[str, str]:
        await gate.wait()
        return {}

    async def answer(_: dict[str, Any]) -> dict[str, Any]:
        raise AssertionError("nothing is asked")

    return ChildProcess(
        ev.StartChild(1, PLAN),
        tmp_path / "scratch" / "child-1",
        tmp_path / "cache",
        guard,
        Handlers(events.append, answer, secrets),
    )


async def test_a_child_killed_before_it_has_started_never_starts(guard: Guard, tmp_path: Path) -> None:
    gate, events = asyncio.Event(), list[ev.Event]()
    child = child_of(guard, tmp_path, gate, events)
    running = asyncio.create_task(child.run())
    await asyncio.sleep(0)
    child.kill()
    gate.set()
    await running
    assert events == [ev.ChildEnded(1, KILLED_EARLY)]
    assert child.pid == 0


async def test_a_child_killed_while_it_is_being_started_ends(guard: Guard, tmp_path: Path) -> None:
    """The process exists, its starter has not been told yet: the kill must not be forgotten."""
    gate, events = asyncio.Event(), list[ev.Event]()
    gate.set()
    child = child_of(guard, tmp_path, gate, events)
    running = asyncio.create_task(child.run())
    for _ in range(3):
        await asyncio.sleep(0)
    assert child.pid == 0 and not running.done()
    child.kill()
    await asyncio.wait_for(running, 60)
    assert events == [ev.ChildEnded(1, "signal SIGKILL (out of memory?)")]
    assert not psutil.pid_exists(child.pid)
