"""What is asked of a run's items, over SQLite and PostgreSQL: bounded pages, states, attempts, failures."""

from __future__ import annotations

from dataclasses import replace

from ledger_rows import RUN, WORKER, Writer, attempt_row, log_row, result_rows
from rollout.model.item import AttemptEnd, Failure, Outcome
from rollout.model.worker import Inventory, WorkerState
from rollout_coordinator.core.step import AttemptRow, WorkerRow, Writes
from rollout_coordinator.ledger import Ledger
from rollout_coordinator.ledger.port import EndedAttempt, Seqs, Which

BAD = Failure("bad_row", "no prompt\nand more", False)


def began(seq: int, end: AttemptEnd, attempt: int = 1, at_ms: int = 900) -> AttemptRow:
    return replace(attempt_row(seq, end, attempt), began_ms=at_ms - 100, at_ms=at_ms)


async def test_rows_by_what_became_of_them(writer: Writer, ledger: Ledger) -> None:
    await writer.run(10)
    failed = result_rows([2, 5, 8], outcome=Outcome.FAILED, failures={0: BAD, 1: BAD, 2: BAD})
    attempts = [attempt_row(0, AttemptEnd.REVOKED), began(1, AttemptEnd.PAUSED), began(3, AttemptEnd.FAILED)]
    await writer.commit(Writes(results=[result_rows([0, 1, 3]), failed], attempts=attempts))
    assert await ledger.seqs(1, Which.ALL, 3, 4) == Seqs([3, 4, 5, 6], 7, False)
    assert await ledger.seqs(1, Which.FAILED, 0, 2) == Seqs([2, 5], 6, False)
    assert await ledger.seqs(1, Which.FAILED, 6, 2) == Seqs([8], 10, True)
    assert await ledger.seqs(1, Which.RETRIED, 0, 9) == Seqs([1, 3], 10, True), "0 never began where it was stolen"
    assert await ledger.seqs(1, Which.OPEN, 0, 2) == Seqs([4, 6], 7, False)
    assert await ledger.seqs(1, Which.OPEN, 7, 9) == Seqs([7, 9], 10, True)
    for which in Which:
        assert await ledger.seqs(1, which, 10, 9) == Seqs([], 10, True)
        assert await ledger.seqs(77, which, 0, 9) == Seqs([], 0, True)


async def test_a_page_of_open_rows_is_bounded_where_most_have_results(writer: Writer, ledger: Ledger) -> None:
    await writer.run(12_000)
    await writer.commit(Writes(results=[result_rows(range(11_990))]))
    assert await ledger.seqs(1, Which.OPEN, 0, 5) == Seqs([], 10_000, False)
    assert await ledger.seqs(1, Which.OPEN, 10_000, 99) == Seqs(list(range(11_990, 12_000)), 12_000, True)


async def test_states_and_tries_of_rows(writer: Writer, ledger: Ledger) -> None:
    await writer.run(7)
    won = Failure("group_won", "another was faster", False)
    attempts = [
        *(attempt_row(1, AttemptEnd.REVOKED, attempt=n) for n in (1, 2)),
        began(1, AttemptEnd.WORKER_LOST, attempt=3),
        attempt_row(4, AttemptEnd.RELEASED),  # its only attempt, and its group was won before it began
        began(5, AttemptEnd.FAILED),
    ]
    results = [
        result_rows([0]),
        result_rows([1], attempt=4),
        result_rows([2], outcome=Outcome.FAILED, failures={0: BAD}),
        result_rows([3]),
        result_rows([4], outcome=Outcome.CANCELLED, failures={0: won}),
    ]
    logs = {1: log_row(1, RUN, submitted=7, cursor=3)}
    await writer.commit(Writes(results=results, attempts=attempts, logs=logs))
    rows = await ledger.item_states(1, [6, 5, 4, 3, 2, 1, 0, 99])
    assert [(row.seq, row.state, row.tries) for row in rows] == [
        (0, "done", 1),
        (1, "done", 2),
        (2, "failed", 1),
        (3, "accepted", 1),
        (4, "cancelled", 0),
        (5, "open", 1),
        (6, "open", 0),
    ]
    assert (rows[2].worker, rows[2].at_ms, rows[2].duration_ms) == (WORKER, 99, 7)
    assert (rows[2].code, rows[2].message) == (BAD.code, BAD.message) and rows[6].worker == ""
    page = await ledger.commit_log(1, 0, 9, 1 << 20, True)
    assert (page.attempt, page.tries) == ([1, 4, 1], [1, 2, 1])


