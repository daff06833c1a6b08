"""A child process from its parent's side: what it says, how it ends, and how long it is left before the next start."""

from __future__ import annotations

import asyncio
import signal
import sys

import psutil
import pytest
from rollout.processes.backoff import Backoff
from rollout.processes.child import LINE_MAX, PIPE, Child
from rollout.processes.exits import ending, exit_text, how_ended
from rollout.processes.supervised import Supervised

ECHO = """
import json, sys
print("a library says this", flush=True)
print("x" * int(sys.argv[1]), flush=True)
for line in sys.stdin:
    print(json.dumps({"heard": json.loads(line)}), flush=True)
"""
DEAF = """
import signal, subprocess, sys
for number in (signal.SIGTERM, signal.SIGHUP):
    signal.signal(number, signal.SIG_IGN)
below = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])
print('{"below": %d}' % below.pid, flush=True)
signal.pause()
"""


async def test_what_is_no_message_disturbs_none() -> None:
    child = await Child.start([sys.executable, "-c", ECHO, str(LINE_MAX + 1)], stdin=PIPE, stdout=PIPE)
    child.say({"number": 1})
    heard = [await child.hear()]
    while not heard[-1]:
        heard.append(await child.hear())
    assert heard[-1] == {"heard": {"number": 1}}
    await child.end(60)
    assert await child.hear() is None and child.code == 0
    child.say({"number": 2})  # its stdin is closed


@pytest.mark.parametrize("how", ["end", "terminate"])
async def test_a_child_that_goes_on_is_killed_with_its_group(how: str) -> None:
    child = await Child.start([sys.executable, "-c", DEAF], stdin=PIPE, stdout=PIPE, group=True)
    said = await child.hear()
    assert said is not None
    below = psutil.Process(said["below"])
    await getattr(child, how)(0.0)
    assert child.code == -signal.SIGKILL
    gone, left = await asyncio.to_thread(psutil.wait_procs, [below], timeout=60)
    assert gone or left[0].status() == psutil.STATUS_ZOMBIE
    child.kill()  # of one that has ended


def test_pauses_double_until_a_process_has_run_for_long() -> None:
    backoff = Backoff(0.5, 3.0, steady_s=10.0)
    assert [backoff.pause_s(), backoff.pause_s(10.0), backoff.pause_s(), backoff.pause_s()] == [0.5, 1.0, 2.0, 3.0]
    assert (backoff.pause_s(11.0), backoff.failures) == (0.5, 1)
    backoff.reset()
    assert (backoff.failures, backoff.pause_s()) == (0, 0.5)


class Restless(Supervised):
    def __init__(self) -> None:
        super().__init__(Backoff(0.0, 0.0))
        self.programs = ["not a program", "exit(3)", "exit(0)"]
        self.seen: list[object] = []
        self.left = asyncio.Event()

    async def launch(self) -> None:
        program = self.programs[len(self.seen)]
        self._child = await Child.start([sys.executable, "-c", program] if "(" in program else [program])

    def restarts(self, end: int | Exception, pause_s: float) -> bool:
        self.seen.append(end if isinstance(end, int) else type(end))
        if end == 0:
            self.left.set()
        return end != 0


async def test_one_that_dies_or_cannot_be_started_is_started_again() -> None:
    child = Restless()
    child.watch(launched=False)
    await child.left.wait()
    assert child.seen == [FileNotFoundError, 3, 0]
    await child.stop()


def test_the_words_for_an_end() -> None:
    assert [ending(3), ending(-9), ending(-999)] == ["exit code 3", "signal SIGKILL", "signal 999"]
    assert [exit_text(3), exit_text(-9)] == ["exit code 3", "signal SIGKILL (out of memory?)"]
    assert [how_ended(3), how_ended(-9)] == ["exited with 3", "was killed by SIGKILL"]
