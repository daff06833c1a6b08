"""Hand-over of a training run whose worker leaves: steps in progress are handed over if there is time.

A hand-over is a snapshot of the state between two steps, as segments leave it at their end, and the partial result of
the segment. Another worker restores it and does the other steps. Steps repeat to the byte, so the segment commits the
same result. If anything is wrong with the hand-over, the segment is trained from its start.
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
"""Share of the remaining time that a hand-over may take by estimate."""
PAUSE_S = 1.0


class Leaving:
    """When this worker leaves. The training processes stop after the current step when the file `flag` appears."""

    def __init__(self) -> None:
        self._until: float | None = None
        self._store_s = 0.0  # what the last snapshot took to be written and stored; 0: nobody knows yet

    def begin(self, budget_s: float) -> None:
        self._until = time.monotonic() + budget_s

    def stored(self, seconds: float) -> None:
        self._store_s = seconds

    async def again(self, work: Callable[[], Awaitable[bytes]]) -> bytes:
        """Return what `work` returns. While this worker leaves, retryable errors are retried for as long as there is
        time, because no other attempt could."""
        while True:
            try:
                return await work()
            except AttemptError as error:
                over = self._until is None or time.monotonic() + PAUSE_S >= self._until
                if over or not error.retry or waits_for(error):
                    raise
            await asyncio.sleep(PAUSE_S)

    def decide(self, flag: Path | None, steps_left: int, step_s: float | None) -> None:
        """Create the flag if the segment will not end in time and its steps so far can be stored in time."""
        if self._until is None or flag is None or flag.exists():
            return
        left_s, step = SHARE * (self._until - time.monotonic()), step_s or 0.0
        ends = step_s is not None and steps_left * step + self._store_s <= left_s
        if not ends and step + self._store_s <= left_s:
            flag.touch()


def is_part(segment: Segment, result: Result) -> bool:
    """Return whether the steps ended before the segment did."""
    return not result.stopped and result.step < min(segment.first + segment.steps, result.steps)


def encode(result_id: bytes, before: Result) -> bytes:
    """Encode a hand-over. `result_id` is the object with the partial result, which names its snapshot; `before` is what
    the segment began with."""
    return canonical({"result": result_id.hex(), "before": before.snapshot})


async def taken_over(attempt: Attempt, segment: Segment, before: Result, context: Context) -> Result | None:
    """Return how far the segment got elsewhere, or None if nothing fitting was handed over or it is unavailable."""
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
