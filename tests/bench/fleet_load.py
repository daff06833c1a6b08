"""Many workers in one process: production sessions, streams, beats and certificates; only their engines are modelled.

Run: python tests/bench/fleet_load.py ADDRESS TLS_DIR COUNT WIDTH LEAST_S MOST_S RESULT_BYTES
An engine runs WIDTH rows at once, each for LEAST_S to MOST_S seconds, and takes no processor time.
"""

from __future__ import annotations

import asyncio
import random
import sys
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

from beat_load import main
from rollout.client.runs import new_ulid
from rollout.config.logging import configure
from rollout.config.settings import LoggingSection, ObjectsSection, TransportSection, WorkerSection, WorkerSettings
from rollout.model.item import Outcome
from rollout.model.worker import Inventory
from rollout.security.credentials import Credentials
from rollout.security.roles import Role
from rollout.wire import event_loop
from rollout.wire.epoch import EpochGuard
from rollout.wire.v1 import heartbeat_pb2
from rollout_worker import session_events as ev
from rollout_worker.attempts import AttemptKey, Finished, Held, Plan, group_to_wire
from rollout_worker.driver import Driver, Parts
from rollout_worker.executors.port import Run
from rollout_worker.session import Session, SessionSettings

TICK_S = 0.5  # a worker's own takes 0.05; hundreds of them in one process would be busy with it


