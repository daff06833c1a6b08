"""What every ledger must do, over SQLite and PostgreSQL: fenced commits, and the snapshot that a new leader replays."""

from __future__ import annotations

import dataclasses

import pytest
from ledger_rows import (
    RUN,
    WORKER,
    Writer,
    assignment,
    attempt_row,
    item_rows,
    load_pending,
    log_row,
    result_rows,
    run_row,
)
from rollout.config.settings import StorageSection
from rollout.model.errors import ConflictError, FencedError, StorageUnavailableError
from rollout.model.item import AttemptEnd, ItemSpec
from rollout.model.run import Lane, Order, Policy, RunSpec, RunState
from rollout.model.worker import Inventory, WorkerState
from rollout_coordinator.core.step import (
    LaneRow,
    LoadResults,
    SpecRow,
    WorkerRow,
    Writes,
)
from rollout_coordinator.ledger import Fence, Ledger, open_ledger

# ---- fencing


async def test_each_commit_takes_the_next_batch(writer: Writer, ledger: Ledger) -> None:
    await writer.commit(Writes())
    await writer.commit(Writes())
    lease = await ledger.read_lease()
    assert lease is not None and lease.batch == 2


@pytest.mark.parametrize("fence", [Fence(0, 1), Fence(1, 0), Fence(7, 7)])
async def test_a_commit_under_another_fence_writes_nothing(writer: Writer, ledger: Ledger, fence: Fence) -> None:
    writes = Writes(runs={RUN: run_row()}, logs={1: log_row()})
    with pytest.raises(FencedError):
        await ledger.commit(fence, writes)
    assert await ledger.run_view(RUN) is None
    lease = await ledger.read_lease()
    assert lease is not None and lease.batch == 0


async def test_a_commit_without_any_lease_is_fenced(ledger: Ledger) -> None:
    with pytest.raises(FencedError):
        await ledger.commit(Fence(0, 0), Writes())


async def test_a_second_result_of_an_item_fails_the_whole_transaction(writer: Writer, ledger: Ledger) -> None:
    await writer.run(3)
    await writer.commit(Writes(results=[result_rows([1])]))
    writes = Writes(results=[result_rows([0, 1], attempt=2)], logs={1: log_row(submitted=3, cursor=2)})
    with pytest.raises(ConflictError):
        await writer.commit(writes)
    assert (await ledger.results(LoadResults(1, 1, 0, 9, True))).seq == [1]
    assert (await ledger.snapshot()).logs[0].cursor == 0
    await writer.commit(Writes(results=[result_rows([0])]))  # the fence did not move


async def test_the_same_result_twice_in_one_transaction_fails_it(writer: Writer, ledger: Ledger) -> None:
    await writer.run(2)
    with pytest.raises(ConflictError):
        await writer.commit(Writes(results=[result_rows([1, 1])]))
    assert (await ledger.results(LoadResults(1, 1, 0, 9, True))).seq == []


async def test_an_item_row_is_written_once(writer: Writer) -> None:
    await writer.run(3)
    with pytest.raises(ConflictError):
        await writer.commit(Writes(items=[item_rows(1, 2, first=2)]))


# ---- what a snapshot holds


async def test_an_empty_ledger_replays_to_nothing(ledger: Ledger) -> None:
    snapshot = await ledger.snapshot()
    assert (snapshot.runs, snapshot.logs, snapshot.open_attempts, snapshot.accepted) == ([], [], [], {})
    assert (snapshot.next_log, snapshot.next_batch) == (1, 1)


