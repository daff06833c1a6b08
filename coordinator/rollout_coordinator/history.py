"""The history for users: lines that children of a run printed, and events.

It is collected in memory and written at most twice a second, in transactions of its own: neither the core nor a beat
ever waits for it, and a burst costs the ledger one transaction. What exceeds the limits is dropped and counted.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from typing import Any

import structlog
from rollout.config.logging import redact
from rollout.model import events as names
from rollout.model.errors import RolloutError, UnavailableError

from rollout_coordinator.clock import Clock
from rollout_coordinator.ledger.ledger import Ledger
from rollout_coordinator.ledger.port import NewEvent, NewOutput

log = structlog.get_logger()

EVERY_S = 0.5
WRITE_BYTES = 512 << 10
"""Maximum output in one transaction, so about 1 MiB per second from all workers together."""
WAITING_BYTES = 4 << 20
EVENTS_WAITING = 1000
STEALS_S = 10.0
STEAL_PAIRS = 20
_QUIET = frozenset({"debug"})
_UNSAID = frozenset({names.WORKER_HEARTBEAT})


class History:
    """`note` and `add` may be called at any time; `run` writes while this coordinator leads."""

    def __init__(self, ledger: Ledger, clock: Clock) -> None:
        self._ledger = ledger
        self._clock = clock
        self._events: list[NewEvent] = []
        self._dropped = 0
        self._steals: dict[tuple[str, str], int] = {}
        self._more_steals = 0
        self._steals_since = 0.0
        self._outputs: list[tuple[NewOutput, asyncio.Future[None]]] = []
        self._bytes = 0
        self._news = asyncio.Event()

    def note(self, event: str, level: str = "info", **fields: Any) -> None:
        """Record an event. Never waits, never fails."""
        if level in _QUIET or event in _UNSAID:
            return
        now = self._clock.now()
        if event == names.WORK_STOLEN:
            self._note_steal(fields, now.mono)
        else:
            self._put(now.wall_ms, event, level, fields)
        self._news.set()

    def _put(self, at_ms: int, event: str, level: str, fields: Mapping[str, Any]) -> None:
        if len(self._events) >= EVENTS_WAITING:
            self._dropped += 1
            return
        clean = redact(None, level, dict(fields))
        run_id = str(fields.get("run_id", ""))
        self._events.append(NewEvent(at_ms, event, level, run_id, json.dumps(clean, default=str)))

    def _note_steal(self, fields: Mapping[str, Any], now: float) -> None:
        if not self._steals:
            self._steals_since = now
        pair, count = (str(fields["thief"]), str(fields["victim"])), int(fields["count"])
        if pair in self._steals or len(self._steals) < STEAL_PAIRS:
            self._steals[pair] = self._steals.get(pair, 0) + count
        else:
            self._more_steals += count

    async def add(self, output: NewOutput) -> None:
        """Add output and wait until it is durable. Raises UnavailableError if it cannot be taken now: retry later, with
        less."""
        if self._bytes + len(output.lines) > WAITING_BYTES:
            raise UnavailableError("more is printed than the coordinator takes at present; try again later.")
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        done.add_done_callback(_retrieved)
        self._outputs.append((output, done))
        self._bytes += len(output.lines)
        self._news.set()
        await done

    async def run(self, epoch: int) -> None:
        """Write until cancelled. What arrives afterwards is written by the next tenure, or not at all."""
        try:
            while True:
                await self._news.wait()
                self._news.clear()
                await self.write(epoch)
                await asyncio.sleep(EVERY_S)
                if self._outputs or self._steals:
                    self._news.set()
        finally:
            outputs, self._outputs, self._bytes = self._outputs, [], 0
            _fail(outputs, UnavailableError("This coordinator leads no more; go to the next one."))

    async def write(self, epoch: int, *, last: bool = False) -> None:
        """Write what waits, up to one transaction; with `last`, also steals of an unfinished interval."""
        now = self._clock.now()
        if self._steals and (last or now.mono - self._steals_since >= STEALS_S):
            self._put_steals(now.wall_ms)
        outputs = self._take_outputs()
        events, self._events = self._events, []
        dropped, self._dropped = self._dropped, 0
        if dropped:
            fields = json.dumps({"count": dropped})
            events.append(NewEvent(now.wall_ms, "events_dropped", "warning", "", fields))
        if not events and not outputs:
            return
        try:
            await self._ledger.record(epoch, [output for output, _ in outputs], events)
        except RolloutError as error:
            # Others tell of the database; of what happened the newest is kept until it works again.
            log.debug("history_not_written", error=str(error))
            self._events = [*events, *self._events][-EVENTS_WAITING:]
            _fail(outputs, error)
        except asyncio.CancelledError:
            _fail(outputs, UnavailableError("This coordinator leads no more; go to the next one."))
            raise
        else:
            for _, done in outputs:
                if not done.done():
                    done.set_result(None)

    def _take_outputs(self) -> list[tuple[NewOutput, asyncio.Future[None]]]:
        taken: list[tuple[NewOutput, asyncio.Future[None]]] = []
        size = 0
        while self._outputs and size < WRITE_BYTES:
            one = self._outputs.pop(0)
            taken.append(one)
            size += len(one[0].lines)
        self._bytes -= size
        return taken

    def _put_steals(self, wall_ms: int) -> None:
        for (thief, victim), count in self._steals.items():
            self._put(wall_ms, names.WORK_STOLEN, "info", {"thief": thief, "victim": victim, "count": count})
        if self._more_steals:
            self._put(wall_ms, "more_work_stolen", "info", {"count": self._more_steals})
        self._steals.clear()
        self._more_steals = 0


def _retrieved(done: asyncio.Future[None]) -> None:
    """Retrieve the exception, so that a worker that hung up leaves no warning."""
    if not done.cancelled():
        done.exception()


def _fail(outputs: list[tuple[NewOutput, asyncio.Future[None]]], error: RolloutError) -> None:
    for _, done in outputs:
        if not done.done():
            done.set_exception(error)
