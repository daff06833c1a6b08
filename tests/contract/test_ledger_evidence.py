"""What attempts left behind that failed, over SQLite and PostgreSQL: read back, referred to, freed, and known to the next
leader."""

from __future__ import annotations

from dataclasses import replace

from ledger_rows import RUN, WORKER, Writer, assignment, attempt_row, load_pending, result_rows
from rollout.model.item import AttemptEnd, ObjectSlice
from rollout_coordinator.core.step import AttemptRow, Evidence, LoadItems, Writes
from rollout_coordinator.ledger import Ledger
from rollout_coordinator.ledger.port import AttemptAt, EndedAttempt

PACK, TAR, OTHER = (bytes([n]) * 32 for n in (1, 2, 3))
SLICE = ObjectSlice(PACK, 5, 9000)


def failed(seq: int, attempt: int, left: Evidence, **changes: object) -> AttemptRow:
    return replace(attempt_row(seq, AttemptEnd.FAILED, attempt), began_ms=5, left=left, **changes)


def as_read(row: AttemptRow) -> AttemptAt:
    left = row.left
    ended = EndedAttempt(
        row.attempt, row.worker, row.end.value, row.code, row.message, row.began_ms, row.at_ms, left.units_in,
        left.units_out, left.data,
    )  # fmt: skip
    return AttemptAt(row.seq, ended)


async def test_it_is_read_with_its_row_and_in_pages_over_all_rows(writer: Writer, ledger: Ledger) -> None:
    await writer.run(4)
    rows = [
        failed(0, 1, Evidence(b"why", (), 3, 4)),
        failed(0, 2, Evidence(SLICE, (TAR,))),
        attempt_row(0, AttemptEnd.RELEASED, 3),
        failed(2, 1, Evidence()),
        failed(3, 7, Evidence(b"x" * 4000)),
    ]
    await writer.commit(Writes(attempts=rows, results=[result_rows([0], attempt=4)]))
    record = await ledger.item(1, 0, 9)
    assert record is not None and (record.units_in, record.units_out) == (3, 4)
    assert record.ended == [as_read(row).ended for row in rows[:3]]
    began = [as_read(row) for row in rows if row.began_ms]
    assert await ledger.attempts(1, (0, 0), 9, 1 << 20) == began
    assert await ledger.attempts(1, (0, 1), 2, 1 << 20) == began[1:3]
    assert await ledger.attempts(1, (2, 1), 9, 100) == began[3:], "at least one"
    assert await ledger.attempts(1, (0, 0), 9, 110) == began[:2]
    assert await ledger.attempts(1, (3, 7), 9, 100) == await ledger.attempts(77, (0, 0), 9, 100) == []


async def test_its_objects_are_kept_until_they_are_let_go_whether_or_not_the_item_has_a_result(
    writer: Writer, ledger: Ledger
) -> None:
    await writer.run(2)
    left = Evidence(SLICE, (TAR, OTHER))
    result = replace(result_rows([0], attempt=2), keeps={0: (OTHER,)})
    rows = [failed(0, 1, left, worker="first"), failed(1, 1, left, worker="second")]
    await writer.commit(Writes(attempts=rows, results=[result]))
    assert await ledger.kept(RUN) == [(0, TAR, 1), (0, OTHER, 0), (1, TAR, 1), (1, OTHER, 1)]
    assert await ledger.referenced([PACK, TAR, OTHER]) == {PACK, TAR, OTHER} == await ledger.run_objects(RUN)
    await writer.commit(Writes(released=[(1, 0)]))
    await ledger.release(writer.fence.epoch, RUN, [1])
    assert await ledger.kept(RUN) == [] and await ledger.referenced([PACK, TAR, OTHER]) == {PACK}
    gone = [(1, 0, TAR, "first"), (1, 0, OTHER, WORKER), (1, 1, TAR, "second"), (1, 1, OTHER, "second")]
    assert await ledger.to_free(9) == gone
    await ledger.freed(writer.fence.epoch, await ledger.to_free(1))
    await writer.commit(Writes(attempts=[failed(0, 3, left)]))
    assert await ledger.kept(RUN) == [(0, TAR, 3), (0, OTHER, 3)], "named again before it was freed"


async def test_a_deleted_run_takes_it_along(writer: Writer, ledger: Ledger) -> None:
    await writer.run(1)
    await writer.commit(Writes(attempts=[failed(0, 1, Evidence(SLICE, (TAR,)))]))
    await writer.commit(Writes(deleted_runs=[RUN]))
    assert await ledger.referenced([PACK, TAR]) == set()
    while await ledger.purge(100):
        pass
    assert await ledger.attempts(1, (0, 0), 9, 100) == []


async def test_the_next_leader_knows_where_and_by_what_an_item_failed_last_and_how_long_it_waits(
    writer: Writer, ledger: Ledger
) -> None:
    await writer.run(3)
    rows = [
        failed(0, 1, Evidence(), worker="first", code="one", not_before_ms=1006),
        failed(0, 2, Evidence(b"d"), worker="second", code="two", not_before_ms=5006, at_ms=4006),
        attempt_row(0, AttemptEnd.RELEASED, 3),
        attempt_row(1, AttemptEnd.RELEASED, 1),
    ]
    await writer.commit(Writes(attempts=rows, assignments=[assignment(1, (1, [0], 4), (1, [1, 2], 2))]))
    history = {
        item.seq: (item.attempts, item.failures, item.not_before_ms, item.delay_ms, item.failed_on, item.failed_by)
        for item in (await ledger.pending(load_pending())).items
    }
    assert history == {0: (3, 2, 5006, 1000, "second", "two"), 1: (1, 0, 0, 0, "", ""), 2: (0, 0, 0, 0, "", "")}
    (again,) = (await ledger.items(LoadItems(1, 1, [0]))).items
    assert (again.failed_on, again.failed_by) == ("second", "two")
    opened = {one.seq: (one.failures, one.failed_on, one.failed_by) for one in (await ledger.snapshot()).open_attempts}
    assert opened == {0: (2, "second", "two"), 1: (0, "", ""), 2: (0, "", "")}
