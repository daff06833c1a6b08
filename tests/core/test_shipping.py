"""What children print on its way to the run: bounded at the worker, at the coordinator, and whose it is."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from rollout.cli.printed import Reader
from rollout.model.errors import UnavailableError
from rollout.wire.v1 import history_pb2 as pb
from rollout_coordinator.clock import SystemClock
from rollout_coordinator.history import EVENTS_WAITING, STEAL_PAIRS, WAITING_BYTES, History
from rollout_coordinator.ledger.port import NewEvent, NewOutput
from rollout_worker.attempts import AttemptKey
from rollout_worker.processes.output import Output
from rollout_worker.shipping import CHUNK_BYTES, Shipper

RUN = "01J00000000000000000000001"


class Worker(Shipper):
    """Ships into a list; `away`: nobody takes it."""

    def __init__(self) -> None:
        super().__init__(None, None, "me")  # type: ignore[arg-type]
        self.away = False
        self.shipped: list[pb.OutputLines] = []

    async def _ship(self, run_id: str, chunk: pb.OutputLines) -> bool:
        await asyncio.sleep(0)
        if not self.away:
            self.shipped.append(chunk)
        return not self.away

    @property
    def lines(self) -> list[pb.OutputLine]:
        return [line for chunk in self.shipped for line in chunk.lines]


async def test_a_worker_ships_in_order_and_again_what_was_not_taken() -> None:
    worker = Worker()
    worker.away = True
    worker.add(RUN, "map", "stdout", "one", AttemptKey(1, 6, 2))
    await worker.ship()
    worker.away = False
    worker.add(RUN, "map", "stderr", "password in https://me:secret@host", None)
    await worker.ship()
    assert [(line.text, line.seq, line.attempt) for line in worker.lines] == [("one", 6, 2)], (
        "as it was: it has a number"
    )
    await worker.ship()
    assert [(line.text, line.seq, line.attempt) for line in worker.lines[1:]] == [
        ("password in https://me:***@host", 0, 0)
    ]
    await worker.ship()
    assert [chunk.number for chunk in worker.shipped] == [1, 2]


async def test_a_worker_that_leaves_ships_all_once_beside_its_own_loop_and_counts_what_nobody_takes() -> None:
    worker, other = Worker(), RUN[:-1] + "2"
    for n in range(2000):
        worker.add(RUN if n % 2 else other, "map", "stdout", f"{n} " + "x" * 60, None)
    left, *_ = await asyncio.gather(worker.drain(10.0), *(worker.ship() for _ in range(3)))
    assert left == 0
    assert sorted(int(line.text.split()[0]) for line in worker.lines) == list(range(2000))
    worker.away = True
    worker.add(RUN, "map", "stdout", "never", None)
    worker.left_out(RUN, "map", 6, 100)
    assert await worker.drain(0.05) == 7


async def test_a_worker_that_prints_100_mb_keeps_little_and_says_how_much_is_missing() -> None:
    worker = Worker()
    for _ in range(50_000):
        worker.add(RUN, "map", "stdout", "x" * 2000, None)
    while worker._waiting:  # pyright: ignore[reportPrivateUsage]
        await worker.ship()
    assert all(chunk.ByteSize() <= CHUNK_BYTES + 1000 for chunk in worker.shipped)
    missing = sum(line.left_out_lines for line in worker.lines)
    assert missing + sum(bool(line.text) for line in worker.lines) == 50_000
    assert sum(chunk.ByteSize() for chunk in worker.shipped) < 300 << 10
    worker.add(RUN, "map", "stdout", "after", None)
    await worker.ship()
    assert worker.lines[-1].text == "after", "there is room again"


def test_marks_say_whose_lines_are_and_are_no_lines() -> None:
    said: list[tuple[str, AttemptKey | None]] = []
    output = Output(lambda *entry: None, 0.0, lambda stream, line, key: said.append((line, key)))
    output.feed(
        "stdout", b"before\n\x1e1.41.2\nhello\nno end\x1e\nnobody's\n\x1e99999999999999999999.1.1\nnor this\n", 0.0
    )
    key = AttemptKey(1, 41, 2)
    assert said == [("before", None), ("hello", key), ("no end", key), ("nobody's", None), ("nor this", None)]


class Ledger:
    def __init__(self) -> None:
        self.outputs: list[NewOutput] = []
        self.events: list[NewEvent] = []
        self.writes = 0
        self.error: UnavailableError | None = None

    async def record(self, epoch: int, outputs: list[NewOutput], events: list[NewEvent]) -> None:
        if self.error is not None:
            raise self.error
        self.writes += 1
        self.outputs += outputs
        self.events += events


def history() -> tuple[History, Ledger]:
    ledger: Any = Ledger()
    return History(ledger, SystemClock()), ledger


async def test_a_burst_of_events_is_one_transaction_and_what_is_over_is_counted() -> None:
    kept, ledger = history()
    for n in range(EVENTS_WAITING + 50):
        kept.note("worker_ready", worker=str(n))
    kept.note("item_committed", "debug", run_id=RUN)
    await kept.write(1)
    assert ledger.writes == 1 and len(ledger.events) == EVENTS_WAITING + 1
    assert (ledger.events[-1].event, ledger.events[-1].fields) == ("events_dropped", '{"count": 50}')


async def test_steals_are_summed_by_pair_and_bounded() -> None:
    kept, ledger = history()
    for n in range(3 * STEAL_PAIRS):
        kept.note("work_stolen", thief=str(n % (STEAL_PAIRS + 5)), victim="v", count=2)
    await kept.write(1)
    assert not ledger.events, "not before their interval is over"
    await kept.write(1, last=True)
    assert [e.event for e in ledger.events] == ["work_stolen"] * STEAL_PAIRS + ["more_work_stolen"]


async def test_events_outlast_a_database_that_is_away_and_output_is_refused() -> None:
    kept, ledger = history()
    ledger.error = UnavailableError("away")
    kept.note("worker_ready", worker="w")
    adding = asyncio.ensure_future(kept.add(NewOutput(RUN, "w", b"x")))
    await asyncio.sleep(0)
    await kept.write(1)
    with pytest.raises(UnavailableError):
        await adding
    ledger.error = None
    await kept.write(1)
    assert [e.event for e in ledger.events] == ["worker_ready"] and not ledger.outputs


async def test_a_coordinator_takes_no_more_output_than_it_can_write_soon() -> None:
    kept, _ = history()
    adding = [asyncio.ensure_future(kept.add(NewOutput(RUN, "w", b"x" * (64 << 10)))) for _ in range(70)]
    await asyncio.sleep(0)
    refused = [task for task in adding if task.done()]
    assert len(refused) == 70 - WAITING_BYTES // (64 << 10)
    assert all(isinstance(task.exception(), UnavailableError) for task in refused)
    for task in adding:
        task.cancel()


async def test_lines_of_chunks_that_are_not_kept_are_counted() -> None:
    worker, reader = Worker(), Reader()
    for n in range(5000):
        worker.add(RUN, "map", "stdout", f"{n} " + "x" * 100, None)
    assert await worker.drain(10.0) == 0
    first, *_, last = worker.shipped
    assert len(worker.shipped) > 2
    read = [
        line
        for chunk in (first, first, last)
        for line in reader.lines(pb.OutputChunk(worker="w", lines=chunk.SerializeToString()), 1)
    ]
    assert sum(line.left_out[0] if line.left_out is not None else 1 for line in read) == 5000