class Fleet:
    def __init__(
        self, address: str, tls_dir: Path, width: int, seconds: tuple[float, float], result_bytes: int
    ) -> None:
        transport = TransportSection(coordinator_addrs=[address], tls_dir=str(tls_dir))
        self.settings = WorkerSettings(transport=transport, worker=WorkerSection(slots=1))
        self.width = width
        self.seconds = seconds
        self.result_bytes = result_bytes
        self.welcomed = self.beats = self.acks = self.lost = self.accepted = self.stale = self.fences = 0
        self.latest = 0.0  # the most that a beat went out late
        self._workers: list[FleetDriver] = []
        self._caches = tls_dir.parent / "caches"

    async def worker(self, number: int, count: int) -> None:
        incarnation = new_ulid()
        transport = self.settings.transport
        credentials = await Credentials.obtain(
            tls_dir=Path(transport.tls_dir), cluster=transport.cluster, role=Role.WORKER, incarnation=incarnation,
            lifetime_s=3600.0, addresses=[],
        )  # fmt: skip
        inventory = Inventory(capacity=(("slots", 1.0),), executors=("script",), host=f"bench-{number}")
        session = Session(SessionSettings(incarnation=incarnation, inventory=inventory), plan)
        guard = EpochGuard()
        objects = ObjectsSection(cache_dir=str(self._caches / incarnation))  # of a host of its own
        settings = self.settings.model_copy(update={"objects": objects})
        parts = Parts(settings, session, credentials, guard, incarnation, nothing, nothing, nothing)
        driver = FleetDriver(self, parts)
        self._workers.append(driver)
        await driver.run()

    def figures(self) -> dict[str, float]:
        """Since the start; what is late, since it was asked last."""
        late, self.latest = self.latest, 0.0
        answers = sorted(w.session.credit.answer_s for w in self._workers)
        return {
            "welcomed": self.welcomed, "beats": self.beats, "acks": self.acks, "lost": self.lost, "late_s": late,
            "accepted": self.accepted, "stale": self.stale, "fences": self.fences,
            "running": sum(w.session.running for w in self._workers), "answer_s": answers[len(answers) // 2],
            "late_answer_s": answers[len(answers) * 99 // 100],
        }  # fmt: skip


class FleetDriver(Driver):
    """The production driver, without processes and files."""

    def __init__(self, fleet: Fleet, parts: Parts) -> None:
        super().__init__(parts)
        self._fleet = fleet
        self._beat_at = 0.0

    async def run(self) -> str:
        loops = [
            asyncio.create_task(one)
            for one in (self._work.run(), self._heartbeat.run(), self._control(), self._ticks())
        ]
        done, _ = await asyncio.wait([*loops, self._over], return_when=asyncio.FIRST_COMPLETED)
        raise RuntimeError(f"a worker ended: {[one.result() for one in done]}")

    async def _ticks(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            self.event(ev.Tick())

    def event(self, event: ev.Event) -> None:
        if isinstance(event, ev.Frame):
            self._fleet.welcomed += event.frame.HasField("welcome")
            self._fleet.accepted += sum(len(k.seq) for k in event.frame.accepted.accepted)
            self._fleet.stale += sum(len(k.seq) for k in event.frame.accepted.stale)
        elif isinstance(event, ev.StreamDown):
            self._fleet.lost += 1
        super().event(event)

    def _beat(self) -> heartbeat_pb2.BeatUp:
        now = asyncio.get_running_loop().time()
        interval_s = self._parts.settings.transport.heartbeat_interval_ms / 1000
        if self._beat_at:
            self._fleet.latest = max(self._fleet.latest, now - self._beat_at - interval_s)
        self._beat_at = now
        self._fleet.beats += 1
        return heartbeat_pb2.BeatUp(
            incarnation=self._parts.incarnation, state=heartbeat_pb2.WORKER_STATE_READY, running=self.session.running
        )

    def _acknowledged(self, sent_at: float, known: bool) -> None:
        self._fleet.acks += 1
        super()._acknowledged(sent_at, known)

    def _do_start_modelled(self, action: ev.StartChild) -> None:
        engine: Any = Engine(action.child, self._fleet, self.event)
        self._children[action.child] = engine

    def _do_emit_counted(self, action: ev.Emit) -> None:
        self._fleet.fences += action.event == "worker_fenced"

    _ACTIONS: ClassVar[dict[type, Any]] = {
        **Driver._ACTIONS,
        ev.StartChild: _do_start_modelled,
        ev.Emit: _do_emit_counted,
    }


class Engine:
    """In place of a child process: the same orders, the same events."""

    def __init__(self, number: int, fleet: Fleet, event: Callable[[ev.Event], None]) -> None:
        self._number = number
        self._fleet = fleet
        self._event = event
        self._loop = asyncio.get_running_loop()
        self._queue: deque[Held] = deque()
        self._running: dict[AttemptKey, asyncio.TimerHandle] = {}
        self._loop.call_soon(event, ev.ChildReady(number, fleet.width))

    def deliver(self, attempts: list[Held]) -> None:
        self._queue.extend(attempts)
        self._pump()

    def _pump(self) -> None:
        while self._queue and len(self._running) < self._fleet.width:
            held = self._queue.popleft()
            self._running[held.key] = self._loop.call_later(random.uniform(*self._fleet.seconds), self._done, held)

    def _done(self, held: Held) -> None:
        del self._running[held.key]
        data = random.randbytes(self._fleet.result_bytes)
        result = Finished(held.log, held.seq, held.attempt, held.plan.run.run_id, data, int(Outcome.DONE), None, 9)
        self._event(ev.ChildResults(self._number, group_to_wire(held.log, [result])))
        self._pump()

    def hold(self, on: bool) -> None:
        """Nothing here sends anything."""

    def leave(self, budget_s: float) -> None:
        """Nothing here can be handed over."""

    def recall(self, keys: list[AttemptKey]) -> None:
        back = [held.key for held in self._queue if held.key in keys]
        self._queue = deque(held for held in self._queue if held.key not in back)
        self._loop.call_soon(self._event, ev.ChildReturned(self._number, back))

    def kill_at(self, time: float) -> None:
        pass

    def stop(self) -> None:
        self.kill()

    def kill(self) -> None:
        for timer in self._running.values():
            timer.cancel()
        self._queue.clear()
        self._loop.call_soon(self._event, ev.ChildEnded(self._number, "killed"))


async def nothing(*_: Any) -> Any:
    return {}


def plan(run: Run) -> Plan:
    return Plan(run, "engine", run.workload)


if __name__ == "__main__":
    address, tls_dir, count, width, least, most, size = sys.argv[1:]
    configure(LoggingSection(format="json", level="error"), stream=sys.stderr)
    fleet = Fleet(address, Path(tls_dir), int(width), (float(least), float(most)), int(size))
    event_loop.run(main(fleet, int(count)))
