"""What every ledger answers, over SQLite and PostgreSQL: the core's loads, the commit log, views, objects; and deletion."""

from __future__ import annotations

import pytest
from ledger_rows import (
    RUN,
    WORKER,
    Writer,
    assignment,
    attempt_row,
    item_id,
    item_rows,
    load_pending,
    log_row,
    result_rows,
)
from rollout.model.item import AttemptEnd, Blob, Failure, ItemSpec, ObjectSlice, Outcome
from rollout.model.run import Lane, Order, RunSpec, RunState
from rollout_coordinator.core.step import (
    LaneRow,
    LoadIds,
    LoadItems,
    LoadResults,
    SpecRow,
    Writes,
)
from rollout_coordinator.ledger import Ledger

# ---- reads of the core


async def test_pending_rows_are_those_without_a_result(writer: Writer, ledger: Ledger) -> None:
    await writer.run(6)
    await writer.commit(Writes(results=[result_rows([0, 2, 5])]))
    loaded = await ledger.pending(load_pending())
    assert [(item.seq, item.id, item.payload) for item in loaded.items] == [
        (seq, item_id(seq), b"p%d" % seq) for seq in (1, 3, 4)
    ]
    assert (loaded.next_seq, loaded.end) == (6, True)


@pytest.mark.parametrize(("limit", "max_bytes"), [(2, 1 << 20), (100, 4)])
async def test_pending_stops_at_its_limits(writer: Writer, ledger: Ledger, limit: int, max_bytes: int) -> None:
    await writer.run(5)
    loaded = await ledger.pending(load_pending(1, limit, max_bytes))
    assert [item.seq for item in loaded.items] == [1, 2]
    assert (loaded.next_seq, loaded.end) == (3, False)


async def test_pending_takes_at_least_one_row(writer: Writer, ledger: Ledger) -> None:
    await writer.run(2)
    assert [item.seq for item in (await ledger.pending(load_pending(max_bytes=1))).items] == [0]


async def test_pending_pages_over_many_rows(writer: Writer, ledger: Ledger) -> None:
    await writer.run(1300)
    loaded = await ledger.pending(load_pending(limit=1250))
    assert (len(loaded.items), loaded.next_seq, loaded.end) == (1250, 1250, False)
    loaded = await ledger.pending(load_pending(1250, limit=1250))
    assert (len(loaded.items), loaded.next_seq, loaded.end) == (50, 1300, True)


@pytest.mark.parametrize(("limit", "next_seq"), [(700, 4200), (5000, 6000)])
async def test_pending_rows_behind_many_results(writer: Writer, ledger: Ledger, limit: int, next_seq: int) -> None:
    await writer.run(6000)
    await writer.commit(Writes(results=[result_rows([seq for seq in range(3502) if seq not in (7, 2000)])]))
    loaded = await ledger.pending(load_pending(limit=limit))
    assert [item.seq for item in loaded.items] == [7, 2000, *range(3502, next_seq)]
    assert (loaded.next_seq, loaded.end) == (next_seq, next_seq == 6000)


async def test_pending_at_the_end_of_a_log(writer: Writer, ledger: Ledger) -> None:
    await writer.run(3)
    loaded = await ledger.pending(load_pending(3))
    assert (loaded.items, loaded.next_seq, loaded.end) == ([], 3, True)
    loaded = await ledger.pending(load_pending(log=77))
    assert (loaded.items, loaded.next_seq, loaded.end) == ([], 0, True)
    await writer.commit(Writes(results=[result_rows([1, 2])]))
    loaded = await ledger.pending(load_pending(1))
    assert (loaded.items, loaded.next_seq, loaded.end) == ([], 3, True)


async def test_pending_rows_carry_their_history(writer: Writer, ledger: Ledger) -> None:
    await writer.run(3)
    ends = [AttemptEnd.FAILED, AttemptEnd.TIMEOUT, AttemptEnd.WORKER_LOST, AttemptEnd.REVOKED]
    rows = [attempt_row(1, end, attempt=n, not_before_ms=100 * n) for n, end in enumerate(ends, 1)]
    await writer.commit(Writes(attempts=rows))
    for loaded in (await ledger.pending(load_pending()), await ledger.items(LoadItems(1, 1, [2, 1, 0]))):
        found = [(i.seq, i.attempts, i.failures, i.losses, i.not_before_ms) for i in loaded.items]
        assert found == [(0, 0, 0, 0, 0), (1, 4, 2, 1, 400), (2, 0, 0, 0, 0)]