async def test_rows_come_back_as_they_were_written(writer: Writer, ledger: Ledger) -> None:
    spec = RunSpec(
        RUN, "infer", '{"a":"ü"}'.encode(), "name", Order.ARRIVAL, 3, 9, (Lane("l", 2), Lane("é")),
        (Policy("prune_lane", (("after", "3"),)),), 1234, (("team", "x"),),
    )  # fmt: skip
    run = dataclasses.replace(
        run_row(spec=spec),
        reason="why",
        pausing_until_ms=8,
        survivors=((1, 2, 3, WORKER),),
        priority=4,
    )
    log = dataclasses.replace(
        log_row(submitted=5), sealed=True, attempts=6, units_in=1 << 40, extra='{"k":[1]}', invalid=7
    )
    item_spec = ItemSpec(
        lane="l", resources=(("gpus", 0.5), ("slots", 1.0)), require_labels=(("zone", "a"),), require_roles=("r",),
        exclusive=True,
    )  # fmt: skip
    lane = LaneRow(RUN, "l", 1, 2, 3, -1)
    worker = WorkerRow(WORKER, "host", Inventory((("slots", 4.0),), ("r",), (("z", "a"),)), WorkerState.READY, 7, 0, "")
    await writer.commit(
        Writes({RUN: run}, {1: log}, {(RUN, "l"): lane}, [SpecRow(RUN, 0, item_spec)], workers={WORKER: worker})
    )
    snapshot = await ledger.snapshot()
    assert snapshot.runs == [run]
    assert snapshot.logs == [log]
    assert snapshot.lanes == [lane]
    assert snapshot.specs == [SpecRow(RUN, 0, item_spec)]
    assert snapshot.workers == [worker]
    assert snapshot.next_log == 2


async def test_rows_are_replaced_whole(writer: Writer, ledger: Ledger) -> None:
    await writer.run(1)
    limited = SpecRow(RUN, 0, ItemSpec(timeout_ms=7))
    await writer.commit(
        Writes(runs={RUN: run_row(state=RunState.PAUSED)}, logs={1: log_row(submitted=1, cursor=1)}, specs=[limited])
    )
    assert (await ledger.snapshot()).specs == [limited]
    snapshot = await ledger.snapshot()
    assert snapshot.runs[0].state is RunState.PAUSED
    assert snapshot.logs[0].cursor == 1


@pytest.mark.parametrize("state", [RunState.COMPLETED, RunState.FAILED, RunState.KILLED])
async def test_ended_runs_are_left_on_disk(writer: Writer, ledger: Ledger, state: RunState) -> None:
    await writer.run(3)
    await writer.commit(Writes(assignments=[assignment(1, (1, [0], 1))]))
    await writer.commit(Writes(runs={RUN: run_row(state=state)}, results=[result_rows([1])]))
    snapshot = await ledger.snapshot()
    assert (snapshot.runs, snapshot.logs, snapshot.specs, snapshot.open_attempts) == ([], [], [], [])
    assert (snapshot.accepted, snapshot.next_log) == ({}, 2)
    one = await ledger.run_snapshot(RUN)
    assert one is not None
    assert [row.state for row in one.runs] == [state]
    assert ([row.log for row in one.logs], [row.index for row in one.specs]) == ([1], [0])
    assert (one.accepted, one.open_attempts, one.workers) == ({1: [(1, 1)]}, [], [])
    assert await ledger.run_snapshot("no such run") is None


async def test_an_ended_run_is_alive_while_attempts_outlive_it(writer: Writer, ledger: Ledger) -> None:
    await writer.run(3)
    await writer.commit(Writes(assignments=[assignment(1, (1, [0, 1], 1))]))
    survivors = ((1, 0, 1, WORKER),)
    run = dataclasses.replace(run_row(state=RunState.KILLED), survivors=survivors)
    over = [attempt_row(1, AttemptEnd.RELEASED)]
    await writer.commit(Writes(runs={RUN: run}, attempts=over))
    snapshot = await ledger.snapshot()
    assert [(row.spec.run_id, row.survivors) for row in snapshot.runs] == [(RUN, survivors)]
    assert ([row.log for row in snapshot.logs], [row.index for row in snapshot.specs]) == ([1], [0])
    assert [(one.log, one.seq, one.attempt) for one in snapshot.open_attempts] == [(1, 0, 1)]


