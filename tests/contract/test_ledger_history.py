"""What children printed and what happened, over SQLite and PostgreSQL: kept in order, within bounds, by the leader."""

from __future__ import annotations

import pytest
from ledger_rows import RUN, WORKER, Writer
from rollout.model.errors import FencedError
from rollout_coordinator.core.step import Writes
from rollout_coordinator.ledger import Ledger
from rollout_coordinator.ledger.port import (
    EVENTS_KEPT,
    EVENTS_OF_RUN,
    OUTPUT_HEAD,
    OUTPUT_TAIL,
    EventsOf,
    NewEvent,
    NewOutput,
)

OTHER = "01J00000000000000000000002"
CHUNK = 64 << 10


def event(at_ms: int, run_id: str = "", name: str = "worker_ready") -> NewEvent:
    return NewEvent(at_ms, name, "info", run_id, '{"n": 1}')


async def test_output_comes_in_order_and_page_by_page(writer: Writer, ledger: Ledger) -> None:
    await writer.run(1)
    await ledger.record(0, [NewOutput(RUN, WORKER, b"one"), NewOutput(RUN, "w2", b"three")], [])
    await ledger.record(0, [NewOutput(RUN, WORKER, b"4")], [])
    found = await ledger.output(RUN, 0, 1 << 20)
    assert [tuple(row) for row in found] == [(3, 3, WORKER, b"one"), (8, 5, "w2", b"three"), (9, 1, WORKER, b"4")]
    assert [row.lines for row in await ledger.output(RUN, 3, 1)] == [b"three"], "one, whatever its length"
    assert await ledger.output(RUN, 9, 100) == []


async def test_of_much_output_the_beginning_and_the_newest_are_kept(writer: Writer, ledger: Ledger) -> None:
    await writer.run(1)
    for _ in range(12):
        await ledger.record(0, [NewOutput(RUN, WORKER, b"x" * CHUNK)] * 16, [])  # 12 MiB in all
    positions, after = [], 0
    while found := await ledger.output(RUN, after, 1 << 20):
        positions += [row.position for row in found]
        after = found[-1].position
    total = 12 << 20
    head = [position for position in positions if position <= OUTPUT_HEAD]
    tail = [position for position in positions if position > OUTPUT_HEAD]
    assert len(head) * CHUNK == OUTPUT_HEAD and len(tail) * CHUNK == OUTPUT_TAIL
    assert tail[0] == total - OUTPUT_TAIL + CHUNK and tail[-1] == total


async def test_output_goes_with_its_run_and_of_an_unknown_run_is_not_wanted(writer: Writer, ledger: Ledger) -> None:
    await writer.run(1)
    await writer.run(1, run_id=OTHER, log=2)
    await ledger.record(0, [NewOutput(run, WORKER, b"one") for run in (RUN, OTHER, "01J00000000000000000000009")], [])
    await writer.commit(Writes(deleted_runs=[RUN]))
    await ledger.record(0, [NewOutput(RUN, WORKER, b"late")], [])
    counts = [len(await ledger.output(run, 0, 100)) for run in (RUN, OTHER, "01J00000000000000000000009")]
    assert counts == [0, 1, 0]


async def test_events_of_a_run_come_with_what_happened_in_its_time(writer: Writer, ledger: Ledger) -> None:
    await ledger.record(0, [], [event(5), event(10, RUN), event(20), event(21, OTHER), event(30)])
    every = await ledger.events(EventsOf(), 0, 100)
    assert [(row.number, row.at_ms) for row in every] == [(1, 5), (2, 10), (3, 20), (4, 21), (5, 30)]
    assert (every[0].event, every[0].level, every[0].fields) == ("worker_ready", "info", '{"n": 1}')
    of = EventsOf(RUN, 8, 25)
    assert [row.at_ms for row in await ledger.events(of, 0, 100)] == [10, 20]
    assert [row.at_ms for row in await ledger.events(of, 2, 100)] == [20]
    assert [row.number for row in await ledger.newest_events(EventsOf(), 2)] == [4, 5]


async def test_the_newest_events_are_kept(writer: Writer, ledger: Ledger) -> None:
    for at in range(0, EVENTS_KEPT + 2000, 1000):
        await ledger.record(0, [], [event(at + n) for n in range(1000)])
    assert [row.at_ms for row in await ledger.events(EventsOf(), 0, 2)] == [2000, 2001]
    assert (await ledger.newest_events(EventsOf(), 1))[0].number == EVENTS_KEPT + 2000


async def test_one_run_crowds_out_only_its_own_events(writer: Writer, ledger: Ledger) -> None:
    await ledger.record(0, [], [event(1), event(2, OTHER)])
    for at in (1000, 2000):
        await ledger.record(0, [], [event(at + n, RUN) for n in range(EVENTS_OF_RUN)])
    found = await ledger.events(EventsOf(), 0, 2000)
    assert [row.at_ms for row in found[:3]] == [1, 2, 2000] and len(found) == 2 + EVENTS_OF_RUN


async def test_output_of_all_runs_is_bounded_and_that_of_the_oldest_goes_first(writer: Writer, ledger: Ledger) -> None:
    await writer.run(1)
    await writer.run(1, run_id=OTHER, log=2)
    outputs = [NewOutput(run, WORKER, b"x" * 40) for run in (RUN, RUN, OTHER)]
    await ledger.record(0, outputs, [])
    assert await ledger.trim_output(120) == []
    assert await ledger.trim_output(119) == [(RUN, 80)]
    assert await ledger.trim_output(119) == []
    await ledger.record(0, [NewOutput(RUN, WORKER, b"more")], [])
    found = await ledger.output(RUN, 0, 100)
    assert [tuple(row) for row in found] == [(80, 0, WORKER, b""), (84, 4, WORKER, b"more")], "80 bytes are missing"
    assert len(await ledger.output(OTHER, 0, 100)) == 1


async def test_only_the_leader_records(writer: Writer, ledger: Ledger) -> None:
    await writer.run(1)
    with pytest.raises(FencedError):
        await ledger.record(1, [NewOutput(RUN, WORKER, b"one")], [event(1)])
    assert await ledger.output(RUN, 0, 100) == [] and await ledger.events(EventsOf(), 0, 9) == []