async def test_the_first_word_on_an_attempt_stands(writer: Writer, ledger: Ledger) -> None:
    await writer.run(1)
    await writer.commit(Writes(attempts=[attempt_row(0, AttemptEnd.WORKER_LOST)]))
    await writer.commit(Writes(attempts=[attempt_row(0, AttemptEnd.STALE)]))
    assert (await ledger.pending(load_pending())).items[0].losses == 1


async def test_ids_are_contiguous(writer: Writer, ledger: Ledger) -> None:
    await writer.run(5)
    loaded = await ledger.ids(LoadIds(9, 1, 3, 10))
    assert (loaded.load_id, loaded.first_seq, loaded.ids) == (9, 3, [item_id(3), item_id(4)])


async def test_results_come_in_order_with_blobs_and_failures(writer: Writer, ledger: Ledger) -> None:
    await writer.run(5)
    piece = ObjectSlice(b"o" * 32, 10, 5)
    failure = Failure("bad", "no\x00thing \ud800", False, True)
    await writer.commit(Writes(results=[result_rows([4, 0, 2], data=[piece, b"", b"x"], failures={1: failure})]))
    loaded = await ledger.results(LoadResults(1, 1, 0, 4, True))
    assert (loaded.seq, loaded.data, loaded.spec) == ([0, 2], [b"", b"x"], [0, 0])
    stored = loaded.failures[0]
    assert (stored.code, stored.retryable, stored.worker_lost) == ("bad", False, True)
    assert stored.message.startswith("no\ufffdthing")
    assert (await ledger.results(LoadResults(1, 1, 4, 4, True))).data == [piece]
    assert (await ledger.results(LoadResults(1, 1, 4, 4, False))).data == [b""]


@pytest.mark.parametrize(
    "data",
    [
        [b"a", b"a", b"a"],
        [b"a", b"b", b"a"],
        [b"", b"", b"a"],
        [ObjectSlice(b"o" * 32, 10, 5)] * 3,
        [b"a", ObjectSlice(b"o" * 32, 10, 5), b"a"],
        [b"a"],
    ],
)
async def test_results_come_back_each_where_some_or_all_say_the_same(
    writer: Writer, ledger: Ledger, data: list[Blob]
) -> None:
    n = len(data)
    await writer.run()
    await writer.commit(Writes(items=[item_rows(1, n, payloads=data)], results=[result_rows(range(n), data=data)]))
    items = await ledger.items(LoadItems(1, 1, list(range(n))))
    assert [(item.id, item.payload) for item in items.items] == [(item_id(seq), data[seq]) for seq in range(n)]
    assert (await ledger.results(LoadResults(1, 1, 0, n, True))).data == data


async def test_numbers_that_no_column_holds_are_clamped(writer: Writer, ledger: Ledger) -> None:
    await writer.run(1)
    rows = result_rows([0])
    rows.units_out = [1 << 64]
    await writer.commit(Writes(results=[rows], logs={1: log_row(submitted=1, cursor=1)}))
    assert (await ledger.commit_log(1, 0, 9, 999, False)).units_out == [(1 << 63) - 1]


# ---- the commit log


async def test_the_commit_log_ends_at_the_cursor(writer: Writer, ledger: Ledger) -> None:
    await writer.run(6)
    await writer.commit(Writes(results=[result_rows([3, 0, 1, 2, 5])], logs={1: log_row(submitted=6, cursor=4)}))
    page = await ledger.commit_log(1, 1, 100, 1 << 20, True)
    assert (page.from_cursor, page.seq) == (1, [1, 2, 3])
    assert (page.data, page.payloads) == ([b"r1", b"r2", b"r3"], [b"p1", b"p2", b"p3"])
    assert page.ids == [item_id(n) for n in (1, 2, 3)]
    assert (page.duration_ms, page.accepted_ms, page.worker) == ([7] * 3, [99] * 3, [WORKER] * 3)
    assert (await ledger.commit_log(1, 4, 100, 1 << 20, True)).seq == []


@pytest.mark.parametrize(("limit", "max_bytes", "payloads"), [(2, 1 << 20, False), (9, 4, False), (9, 9, True)])
async def test_the_commit_log_comes_in_pages(
    writer: Writer, ledger: Ledger, limit: int, max_bytes: int, payloads: bool
) -> None:
    await writer.run(5)
    await writer.commit(Writes(results=[result_rows(range(5))], logs={1: log_row(submitted=5, cursor=5)}))
    read: list[int] = []
    pages = 0
    while page := (await ledger.commit_log(1, len(read), limit, max_bytes, payloads)).seq:
        read += page
        pages += 1
    assert (read, pages) == ([0, 1, 2, 3, 4], 3)


