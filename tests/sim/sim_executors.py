"""Child processes of a worker, modelled: they take attempts, let virtual time pass and answer."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, replace
from typing import Any

from rollout.model.item import Failure, ItemSpec, NewItem, Outcome
from rollout.wire.codec import item_batch_to_wire
from rollout.wire.v1 import work_pb2
from rollout_worker import session_events as ev
from rollout_worker.attempts import AttemptKey, Finished, Held, Plan, group_to_wire
from rollout_worker.session import CANCELLED
from sim_checker import expected
from sim_loop import NodeLoop

CHILD_SPEC = ItemSpec(retry_backoff_ms=200)
EXECUTORS = {"slot": "slot", "engine": "engine", "tool": "slot", "model": "engine"}
"""What may be installed at a worker, and where its attempts execute."""
DEVICES = {"model": 1}
REPLICAS = {"engine": 2}
"""Accelerators that an engine of it has to itself."""
HOLDS = 5
"""Tag of parents that race their children: whoever ends first, they or all of these, ends them."""
START_S = 0.05
CANCEL_S = 0.01


@dataclass(frozen=True, slots=True)
class Behaviour:
    """Of an item, from its payload: `ms`,`fails`,`crashes`,`children`,`tag`, and `calls` where it is not empty."""

    ms: int = 50
    fails: int = 0  # attempts numbered up to this fail
    crashes: int = 0  # attempts numbered up to this take their process down
    children: int = 0
    tag: int = 0  # of parents, HOLDS: they work on while their children run
    calls: str = ""  # the executor of its children; empty: the run's workload

    def payload(self) -> bytes:
        numbers = b"%d,%d,%d,%d,%d" % (self.ms, self.fails, self.crashes, self.children, self.tag)
        return numbers + b"," + self.calls.encode() if self.calls else numbers


_known: dict[bytes, Behaviour] = {}


def behaviour(payload: bytes) -> Behaviour:
    found = _known.get(payload)
    if found is None:
        ms, fails, crashes, children, tag, *calls = payload.split(b",")
        found = _known[payload] = Behaviour(
            int(ms), int(fails), int(crashes), int(children), int(tag), b"".join(calls).decode()
        )
    return found


def section(executor: str) -> dict[str, Any]:
    """Of a run's configuration, in runs whose items name executors."""
    return {"for": executor}


def executor_of(held: Held) -> str:
    return held.spec.executor or held.plan.run.workload


