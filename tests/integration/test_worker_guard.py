"""The process that kills when the daemon cannot: its times, and that a killed process's lock is free."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import cast

import pytest
from rollout.model.errors import AttemptError
from rollout.model.item import DEFAULT_SPEC, Key
from rollout_worker.executors.port import Attempt, Context, Run
from rollout_worker.executors.script import ScriptExecutor
from rollout_worker.processes.child import Guard
from rollout_worker.processes.guard import clock


@pytest.fixture
def guard(tmp_path: Path) -> Iterator[Guard]:
    guard = Guard(tmp_path / "scratch")
    yield guard
    guard.close()


@pytest.fixture
def sleeper(guard: Guard) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], start_new_session=True)
    guard.add(process.pid)
    yield process
    process.kill()
    process.wait()


def test_a_group_is_killed_at_its_time(guard: Guard, sleeper: subprocess.Popen[bytes]) -> None:
    began = clock()
    guard.kill_at(sleeper.pid, began + 0.7)
    assert sleeper.wait(60) == -9
    assert clock() - began >= 0.7


def test_a_time_is_moved_on_and_taken_back(guard: Guard, sleeper: subprocess.Popen[bytes]) -> None:
    for _ in range(8):
        guard.kill_at(sleeper.pid, clock() + 2.0)
        time.sleep(0.3)
    assert sleeper.poll() is None, "2.4 s have passed, and nobody was silent for two"
    guard.kill_at(sleeper.pid, 0.0)
    time.sleep(2.5)
    assert sleeper.poll() is None
    guard.kill_at(sleeper.pid, clock() - 1.0)
    assert sleeper.wait(60) == -9, "a time that has passed is now"


def test_a_group_that_has_left_the_list_is_not_killed(guard: Guard, sleeper: subprocess.Popen[bytes]) -> None:
    guard.kill_at(sleeper.pid, clock() + 0.5)
    guard.remove(sleeper.pid)
    guard.kill_at(sleeper.pid, clock() + 0.5)
    time.sleep(1.5)
    assert sleeper.poll() is None
    guard.add(sleeper.pid)


SLEEPY = """
import sys, time
from rollout_worker.processes import guard
real, began = guard.clock, time.monotonic()
guard.clock = lambda: real() + (3600 if time.monotonic() - began > 1.0 else 0)
guard.main()
"""
"""A guard whose machine sleeps for an hour, a second after it began: what it waits for comes no sooner by that."""


def test_a_machine_that_slept_through_the_time_wakes_to_it(tmp_path: Path, sleeper: subprocess.Popen[bytes]) -> None:
    with subprocess.Popen([sys.executable, "-c", SLEEPY, str(tmp_path / "other")], stdin=subprocess.PIPE) as guard:
        assert guard.stdin is not None
        guard.stdin.write(f"+{sleeper.pid}\n={sleeper.pid} {clock() + 1800}\n".encode())
        guard.stdin.flush()
        assert sleeper.wait(60) == -9
        guard.stdin.close()


def test_whoever_guards_ends_what_is_left_when_the_daemon_is_gone(guard: Guard, tmp_path: Path) -> None:
    (tmp_path / "scratch").mkdir()
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], start_new_session=True)
    guard.add(process.pid)
    guard.close()
    assert process.wait(60) == -9 and not (tmp_path / "scratch").exists()


async def test_a_script_that_is_to_run_alone_tells_of_another_beside_it(tmp_path: Path) -> None:
    """The proof of what is exclusive rests on it."""
    lock, effects = tmp_path / "lock", tmp_path / "effects"
    body = json.dumps({"alone": str(lock), "effects": str(effects), "data": "x"}).encode()
    attempt = Attempt(Key(1, 0), 2, bytes(32), body, DEFAULT_SPEC, Run("R", "script", {}))
    code = "import fcntl, sys, time; f = open(sys.argv[1], 'ab'); fcntl.flock(f, 2); print(flush=True); time.sleep(60)"
    with subprocess.Popen([sys.executable, "-c", code, str(lock)], stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        other.stdout.readline()
        with pytest.raises(AttemptError, match="another process holds"):
            await ScriptExecutor().run(attempt, cast(Context, None))
        assert effects.read_text().split()[:3] == ["beside", "x", "2"]
        other.kill()
    done = await ScriptExecutor().run(attempt, cast(Context, None))
    assert done.data == b"x"
    assert [line.split()[0] for line in effects.read_text().splitlines()] == ["beside", "start", "end"]