async def test_a_page_takes_at_least_one_result(writer: Writer, ledger: Ledger) -> None:
    await writer.run(2)
    await writer.commit(Writes(results=[result_rows(range(2))], logs={1: log_row(submitted=2, cursor=2)}))
    assert (await ledger.commit_log(1, 0, 9, 0, True)).seq == [0]


async def test_a_page_may_be_longer_than_one_fetch(writer: Writer, ledger: Ledger) -> None:
    await writer.run(1300)
    await writer.commit(Writes(results=[result_rows(range(1300))], logs={1: log_row(submitted=1300, cursor=1300)}))
    assert (await ledger.commit_log(1, 10, 1200, 1 << 30, True)).seq == list(range(10, 1210))


async def test_arrival_order_follows_positions(writer: Writer, ledger: Ledger) -> None:
    await writer.run(6, order=Order.ARRIVAL)
    rows = result_rows([5, 2, 4], position=[0, 1, 2], failures={1: Failure("c", "m")})
    await writer.commit(Writes(results=[rows], logs={1: log_row(submitted=6, cursor=3)}))
    page = await ledger.commit_log(1, 0, 10, 1 << 20, True)
    assert (page.seq, list(page.failures), page.payloads) == ([5, 2, 4], [1], [b"p5", b"p2", b"p4"])
    assert (await ledger.commit_log(1, 1, 1, 1 << 20, False)).seq == [2]
    assert (await ledger.snapshot()).accepted == {1: [(2, 2), (4, 5)]}


async def test_unknown_logs_have_empty_commit_logs(ledger: Ledger) -> None:
    assert (await ledger.commit_log(5, 0, 10, 100, True)).seq == []


async def test_pruned_results_become_skipped(writer: Writer, ledger: Ledger) -> None:
    await writer.run(4)
    await writer.commit(Writes(results=[result_rows([1, 2])]))
    await writer.commit(Writes(results=[result_rows([3])], prune=[(1, 2, 1), (1, 3, 1)]))
    loaded = await ledger.results(LoadResults(1, 1, 0, 9, True))
    assert loaded.outcome == [Outcome.DONE, Outcome.SKIPPED, Outcome.SKIPPED]


@pytest.mark.parametrize("order", list(Order))
async def test_who_won_the_groups_is_read_from_what_is_committed(writer: Writer, ledger: Ledger, order: Order) -> None:
    await writer.run(order=order)
    items = item_rows(1, 7)
    items.spec = [0, 1, 1, 2, 1, 2, 2]
    specs = [SpecRow(RUN, 1, ItemSpec(group="g")), SpecRow(RUN, 2, ItemSpec(group="h"))]
    arrival = order is Order.ARRIVAL
    done = result_rows([0, 2, 5, 6], position=[0, 1, 2, 3] if arrival else None)
    failed = result_rows([1, 3], outcome=Outcome.FAILED, position=[4, 5] if arrival else None)
    log = log_row(submitted=7, cursor=6 if arrival else 4)
    await writer.commit(Writes(items=[items], results=[done, failed], logs={1: log}))
    assert (await ledger.snapshot()).won == [], "not looked for in a run without groups"
    await writer.commit(Writes(specs=specs))
    found = await ledger.run_snapshot(RUN)
    assert found is not None and found.won == (await ledger.snapshot()).won
    wins = {spec: seq for log, spec, seq in found.won if log == 1}
    assert (wins.get(1), wins.get(2)) == (2, 5 if arrival else None), (
        "5 is done, but not committed, where order is kept"
    )


# ---- views, objects, deletion


async def test_run_views(writer: Writer, ledger: Ledger) -> None:
    ids = [f"01J0000000000000000000000{n}" for n in range(3)]
    for n, run_id in enumerate(ids):
        state = RunState.COMPLETED if n == 1 else RunState.RUNNING
        await writer.run(n, run_id=run_id, log=n + 1, created_ms=n, state=state)
    assert [view.spec.run_id for view in await ledger.run_views((), 2)] == [ids[2], ids[1]]
    assert [view.spec.run_id for view in await ledger.run_views(("running",), 9)] == [ids[2], ids[0]]
    view = await ledger.run_view(ids[2])
    assert view is not None and (view.submitted, view.in_flight, view.root_log) == (2, 0, 3)
    assert await ledger.run_view("nobody") is None