class SimChild:
    """In place of `ChildProcess`: the same methods, the same events."""

    def __init__(self, number: int, plan: Plan, loop: NodeLoop, node: Any, devices: tuple[str, ...]) -> None:
        self.number = number
        self.devices = devices
        self._plan = plan
        self._loop = loop
        self._node = node  # a WorkerNode
        self._width = node.spec.slots if plan.kind == "engine" else 1
        self._queue: deque[Held] = deque()
        self._running: dict[AttemptKey, Held] = {}
        self._waiting: dict[AttemptKey, int] = {}  # parents, and how many children they have
        self._holding: dict[AttemptKey, int] = {}  # parents that work on, and how many children they have
        self._got: dict[AttemptKey, set[int]] = {}
        self._complete: set[AttemptKey] = set()
        self._up = False
        self._over = False  # killed, or ended: it says nothing any more
        self.ended = False
        loop.call_later(START_S, self._ready)

    def _event(self, event: Any) -> None:
        if not self._over:
            self._node.driver.event(event)

    def _ready(self) -> None:
        failure = None if self._over else self._node.start_failure(self._plan.run.executor)
        if failure is not None:
            self._event(ev.ChildFailed(self.number, failure))
            self.stop()
        elif not self._over:
            self._up = True
            self._event(ev.ChildReady(self.number, self._width))
            self._pump()

    # ---- orders

    def kill_at(self, time: float) -> None:
        """A host stops as a whole here, its guard with it."""

    def deliver(self, attempts: list[Held]) -> None:
        for held in attempts:
            if executor_of(held) != self._plan.run.executor:
                self._node.world.violated(
                    "executor",
                    f"{held.key} is for {executor_of(held)}, given to a process of {self._plan.run.executor}",
                )
        self._queue.extend(attempts)
        self._pump()

    def cancel(self, keys: list[AttemptKey]) -> None:
        for key in keys:
            self._loop.call_later(CANCEL_S, self._cancelled, key)

    def recall(self, keys: list[AttemptKey]) -> None:
        wanted = set(keys)
        back = [h.key for h in self._queue if h.key in wanted]
        gone = set(back)
        self._queue = deque(h for h in self._queue if h.key not in gone)
        self._loop.call_soon(self._event, ev.ChildReturned(self.number, back))

    def hold(self, on: bool) -> None:
        """Nothing here sends anything."""

    def leave(self, budget_s: float) -> None:
        """Nothing here can be handed over: what does not end in time is given back."""

    def pass_children(self, results: work_pb2.ChildResults) -> None:
        if self._over:
            return
        for key in [*self._waiting, *self._holding]:
            if (key.log, key.seq) == (results.parent_log, results.parent_seq):
                first = results.from_child
                self._got.setdefault(key, set()).update(range(first, first + len(results.outcome)))
                if results.complete:
                    self._complete.add(key)
                if results.complete and key in self._holding:
                    self._all_read(self._running[key], self._holding[key])

    def resume(self, key: AttemptKey) -> None:
        held = self._running.get(key)
        if self._over or held is None or key not in self._waiting:
            return
        count = self._waiting.pop(key)
        if key in self._complete:
            self._all_read(held, count)
        else:
            self._wait(held, count)

    def _all_read(self, held: Held, count: int) -> None:
        got = self._got.get(held.key, set())
        if got != set(range(count)):
            self._node.world.violated("children", f"{held.key} was given {sorted(got)} of {count} children")
        self._loop.call_later(0.001, self._done, held)

    def stop(self) -> None:
        self._loop.call_later(0.01, self._end, "it stopped")

    def kill(self) -> None:
        """It ends when the system gets to it; until then it counts as running what it ran."""
        self._over = True
        self._loop.call_later(self._node.world.time_to_die(), self._end, "signal SIGKILL")

    def crash(self) -> None:
        self.kill()

    # ---- running

    def _pump(self) -> None:
        while self._up and not self._over and self._queue and len(self._running) - len(self._waiting) < self._width:
            held = self._queue.popleft()
            key = held.key
            self._running[key] = held
            world = self._node.world
            world.starts(self._node, held)
            how = behaviour(bytes(held.payload))  # type: ignore[arg-type]
            if held.attempt <= how.crashes:
                self._loop.call_later(how.ms / 2000, self._crashes, key)
            elif how.children and held.attempt > how.fails:
                self._loop.call_later(how.ms / 1000, self._spawn, key, how)
            else:
                self._loop.call_later(how.ms / 1000 * self._node.slowness, self._done, held)

    def _stopped(self, key: AttemptKey) -> None:
        self._node.world.stops(self._node, key)

    def _crashes(self, key: AttemptKey) -> None:
        if key in self._running and not self._over:
            self.crash()

    def _spawn(self, key: AttemptKey, how: Behaviour) -> None:
        held = self._running.get(key)
        if held is None or self._over:
            return
        items: list[NewItem] = []
        spec = replace(CHILD_SPEC, executor=how.calls) if how.calls else CHILD_SPEC
        for ordinal in range(how.children):
            payload = Behaviour(ms=how.ms // 2 + 5, fails=ordinal == 1 and how.tag % 3 == 0, tag=ordinal).payload()
            items.append(NewItem(held.id[:24] + b"%08d" % ordinal, payload, spec))
        spawn = work_pb2.Spawn(
            log=held.log, seq=held.seq, attempt=held.attempt, items=item_batch_to_wire(0, items), seal=True
        )
        self._event(ev.ChildSpawned(self.number, spawn))
        if how.tag == HOLDS:
            self._holding[key] = how.children
            waiting = work_pb2.Waiting(log=held.log, seq=held.seq, attempt=held.attempt, holds=True)
            self._event(ev.ChildWaits(self.number, waiting))
            self._loop.call_later(how.ms / 1000, self._done, held)
        else:
            self._wait(held, how.children)

    def _wait(self, held: Held, count: int) -> None:
        self._waiting[held.key] = count
        got = self._got.get(held.key, set())
        first = next(n for n in range(count + 1) if n not in got)
        waiting = work_pb2.Waiting(log=held.log, seq=held.seq, attempt=held.attempt, from_child=first)
        self._event(ev.ChildWaits(self.number, waiting))
        self._pump()

    def _done(self, held: Held) -> None:
        if self._over or self._running.get(held.key) is not held:
            return
        how = behaviour(bytes(held.payload))  # type: ignore[arg-type]
        if held.attempt <= how.fails:
            failure = Failure("scripted", "it fails as told", True)
            self._finish(held, Outcome.FAILED, b"", failure)
        else:
            self._finish(held, Outcome.DONE, expected(held.id, bytes(held.payload)), None)  # type: ignore[arg-type]

    def _finish(self, held: Held, outcome: Outcome, data: bytes, failure: Failure | None) -> None:
        key = held.key
        self._forget(key)
        run_id = held.plan.run.run_id
        result = Finished(held.log, held.seq, held.attempt, run_id, data, int(outcome), failure, 5)
        self._event(ev.ChildResults(self.number, group_to_wire(held.log, [result])))
        self._pump()

    def _forget(self, key: AttemptKey) -> None:
        self._stopped(key)
        self._running.pop(key, None)
        self._waiting.pop(key, None)
        self._holding.pop(key, None)
        self._got.pop(key, None)
        self._complete.discard(key)

    def _cancelled(self, key: AttemptKey) -> None:
        if self._over:
            return
        held = self._running.get(key)
        if held is None:
            queued = [h for h in self._queue if h.key == key]
            if not queued:
                return
            held = queued[0]
            self._queue.remove(held)
        self._finish(held, Outcome.FAILED, b"", Failure(CANCELLED, "as told", True))

    def _end(self, reason: str) -> None:
        if not self.ended:
            self._over = self.ended = True
            for key in self._running:
                self._stopped(key)
            self._node.driver.event(ev.ChildEnded(self.number, reason))
            self._node.driver.child_ended(self.number)