async def test_a_row_with_its_attempts(writer: Writer, ledger: Ledger) -> None:
    await writer.run(2)
    attempts = [attempt_row(1, AttemptEnd.REVOKED, attempt=1), began(1, AttemptEnd.TIMEOUT, attempt=2)]
    await writer.commit(Writes(attempts=attempts))
    item = await ledger.item(1, 1, 9)
    assert item is not None and (item.state.state, item.result, item.attempt) == ("open", None, 0)
    assert item.ended == [
        EndedAttempt(1, WORKER, "revoked", "code", "message", 0, 6),
        EndedAttempt(2, WORKER, "timeout", "code", "message", 800, 900),
    ]
    await writer.commit(Writes(results=[result_rows([1], attempt=3)]))
    item = await ledger.item(1, 1, 1)
    assert item is not None and (item.result, item.attempt) == (b"r1", 3)
    assert [one.attempt for one in item.ended] == [2], "the newest of them"
    assert await ledger.item(1, 2, 1) is None


async def test_the_last_failures(writer: Writer, ledger: Ledger) -> None:
    await writer.run(6)
    ends = {0: AttemptEnd.FAILED, 1: AttemptEnd.WORKER_LOST, 2: AttemptEnd.TIMEOUT}
    attempts = [began(seq, end, at_ms=50 + 20 * seq) for seq, end in ends.items()]
    attempts += [began(3, AttemptEnd.PAUSED, at_ms=500), attempt_row(4, AttemptEnd.RELEASED)]
    failed = result_rows([5], outcome=Outcome.FAILED, failures={0: BAD})
    await writer.commit(Writes(attempts=attempts, results=[failed, result_rows([0])]))
    found = await ledger.last_failures(1, 3)
    assert [(one.seq, one.final, one.at_ms) for one in found] == [(5, True, 99), (2, False, 90), (1, False, 70)]
    assert (found[0].code, found[0].message, found[0].worker) == (BAD.code, BAD.message, WORKER)


async def test_children_are_found_by_their_parent(writer: Writer, ledger: Ledger) -> None:
    await writer.run(2)
    child = replace(log_row(2, RUN, submitted=3, cursor=1), parent_log=1, parent_seq=1)
    await writer.commit(Writes(logs={2: child}))
    assert await ledger.child_log(1, 1) == (2, 3, 1)
    assert await ledger.child_log(1, 0) is None and await ledger.child_log(0, 0) is None


async def test_workers_by_their_ids(writer: Writer, ledger: Ledger) -> None:
    rows = {name: WorkerRow(name, "h", Inventory((), host=name), WorkerState.GONE, 1, 2, "") for name in ("a", "b")}
    await writer.commit(Writes(workers=rows))
    assert [row.inventory.host for row in await ledger.workers_at(["b", "c"])] == ["b"]


async def test_attempts_go_with_their_run(writer: Writer, ledger: Ledger) -> None:
    await writer.run(3)
    await writer.commit(Writes(attempts=[began(1, AttemptEnd.FAILED)]))
    await writer.commit(Writes(deleted_runs=[RUN]))
    while await ledger.purge(100):
        pass
    assert await ledger.last_failures(1, 9) == [] and await ledger.seqs(1, Which.RETRIED, 0, 9) == Seqs([], 0, True)