async def test_find_runs(writer: Writer, ledger: Ledger) -> None:
    ids = ["01J00000000000000000000ABC", "01J0000000000000000000ABCD", "01J1000000000000000000ABCD"]
    for n, (run_id, name) in enumerate(zip(ids, ["50%_o", "", "50%"], strict=True)):
        spec = RunSpec(run_id, "infer", b"{}", name=name)
        await writer.run(n, spec=spec, log=n + 1, created_ms=n)

    async def found(text: str, *, complete: bool = False, limit: int = 9) -> list[str]:
        return [run.run_id for run in await ledger.find_runs(text, complete=complete, limit=limit)]

    assert await found("01j0") == [ids[1], ids[0]], "the newest first, in either case"
    assert await found("0000abcd") == [ids[2], ids[1]], "as it is shown"
    assert await found("0000") == [ids[2], ids[1], ids[0]]
    assert await found("abcd") == [], "the end of what is shown stands for nothing"
    assert await found("01J", limit=1) == [ids[2]]
    assert await found("50%") == [ids[2]], "a name is no pattern"
    assert await found("50%", complete=True) == [ids[2], ids[0]]
    assert await found("%") == await found("_1J0") == await found("x\x00") == await found("") == []
    assert await found("", complete=True) == ids[::-1]
    (run,) = await ledger.find_runs(ids[0], complete=False, limit=9)
    assert run == (ids[0], "infer", "50%_o", "running", 0)


async def test_lanes_of_a_run_view(writer: Writer, ledger: Ledger) -> None:
    spec = RunSpec(RUN, "infer", b"{}", lanes=(Lane("a", 5),))
    await writer.run(1, spec=spec)
    await writer.commit(Writes(lanes={(RUN, "a"): LaneRow(RUN, "a", 2, 1, 0, 17)}))
    view = await ledger.run_view(RUN)
    assert view is not None
    lane = view.lanes[0]
    assert (lane.name, lane.max_in_flight, lane.done, lane.failed, lane.pruned_at) == ("a", 5, 2, 1, 17)


async def test_referenced_objects(writer: Writer, ledger: Ledger) -> None:
    await writer.run(0)
    one, two, three = (bytes([n]) * 32 for n in (1, 2, 3))
    items = item_rows(1, 3, payloads=[ObjectSlice(one, 0, 9), ObjectSlice(one, 9, 9), b"x"])
    await writer.commit(Writes(items=[items], results=[result_rows([2], data=[ObjectSlice(two, 0, 1)])]))
    assert await ledger.referenced([one, two, three]) == {one, two}
    assert await ledger.referenced([]) == set()
    assert await ledger.run_objects(RUN) == {one, two}
    await writer.commit(Writes(deleted_runs=[RUN]))
    assert await ledger.referenced([one, two, three]) == set()


async def test_a_deleted_run_is_gone_at_once_and_its_rows_soon(writer: Writer, ledger: Ledger) -> None:
    await writer.run(30)
    await writer.run(2, run_id="01J00000000000000000000002", log=2)
    await writer.commit(
        Writes(
            results=[result_rows(range(10))],
            attempts=[attempt_row(11, AttemptEnd.FAILED)],
            logs={1: log_row(submitted=30)},
        )
    )
    await writer.commit(Writes(assignments=[assignment(1, (1, [12], 1)), assignment(2, (2, [1], 1))]))
    await writer.commit(Writes(deleted_runs=[RUN]))
    assert await ledger.run_view(RUN) is None
    snapshot = await ledger.snapshot()
    assert [run.root_log for run in snapshot.runs] == [2]
    assert [a.log for a in snapshot.open_attempts] == [2]
    removed = []
    while n := await ledger.purge(8):
        removed.append(n)
    assert sum(removed) == 30 + 10 + 1 + 1 and max(removed) <= 8
    assert (await ledger.pending(load_pending())).items == []
    assert len((await ledger.pending(load_pending(log=2))).items) == 2


async def test_the_number_of_a_deleted_log_is_never_used_again(writer: Writer, ledger: Ledger) -> None:
    await writer.run(1, log=41)
    await writer.commit(Writes(deleted_runs=[RUN]))
    while await ledger.purge(100):
        pass
    assert (await ledger.snapshot()).next_log == 42
