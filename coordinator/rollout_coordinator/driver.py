"""The single task that owns the core: gathers events, steps, commits, and only then sends.

core/step.py lists the duties of a step, and this file keeps them: nothing leaves the coordinator before it is on disk,
and when a commit fails the core is discarded and rebuilt from the ledger.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import structlog
from rollout.model.errors import (
    FencedError,
    NotLeaderError,
    RolloutError,
    StorageDamagedError,
    StorageError,
    StorageFullError,
    UnavailableError,
)

from rollout_coordinator.clock import Clock
from rollout_coordinator.core.core import Core
from rollout_coordinator.core.events import Event, Now, RunLoaded, Tick, WorkerBeat
from rollout_coordinator.core.step import (
    Load,
    LoadIds,
    LoadItems,
    LoadPending,
    LoadRun,
    Reply,
    Send,
    Snapshot,
    Step,
    Writes,
)
from rollout_coordinator.core.views import RunView
from rollout_coordinator.event_queue import EventQueue
from rollout_coordinator.http.metrics import Metrics
from rollout_coordinator.ledger.ledger import Ledger
from rollout_coordinator.ledger.port import Fence
from rollout_coordinator.tracing import ItemTracing

log = structlog.get_logger()
T = TypeVar("T")


class Tenure(Protocol):
    """What the driver needs of the lease: whether it may still write, and as whom."""

    @property
    def epoch(self) -> int: ...
    def trusted(self) -> bool: ...
    def extend(self, started: float) -> None: ...


@dataclass(frozen=True, slots=True)
class DriverLimits:
    events: int = 256
    weight: int = 4096  # items of one transaction, about
    linger_s: float = 0.002
    busy_s: float = 0.005  # a step ended less than this ago: more events are probably on their way
    replay_backoff_s: float = 0.1
    replay_backoff_max_s: float = 2.0
    slow_commit_s: float = 0.5  # worth telling
    slow_commit_every_s: float = 60.0


class LeaseLostError(NotLeaderError):
    """The lease ran out while the store did not answer; this coordinator stands by again."""

    code = "lease_lost"


def _retrieved(future: asyncio.Future[Any]) -> None:
    """Retrieve the exception, so that a client that hung up leaves no warning."""
    if not future.cancelled():
        future.exception()


class Driver:
    """`serve_as_leader` runs while the lease is held; services use `submit`, `request` and `query`."""

    def __init__(
        self,
        *,
        ledger: Ledger,
        make_core: Callable[[Snapshot, Now], Core],
        clock: Clock,
        deliver: Callable[[Send], None],
        tick_interval: float,
        metrics: Metrics,
        limits: DriverLimits | None = None,
        tracing: ItemTracing | None = None,
    ) -> None:
        self._ledger = ledger
        self._make_core = make_core
        self._clock = clock
        self._deliver = deliver
        self.on_serving: Callable[[], None] = lambda: None
        self.on_reset: Callable[[RolloutError], None] = lambda error: None
        self.on_store: Callable[[StorageError | None], None] = lambda error: None  # it fails so; None: it answers
        self._tick_interval = tick_interval
        self._metrics = metrics
        self._limits = limits or DriverLimits()
        self._tracing = tracing
        self._queue = EventQueue()
        self._queue.close()
        self._beats: dict[str, WorkerBeat] = {}
        self._waiting: dict[int, asyncio.Future[Any]] = {}
        self._requests = 0
        self._loads: set[asyncio.Task[None]] = set()
        self._core: Core | None = None
        self._batch = 0
        self._slow_told = float("-inf")
        self._stopping = False
        self._fault: BaseException | None = None

    # ---- what the services call

    @property
    def serving(self) -> bool:
        return self._core is not None and not self._stopping

    @property
    def queued(self) -> int:
        return len(self._queue)

    async def submit(self, event: Event) -> None:
        """Hand the core an event, waiting while the inbox is full. Raises UnavailableError while not serving."""
        await self._queue.put(event)

    def submit_nowait(self, event: Event) -> None:
        """Hand the core an event without waiting: for small events that a closing stream leaves behind."""
        self._queue.put_nowait(event)

    async def request(self, make: Callable[[int], Event]) -> asyncio.Future[Any]:
        """Hand the core `make(request number)`. The future is the durable reply, or raises the refusal."""
        self._requests += 1
        number = self._requests
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        future.add_done_callback(_retrieved)
        self._waiting[number] = future
        try:
            await self._queue.put(make(number))
        except BaseException:
            self._waiting.pop(number, None)
            raise
        return future

    async def query(self, read: Callable[[Core, Now], T]) -> T:
        """Call `read` on the core between two transactions: everything it sees is durable."""
        future: asyncio.Future[T] = asyncio.get_running_loop().create_future()

        def run() -> None:
            if future.done():
                return
            if self._core is None:
                future.set_exception(UnavailableError("The coordinator is replaying its ledger; try again."))
            else:
                future.set_result(read(self._core, self._clock.now()))

        self._queue.ask(run, future)
        return await future

    def beat(self, beat: WorkerBeat) -> None:
        """Keep the newest beat of each worker for the core's next batch, at the latest the next Tick."""
        self._beats[beat.incarnation] = beat

    def run_view(self, run_id: str) -> RunView | None:
        """Return a run's view, for the router only, which runs inside the driver's task after a commit."""
        return self._core.run_view(run_id) if self._core is not None else None

    def quarantine_error(self, incarnation: str) -> RolloutError | None:
        """Return why a beat of this worker must not be answered, from what the core knows now, durable or not."""
        return self._core.quarantine_error(incarnation) if self._core is not None else None

    # ---- the loop

    async def serve_as_leader(self, lease: Tenure) -> None:
        """Replay and serve until `stop`. Raises FencedError if deposed, LeaseLostError to stand by again, or
        StorageFullError."""
        failed = False
        while not self._stopping:
            await self._replay(lease, prove=failed)
            reason: RolloutError = NotLeaderError("This coordinator stopped serving; go to the next one.")
            try:
                await self._serve(lease)
            except (StorageFullError, StorageDamagedError) as error:
                reason = error
                raise
            except StorageError as error:
                reason = UnavailableError(f"The coordinator cannot use its database at present: {error}")
                failed = True
                self._metrics.replays.inc()
                self.on_store(error)
                log.error("storage_unavailable", error=str(error), action="discard memory, replay from the ledger")
            finally:
                self._reset(reason)

    def stop(self) -> None:
        """Finish the batch in hand, then return from `serve_as_leader`."""
        self._stopping = True
        self._queue.wake()

    async def _replay(self, lease: Tenure, *, prove: bool) -> None:
        """Replay the ledger. With `prove`, the store failed before, and reading it does not prove that it can be
        written."""
        pause = self._limits.replay_backoff_s
        while not self._stopping:
            if not lease.trusted():
                raise LeaseLostError
            try:
                row = await self._ledger.read_lease()
                if row is None or row.epoch != lease.epoch:
                    raise FencedError(f"The lease is at epoch {row.epoch if row else None}, not {lease.epoch}.")
                began = self._clock.now()
                snapshot = await self._ledger.snapshot()
                batch = row.batch
                if prove:
                    await self._ledger.commit(Fence(lease.epoch, batch), Writes())
                    batch += 1
                    self.on_store(None)
            except (StorageFullError, StorageDamagedError):
                raise
            except StorageError as error:
                # Once for each outage: what comes after it differs in nothing but the time.
                tell = log.debug if pause > self._limits.replay_backoff_s else log.warning
                tell("ledger_unreachable", error=str(error), retry_in_s=pause)
                self.on_store(error)
                await asyncio.sleep(pause)
                pause = min(pause * 2, self._limits.replay_backoff_max_s)
                continue
            self._batch = batch
            now = self._clock.now()
            self._core = self._make_core(snapshot, now)
            self._queue.open()
            self._metrics.replay_seconds.set(now.mono - began.mono)
            if self._tracing is not None:
                self._tracing.replayed(now)
            log.info(
                "ledger_replayed",
                runs=len(snapshot.runs),
                open_attempts=len(snapshot.open_attempts),
                seconds=round(now.mono - began.mono, 3),
            )
            self.on_serving()
            return

    async def _serve(self, lease: Tenure) -> None:
        now = self._clock.now()
        wake_at = last_tick = now.mono
        done_at = 0.0
        while not self._stopping:
            if self._fault is not None:
                fault, self._fault = self._fault, None
                raise fault
            if not lease.trusted():
                raise LeaseLostError
            due = min(wake_at, last_tick + self._tick_interval)
            await self._queue.wait(due - now.mono)
            now = self._clock.now()
            if now.mono - done_at < self._limits.busy_s and self._queue.weight < self._limits.weight:
                await asyncio.sleep(self._limits.linger_s)
                now = self._clock.now()
            events = self._gather(now, due)
            if events:
                ticked = isinstance(events[-1], Tick)
                if ticked:
                    last_tick = now.mono
                step = await self._step(lease, events, now)
                wake_at = step.wake_at if step.wake_at is not None else float("inf")
                now = self._clock.now()
                if not ticked or len(events) > 1:
                    done_at = now.mono
            for query in self._queue.take_queries():
                query()

    def _gather(self, now: Now, tick_at: float) -> list[Event]:
        events: list[Event] = []
        if self._beats:
            events.extend(self._beats.values())
            self._beats.clear()
        events.extend(self._queue.take(self._limits.events, self._limits.weight))
        if now.mono >= tick_at:
            events.append(Tick())
        return events

    def _tell_slow(self, now: float, seconds: float) -> None:
        if now - self._slow_told >= self._limits.slow_commit_every_s:
            self._slow_told = now
            log.warning(
                "ledger_slow",
                commit_s=round(seconds, 3),
                action="every answer waits for a commit: look at the disk, or the way to the database; "
                "rollout_commit_seconds counts them all",
            )

    async def _step(self, lease: Tenure, events: list[Event], began: Now) -> Step:
        core = self._core
        assert core is not None
        step = core.handle(events, began)
        self._metrics.batch_events.observe(len(events))
        if not lease.trusted():
            raise LeaseLostError  # nothing is written, and nothing is said
        if step.writes:
            handled = self._clock.now().mono
            await self._ledger.commit(Fence(lease.epoch, self._batch), step.writes)
            self._batch += 1
            lease.extend(handled)
            if not lease.trusted():
                raise LeaseLostError  # stopped for long since: it is on disk, but another may lead and say so
            committed = self._clock.now().mono
            self._metrics.committed(step.writes, handled - began.mono, committed - handled)
            if self._tracing is not None:
                self._tracing.committed(step, began, committed)
            if committed - handled >= self._limits.slow_commit_s:
                self._tell_slow(committed, committed - handled)
        for send in step.sends:
            if isinstance(send, Reply):
                self._answer(send)
            else:
                self._deliver(send)
        for load in step.loads:
            task = asyncio.create_task(self._load(load))
            self._loads.add(task)
            task.add_done_callback(self._loaded)
        return step

    def _loaded(self, task: asyncio.Task[None]) -> None:
        self._loads.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None and self._core is not None:
            self._fault = error  # no answer would ever come: better a loud end than a run that waits for ever
            self._queue.wake()

    def _answer(self, reply: Reply) -> None:
        future = self._waiting.pop(reply.request, None)
        if future is None or future.done():
            return  # the client hung up
        if reply.error is not None:
            future.set_exception(reply.error)
        else:
            future.set_result(reply.value)

    async def _load(self, load: Load) -> None:
        """Read for the core. A failed read is treated like a failed commit: the store does not respond."""
        self._metrics.loads.inc()
        try:
            if isinstance(load, LoadPending):
                answer: Event = await self._ledger.pending(load)
            elif isinstance(load, LoadItems):
                answer = await self._ledger.items(load)
            elif isinstance(load, LoadIds):
                answer = await self._ledger.ids(load)
            elif isinstance(load, LoadRun):
                answer = RunLoaded(load.load_id, load.run_id, await self._ledger.run_snapshot(load.run_id))
            else:
                answer = await self._ledger.results(load)
        except StorageError as error:
            self._fault = error
            self._queue.wake()
        else:
            self._queue.put_nowait(answer)

    def _reset(self, error: RolloutError) -> None:
        """Discard the core and fail everyone who waits for it. They return and find the state of the ledger."""
        self._core = None
        for load in self._loads:
            load.cancel()  # its answer is for this core; and a store that was cut off may never give it
        self._fault = None
        self._beats.clear()
        self._queue.close(error)
        waiting, self._waiting = self._waiting, {}
        for future in waiting.values():
            if not future.done():
                future.set_exception(error)
        self.on_reset(error)