async def test_assigned_items_are_open(writer: Writer, ledger: Ledger) -> None:
    await writer.run(10)
    await writer.commit(Writes(assignments=[assignment(4, (1, [3, 5], 1)), assignment(5, (1, [6], 2))]))
    snapshot = await ledger.snapshot()
    found = [(a.seq, a.attempt, a.worker, a.batch, a.spec) for a in snapshot.open_attempts]
    assert found == [(3, 1, WORKER, 4, 0), (5, 1, WORKER, 4, 0), (6, 2, WORKER, 5, 0)]
    assert snapshot.next_batch == 6


async def test_results_and_ended_attempts_close(writer: Writer, ledger: Ledger) -> None:
    await writer.run(10)
    await writer.commit(Writes(assignments=[assignment(1, (1, range(6), 1))]))
    ended = [
        attempt_row(1, AttemptEnd.FAILED),
        attempt_row(2, AttemptEnd.WORKER_LOST),
        attempt_row(3, AttemptEnd.RELEASED),
    ]
    await writer.commit(Writes(results=[result_rows([0])], attempts=ended))
    await writer.commit(Writes(assignments=[assignment(2, (1, [1, 2], 2))]))
    snapshot = await ledger.snapshot()
    found = [(a.seq, a.attempt, a.failures, a.losses) for a in snapshot.open_attempts]
    assert found == [(4, 1, 0, 0), (5, 1, 0, 0), (1, 2, 1, 0), (2, 2, 0, 1)]


async def test_a_retired_batch_is_gone(writer: Writer, ledger: Ledger) -> None:
    await writer.run(4)
    await writer.commit(Writes(assignments=[assignment(1, (1, [0], 1)), assignment(2, (1, [1], 1))]))
    await writer.commit(Writes(retired=[1], assignments=[assignment(3, (1, [2], 1))]))
    assert [a.seq for a in (await ledger.snapshot()).open_attempts] == [1, 2]


async def test_a_batch_given_and_retired_in_one_transaction_leaves_nothing(writer: Writer, ledger: Ledger) -> None:
    await writer.run(4)
    await writer.commit(Writes(assignments=[assignment(1, (1, [0], 1))], retired=[1]))
    assert (await ledger.snapshot()).open_attempts == []


async def test_batches_without_open_attempts_are_swept_after_a_replay(writer: Writer, ledger: Ledger) -> None:
    await writer.run(4)
    await writer.commit(Writes(assignments=[assignment(7, (1, [0], 1))]))
    await writer.commit(Writes(results=[result_rows([0])]))  # the leader dies before it retires the batch
    assert (await ledger.snapshot()).next_batch == 8
    await writer.commit(Writes())
    assert (await ledger.snapshot()).next_batch == 1


async def test_accepted_results_come_as_ranges_from_the_cursor(writer: Writer, ledger: Ledger) -> None:
    await writer.run(20)
    await writer.commit(
        Writes(
            results=[result_rows([0, 1, 2, 4, 5, 6, 9]), result_rows([19])], logs={1: log_row(submitted=20, cursor=3)}
        )
    )
    assert (await ledger.snapshot()).accepted == {1: [(4, 6), (9, 9), (19, 19)]}


async def test_ranges_of_several_logs_stay_apart(writer: Writer, ledger: Ledger) -> None:
    await writer.run(5)
    await writer.run(5, run_id="01J00000000000000000000002", log=2)
    await writer.commit(Writes(results=[result_rows([3, 4]), result_rows([0, 1], log=2)]))
    assert (await ledger.snapshot()).accepted == {1: [(3, 4)], 2: [(0, 1)]}


