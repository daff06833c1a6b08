"""The driver's duties with a core and a ledger that are scripts: order, backpressure, lost stores, lost leases."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from typing import Any

import pytest
from rollout.model.errors import (
    ConfigError,
    FencedError,
    NotLeaderError,
    RolloutError,
    StorageFullError,
    StorageUnavailableError,
    UnavailableError,
)
from rollout_coordinator.clock import SystemClock
from rollout_coordinator.core.events import Event, Loaded, Now, RunCommand, SubmitItems, Tick, WorkerBeat
from rollout_coordinator.core.step import (
    LoadPending,
    Reply,
    RunMoved,
    Send,
    Snapshot,
    Step,
    Writes,
)
from rollout_coordinator.driver import Driver, DriverLimits, LeaseLostError
from rollout_coordinator.event_queue import EVENTS_MAX, EventQueue
from rollout_coordinator.http.metrics import Metrics
from rollout_coordinator.ledger.port import Fence, LeaseRow
from structlog.testing import capture_logs

ITEM = b"x" * 32


class ScriptedCore:
    """Answers every command after one write; keeps what it was handed."""

    def __init__(self) -> None:
        self.batches: list[list[Event]] = []
        self.handled = asyncio.Event()

    def handle(self, events: list[Event], now: Now) -> Step:
        self.batches.append(events)
        self.handled.set()
        step = Step()
        for event in events:
            if isinstance(event, RunCommand | SubmitItems):
                step.writes.retired.append(event.request)
                step.sends.append(RunMoved(event.run_id))
                step.sends.append(Reply(event.request, value=event.request))
                if isinstance(event, RunCommand) and event.verb == "load":
                    step.loads.append(LoadPending(7, 1, 0, 1, 1))
        return step

    def run_view(self, run_id: str) -> Any:
        return None

    def run_views(self) -> list[Any]:
        return []

    def worker_views(self, now: Now) -> list[Any]:
        return []

    def gauges(self) -> dict[str, float]:
        return {}

    def barred(self, incarnation: str) -> RolloutError | None:
        return None

    async def saw(self, kind: type) -> None:
        while not self.seen(kind):
            self.handled.clear()
            await self.handled.wait()

    def seen(self, kind: type) -> list[Any]:
        return [e for batch in self.batches for e in batch if isinstance(e, kind)]


class ScriptedLedger:
    def __init__(self) -> None:
        self.commits: list[tuple[Fence, Writes]] = []
        self.fail: Iterator[Exception | None] = iter(())
        self.snapshots = 0
        self.unreachable: Exception | None = None
        self.gate = asyncio.Event()
        self.gate.set()
        self.epoch = 4
        self.batch = 10

    async def read_lease(self) -> LeaseRow | None:
        if self.unreachable is not None:
            raise self.unreachable
        return LeaseRow("me", self.epoch, self.batch, 0, False, "")

    async def snapshot(self) -> Snapshot:
        self.snapshots += 1
        return Snapshot()

    async def commit(self, fence: Fence, writes: Writes) -> None:
        await self.gate.wait()
        error = next(self.fail, None)
        if error is not None:
            raise error
        assert fence == Fence(self.epoch, self.batch)
        self.batch += 1
        self.commits.append((fence, writes))

    async def pending(self, load: LoadPending) -> Loaded:
        return Loaded(load.load_id, load.log, [], 0, True)


class Lease:
    epoch = 4

    def __init__(self) -> None:
        self.good = True

    def trusted(self) -> bool:
        return self.good

    def extend(self, started: float) -> None:
        pass


class Bench:
    def __init__(self) -> None:
        self.ledger = ScriptedLedger()
        self.lease = Lease()
        self.cores: list[ScriptedCore] = []
        self.sent: list[Send] = []
        self.resets: list[Exception] = []
        self.serving = asyncio.Event()
        self.driver = Driver(
            ledger=self.ledger,  # type: ignore[arg-type]
            make_core=self._core,  # type: ignore[arg-type]
            clock=SystemClock(),
            deliver=self._deliver,
            tick_interval=0.05,
            metrics=Metrics(),
            limits=DriverLimits(replay_backoff_s=0.01),
        )
        self.driver.on_serving = self.serving.set
        self.driver.on_reset = self.resets.append

    def _core(self, snapshot: Snapshot, now: Now) -> ScriptedCore:
        self.cores.append(ScriptedCore())
        return self.cores[-1]

    def _deliver(self, send: Send) -> None:
        self.sent.append(send)

    async def start(self) -> asyncio.Task[None]:
        task = asyncio.create_task(self.driver.serve_as_leader(self.lease))
        await self.serving.wait()
        self.serving.clear()
        return task


def command(verb: str = "pause") -> Callable[[int], Event]:
    return lambda n: RunCommand(n, "run", verb)


@pytest.fixture
def bench() -> Bench:
    return Bench()


async def test_a_reply_comes_after_its_commit(bench: Bench) -> None:
    task = await bench.start()
    bench.ledger.gate.clear()
    future = await bench.driver.request(command())
    await bench.cores[0].saw(RunCommand)
    assert not future.done() and not bench.sent
    bench.ledger.gate.set()
    assert await future == 1
    assert bench.sent == [RunMoved("run")]
    assert [f for f, _ in bench.ledger.commits] == [Fence(4, 10)]
    bench.driver.stop()
    await task


async def test_a_slow_ledger_is_told_of_once_a_while(bench: Bench) -> None:
    driver: Any = bench.driver
    with capture_logs() as told:
        task = await bench.start()
        driver._limits = DriverLimits(slow_commit_s=60)
        await (await bench.driver.request(command()))
        assert not told_slow(told)
        driver._limits = DriverLimits(slow_commit_s=0.05, slow_commit_every_s=1e6)
        for _ in range(2):
            bench.ledger.gate.clear()
            future = await bench.driver.request(command())
            await asyncio.sleep(0.06)
            bench.ledger.gate.set()
            await future
        bench.driver.stop()
        await task
    assert [e["log_level"] for e in told_slow(told)] == ["warning"]
    assert told_slow(told)[0]["commit_s"] >= 0.05


def told_slow(events: Sequence[MutableMapping[str, Any]]) -> list[MutableMapping[str, Any]]:
    return [e for e in events if e["event"] == "ledger_slow"]


async def test_events_that_come_during_a_commit_share_the_next_one(bench: Bench) -> None:
    task = await bench.start()
    bench.ledger.gate.clear()
    first = await bench.driver.request(command())
    await bench.cores[0].saw(RunCommand)
    rest = [await bench.driver.request(command()) for _ in range(50)]
    bench.ledger.gate.set()
    await asyncio.gather(first, *rest)
    assert len(bench.ledger.commits) == 2
    bench.driver.stop()
    await task


async def test_ticks_come_and_the_newest_beat_of_a_worker_goes_first(bench: Bench) -> None:
    task = await bench.start()
    for number in range(5):
        bench.driver.beat(WorkerBeat("w", "h", float(number)))
    await bench.cores[0].saw(WorkerBeat)
    assert [b.read_at for b in bench.cores[0].seen(WorkerBeat)] == [4.0]
    assert bench.cores[0].seen(Tick)
    bench.driver.stop()
    await task


async def test_a_load_is_answered_with_an_event(bench: Bench) -> None:
    task = await bench.start()
    await (await bench.driver.request(command("load")))
    await bench.cores[0].saw(Loaded)
    bench.driver.stop()
    await task


@pytest.mark.parametrize("failures", [1, 3])
async def test_a_failed_commit_discards_the_core_and_replays(bench: Bench, failures: int) -> None:
    task = await bench.start()
    bench.ledger.fail = iter([StorageUnavailableError("gone")] * failures)
    told: list[str] = []
    bench.driver.on_store = lambda error: told.append(str(error))
    future = await bench.driver.request(command())
    with pytest.raises(UnavailableError, match="gone"):
        await future
    await bench.serving.wait()  # not before a write went through again: what can be read may still not be written
    assert told == [*["gone"] * failures, "None"] and bench.ledger.snapshots == failures + 1
    assert await (await bench.driver.request(command())) == 2
    assert len(bench.cores) == 2 and len(bench.resets) == 1 and not bench.sent[1:]
    bench.driver.stop()
    await task


async def test_waits_for_a_store_that_comes_back_and_refuses_meanwhile(bench: Bench) -> None:
    task = await bench.start()
    bench.ledger.unreachable = StorageUnavailableError("gone")
    bench.ledger.fail = iter([StorageUnavailableError("gone")])
    with pytest.raises(UnavailableError):
        await (await bench.driver.request(command()))
    with pytest.raises(UnavailableError):
        await bench.driver.request(command())
    with pytest.raises(UnavailableError):
        await bench.driver.query(lambda core, now: 1)
    bench.ledger.unreachable = None
    await bench.serving.wait()
    assert await bench.driver.query(lambda core, now: 1) == 1
    bench.driver.stop()
    await task


async def test_a_lease_that_is_not_trusted_commits_nothing(bench: Bench) -> None:
    task = await bench.start()
    bench.lease.good = False
    with pytest.raises(LeaseLostError):
        await task
    assert not bench.ledger.commits and len(bench.resets) == 1


@pytest.mark.parametrize("error", [FencedError("deposed"), StorageFullError("full")])
async def test_what_replay_cannot_heal_is_raised_and_told(bench: Bench, error: Exception) -> None:
    task = await bench.start()
    bench.ledger.fail = iter([error])
    future = await bench.driver.request(command())
    with pytest.raises(type(error)):
        await task
    with pytest.raises((StorageFullError, NotLeaderError)):
        await future


async def test_a_new_epoch_in_the_ledger_is_seen_at_replay(bench: Bench) -> None:
    bench.ledger.epoch = 5
    with pytest.raises(FencedError):
        await bench.driver.serve_as_leader(bench.lease)


async def test_a_flood_waits_outside_and_workers_pass_it() -> None:
    queue = EventQueue(limit=1000)
    batch = SubmitItems(1, "run", 0, [ITEM] * 400, [b""] * 400, (), None)

    async def flood() -> None:
        for _ in range(20):
            await queue.put(batch)

    flooding = asyncio.create_task(flood())
    await asyncio.sleep(0.01)
    assert queue.weight <= 1400
    await queue.put(RunCommand(2, "run", "kill"))
    taken = queue.take(256, 4096)
    assert isinstance(taken[0], RunCommand)
    count = len(taken) - 1
    while not flooding.done() or len(queue):
        await asyncio.sleep(0)
        count += len(queue.take(256, 4096))
    assert count == 20


async def test_many_small_events_wait_outside_as_well() -> None:
    queue = EventQueue()
    puts = [asyncio.create_task(queue.put(RunCommand(n, "run", "kill"))) for n in range(2 * EVENTS_MAX)]
    await asyncio.sleep(0.01)
    assert len(queue) == EVENTS_MAX
    taken: list[Event] = []
    while not all(put.done() for put in puts) or len(queue):
        taken += queue.take(256, 4096)
        await asyncio.sleep(0)
        assert len(queue) <= EVENTS_MAX
    assert [event.request for event in taken if isinstance(event, RunCommand)] == list(range(2 * EVENTS_MAX))


async def test_who_waits_for_the_inbox_keeps_its_turn() -> None:
    """Also where others come between the moment that there is room and the moment that it runs."""
    queue = EventQueue(limit=20)
    small, large = (
        SubmitItems(1, "run", 0, [ITEM], [b""], (), None),
        SubmitItems(2, "run", 1, [ITEM] * 30, [b""] * 30, (), None),
    )
    await queue.put(large)
    first, gone, second = (asyncio.create_task(queue.put(large)) for _ in range(3))
    await asyncio.sleep(0)
    gone.cancel()
    assert queue.take(1, 4096) == [large]
    late = asyncio.create_task(queue.put(small))
    await asyncio.sleep(0)
    assert first.done() and not second.done() and not late.done()
    assert queue.take(1, 4096) == [large]
    assert queue.take(1, 4096) == [large]
    assert queue.take(1, 4096) == [small]
    await asyncio.gather(first, second, late)
    assert gone.cancelled() and len(queue) == queue.weight == 0


async def test_closing_the_queue_refuses_those_who_wait() -> None:
    queue = EventQueue(limit=1)
    await queue.put(RunCommand(1, "run", "kill"))
    waiting = asyncio.create_task(queue.put(RunCommand(2, "run", "kill")))
    await asyncio.sleep(0)
    queue.close()
    with pytest.raises(UnavailableError):
        await waiting


async def test_a_load_that_breaks_ends_the_driver_instead_of_never_being_answered(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def refused(load: LoadPending) -> Loaded:
        raise ConfigError("PostgreSQL refused the connection")

    monkeypatch.setattr(bench.ledger, "pending", refused)
    task = await bench.start()
    await (await bench.driver.request(command("load")))
    with pytest.raises(ConfigError):
        await asyncio.wait_for(task, 60)
    assert not bench.driver.serving


async def test_nothing_is_said_when_the_lease_ran_out_while_a_commit_was_under_way(bench: Bench) -> None:
    task = await bench.start()
    bench.ledger.gate.clear()
    future = await bench.driver.request(command())
    await bench.cores[0].saw(RunCommand)
    bench.lease.good = False  # stopped in the middle, continued much later
    bench.ledger.gate.set()
    with pytest.raises(LeaseLostError):
        await task
    with pytest.raises(NotLeaderError):
        await future
    assert len(bench.ledger.commits) == 1 and not bench.sent
