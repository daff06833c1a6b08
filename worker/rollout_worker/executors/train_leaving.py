"""What a training run does when its worker leaves: steps that are under way are handed over, if there is time for it.

What is handed over is a snapshot of the state between two steps, as segments leave it at their end, and the result of
the segment as far as it got. Another worker restores it and does the other steps. Steps repeat to the byte, so what the
segment commits is the same. Whatever is wrong with it, the segment is trained from its start.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

from rollout.model.errors import AttemptError, InputError
from rollout.workloads.json_form import canonical
from rollout.workloads.train.segment import Result, Segment

from rollout_worker.executors.port import Attempt, Context
from rollout_worker.executors.train_room import waits_for

SHARE = 0.9
"""Of the time that is left, what a hand-over may be expected to take: the estimate is one."""
PAUSE_S = 1.0


class Leaving:
    """When this worker leaves. `flag` is told to the processes that train: they stop behind the step that they are at
    when that file appears."""

    def __init__(self) -> None:
        self._until: float | None = None
        self._store_s = 0.0  # what the last snapshot took to be written and stored; 0: nobody knows yet

    def begin(self, budget_s: float) -> None:
        self._until = time.monotonic() + budget_s

    def stored(self, seconds: float) -> None:
        self._store_s = seconds

    async def again(self, work: Callable[[], Awaitable[bytes]]) -> bytes:
        """What `work` returns. While this worker leaves, what may succeed later is tried for as long as there is time:
        there is no other attempt that could."""
        while True:
            try:
                return await work()
            except AttemptError as error:
                over = self._until is None or time.monotonic() + PAUSE_S >= self._until
                if over or not error.retry or waits_for(error):
                    raise
            await asyncio.sleep(PAUSE_S)

    def decide(self, flag: Path | None, steps_left: int, step_s: float | None) -> None:
        """Make the flag, once the segment will not end in time and its steps so far can be stored in time."""
        if self._until is None or flag is None or flag.exists():
            return
        left_s, step = SHARE * (self._until - time.monotonic()), step_s or 0.0
        ends = step_s is not None and steps_left * step + self._store_s <= left_s
        if not ends and step + self._store_s <= left_s:
            flag.touch()


def is_part(segment: Segment, result: Result) -> bool:
    """The steps ended before the segment did."""
    return not result.stopped and result.step < min(segment.first + segment.steps, result.steps)


def encode(result_id: bytes, before: Result) -> bytes:
    """`result_id`: the object with the result so far, which names its snapshot. `before`: what the segment began on."""
    return canonical({"result": result_id.hex(), "before": before.snapshot})


async def taken_over(attempt: Attempt, segment: Segment, before: Result, context: Context) -> Result | None:
    """How far the segment got elsewhere; None: nothing was handed over, or it does not fit, or cannot be had."""
    if not attempt.handoff:
        return None
    try:
        told = json.loads(attempt.handoff)
        if told["before"] != before.snapshot:
            return None
        path = await context.object_path(bytes.fromhex(told["result"]))
        found = Result.decode(path.read_bytes())
        fits = found.data == before.data and len(found.metrics) == found.step - segment.first > 0
        return found if fits and found.snapshot and is_part(segment, found) else None
    except (AttemptError, InputError, OSError, ValueError, TypeError, KeyError):
        return None