async def test_child_logs_stay_while_their_parent_is_open(writer: Writer, ledger: Ledger) -> None:
    await writer.run(3)
    child = log_row(2, submitted=2, parent=(1, 0))
    await writer.commit(Writes(logs={2: child}, items=[item_rows(2, 2)], results=[result_rows([1], log=2)]))
    snapshot = await ledger.snapshot()
    assert [log.log for log in snapshot.logs] == [1, 2]
    assert snapshot.accepted == {2: [(1, 1)]}
    done = dataclasses.replace(child, cursor=2)
    await writer.commit(Writes(logs={2: done}, results=[result_rows([0], log=2)]))
    assert [log.log for log in (await ledger.snapshot()).logs] == [1, 2]  # the parent may still read them
    await writer.commit(Writes(results=[result_rows([0])]))
    assert [log.log for log in (await ledger.snapshot()).logs] == [1]
    assert (await ledger.snapshot()).next_log == 3


async def test_ended_workers_are_left_on_disk(writer: Writer, ledger: Ledger) -> None:
    rows = {name: WorkerRow(name, "h", Inventory(), WorkerState.READY, n, 0, "") for n, name in enumerate("ABC")}
    rows["B"] = dataclasses.replace(rows["B"], state=WorkerState.FAILED, ended_ms=9)
    await writer.commit(Writes(workers=rows))
    assert [row.incarnation for row in (await ledger.snapshot()).workers] == ["A", "C"]
    assert [row.incarnation for row in await ledger.workers(2)] == ["C", "B"]


async def test_the_newest_quarantined_workers_come_back(
    writer: Writer, ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = [WorkerRow(name, "h", Inventory(), WorkerState.QUARANTINED, 1, n, "lied") for n, name in enumerate("CBA", 5)]
    living = WorkerRow("D", "h", Inventory(), WorkerState.READY, 1, 0, "")
    await writer.commit(Writes(workers={row.incarnation: row for row in (living, *out)}))
    assert (await ledger.snapshot()).workers == [living, *out]
    monkeypatch.setattr("rollout_coordinator.ledger.ledger.QUARANTINED_MAX", 2)
    assert (await ledger.snapshot()).workers == [living, *out[1:]]


async def test_workers_that_ended_long_ago_are_forgotten(writer: Writer, ledger: Ledger) -> None:
    def row(name: str, registered: int, ended: int, state: WorkerState = WorkerState.FAILED) -> WorkerRow:
        return WorkerRow(name, "h", Inventory(), state, registered, ended, "")

    old = [row(f"old-{n}", n, 50 + n) for n in range(5)]
    stay = [
        row("lives long", 1, 0, WorkerState.READY),
        row("ended lately", 2, 101),
        row("quarantined lately", 3, 150, WorkerState.QUARANTINED),
    ]
    old.append(row("quarantined", 4, 99, WorkerState.QUARANTINED))
    stay.append(row("has an open attempt", 5, 60))
    await writer.run(1)
    await writer.commit(Writes(workers={r.incarnation: r for r in (*old, *stay)}))
    await writer.commit(
        Writes(assignments=[dataclasses.replace(assignment(4, (1, [0], 1)), worker="has an open attempt")])
    )
    assert await ledger.forget_workers(100, 4) == 4
    assert await ledger.forget_workers(100, 4) == 2
    assert await ledger.forget_workers(100, 4) == 0
    assert {r.incarnation for r in await ledger.workers(9)} == {r.incarnation for r in stay}


async def test_it_is_all_there_after_reopening(writer: Writer, ledger: Ledger, storage_section: StorageSection) -> None:
    await writer.run(3)
    await ledger.close()
    again = open_ledger(storage_section)
    await again.open()
    try:
        assert len((await again.pending(load_pending())).items) == 3
        lease = await again.read_lease()
        assert lease is not None and lease.batch == 1
    finally:
        await again.close()


async def test_a_closed_ledger_says_so(ledger: Ledger) -> None:
    await ledger.close()
    with pytest.raises(StorageUnavailableError):
        await ledger.snapshot()
