"""Chains, parents with children, and an operator's verbs, against work that is under way."""

from __future__ import annotations

import json

import pytest
from engine_cluster import Engine, done, outcomes, overlap
from rollout.model.errors import NotFoundError, StateError
from rollout.model.item import Outcome
from rollout.model.run import Lane

SOLO = {"node": "3"}


def chain(engine: Engine, name: str, n: int, **spec: object) -> list:
    return [
        engine.item({"chain_append": True, "data": f"{i}.", "sleep_ms": 15, "effects": engine.effects_file},
                    chain=name, **spec)
        for i in range(n)
    ]  # fmt: skip


async def test_a_chain_runs_one_at_a_time_in_order_on_one_worker(calm: Engine) -> None:
    a, b = chain(calm, "a", 8), chain(calm, "b", 8)
    entries, _ = await calm.run([item for pair in zip(a, b, strict=True) for item in pair])
    done(entries)
    for first in (0, 1):
        links = entries[first::2]
        assert [e.data.decode() for e in links] == ["".join(f"{i}." for i in range(n + 1)) for n in range(8)]
        assert len({e.worker for e in links}) == 1, "affinity"


async def test_links_of_a_chain_never_overlap(calm: Engine) -> None:
    entries, _ = await calm.run(chain(calm, "a", 10))
    assert len(done(entries)) == 10
    assert overlap(calm.effects()) == 1
    assert [e.name for e in calm.effects("start")] == [f"{i}." for i in range(10)]


async def test_a_failed_link_hands_on_what_it_got(calm: Engine) -> None:
    items = chain(calm, "a", 4)
    items[1] = calm.item({"fatal": True}, chain="a")
    items[2] = calm.item({"chain_append": True, "data": "2.", "fail_times": 1}, chain="a")
    entries, _ = await calm.run(items)
    assert outcomes(entries) == [Outcome.DONE, Outcome.FAILED, Outcome.DONE, Outcome.DONE]
    assert [e.data for e in entries] == [b"0.", b"", b"0.2.", b"0.2.3."]


async def test_a_large_link_is_handed_on(calm: Engine) -> None:
    items = [calm.item({"size": 300_000}, chain="a"), calm.item({"chain_append": True, "data": "end"}, chain="a")]
    entries, _ = await calm.run(items)
    assert entries[1].data == entries[0].data + b"end" and len(entries[0].data) == 300_000


async def test_a_pipelined_chain_commits_in_order(calm: Engine) -> None:
    items = [calm.item({"data": n, "sleep_ms": 10}, chain="p", pipelined=True) for n in range(12)]
    entries, _ = await calm.run(items)
    assert done(entries) == [str(n) for n in range(12)]
    assert len({e.worker for e in entries}) == 1


async def test_parents_and_grandchildren_on_one_slot(calm: Engine) -> None:
    """The parents that wait give up the only slot, or nothing would ever finish."""
    leaf = [{"data": n, "effects": calm.effects_file} for n in range(2)]
    child = {"spawn": leaf, "child_labels": SOLO}
    parent = calm.item({"spawn": [child, child, {"data": "x"}], "child_labels": SOLO}, require_labels=(("node", "3"),))
    entries, status = await calm.run([parent])
    assert json.loads(done(entries)[0]) == ['["0","1"]', '["0","1"]', "x"]
    assert len(calm.effects("start")) == 4
    assert (status.state, status.cursor) == ("completed", 1), "children are outside the run's own cursor"


async def test_many_parents_share_the_workers(calm: Engine) -> None:
    parents = [calm.item({"spawn": [{"data": f"{p}-{n}"} for n in range(10)]}) for p in range(12)]
    entries, _ = await calm.run(parents)
    assert [json.loads(d) for d in done(entries)] == [[f"{p}-{n}" for n in range(10)] for p in range(12)]


async def test_children_of_a_lane_keep_its_cap(calm: Engine) -> None:
    children = [{"sleep_ms": 20, "effects": calm.effects_file} for _ in range(6)]
    entries, _ = await calm.run([calm.item({"spawn": children, "child_lane": "l"})], lanes=(Lane("l", 2),))
    done(entries)
    assert overlap(calm.effects()) <= 2


@pytest.mark.parametrize("fault", ["crash_after", "fail_children"])
async def test_a_parent_that_is_tried_again_finds_its_children(calm: Engine, fault: str) -> None:
    children: list[dict] = [{"data": n, "effects": calm.effects_file} for n in range(5)]
    if fault == "fail_children":
        children[2]["fatal"] = True
    parent = {"spawn": children, "crash_after": 2 if fault == "crash_after" else 0}
    one_worker = (("node", "2"),)  # nobody steals an attempt before it began: they are counted below
    entries, _ = await calm.run([calm.item(parent, require_labels=one_worker)])
    expected: list = [str(n) for n in range(5)]
    if fault == "fail_children":
        expected[2] = {"error": "scripted"}
    assert json.loads(done(entries)[0]) == expected
    assert entries[0].attempt == (3 if fault == "crash_after" else 1)
    starts = [e.name for e in calm.effects("start")]
    assert sorted(starts) == [str(n) for n in range(5)], "each child was made, and run, once"


async def test_pause_is_acknowledged_when_nothing_runs_any_more(calm: Engine) -> None:
    items = [calm.item({"until": str(calm.gate()), "effects": calm.effects_file, "data": n}) for n in range(30)]
    run = await calm.submit(items)
    await calm.started(9)
    status = await calm.client.command(run, "pause", reason="lunch")
    assert status.state == "paused" and status.pausing
    calm.gate().touch()
    status = await calm.status(run, lambda s: not s.pausing, "the pause to be acknowledged")
    assert (status.state, status.in_flight, status.reason) == ("paused", 0, "lunch")
    finished = status.done
    assert 9 <= finished < 30 and len(calm.effects("start")) == finished
    assert (await calm.client.command(run, "pause")).state == "paused", "asking again is no error"
    await calm.client.command(run, "resume")
    entries, status = await calm.finish(run)
    assert done(entries) == [str(n) for n in range(30)]
    assert len(calm.effects("start")) == 30, "pausing cost no attempt"


async def test_a_pause_that_work_outlives_leaves_the_run_interrupted_with_survivors(calm: Engine) -> None:
    """003, edge case 6, with real workers."""
    items = [calm.item({"until": str(calm.gate()), "effects": calm.effects_file, "data": n}) for n in range(2)]
    items += [calm.item({"data": "later"}, not_before_ms=1 << 42) for _ in range(1)]
    run = await calm.submit(items, pause_timeout_ms=300)
    await calm.started(2)
    await calm.client.command(run, "pause")
    status = await calm.status(run, lambda s: s.state == "interrupted", "the pause to time out")
    assert sorted(seq for keys in status.survivors for seq in keys.seq) == [0, 1]
    calm.gate().touch()
    await calm.status(run, lambda s: s.done == 2, "the survivors' results")
    assert (await calm.client.command(run, "continue")).state == "running"
    assert (await calm.client.command(run, "kill")).state == "killed"
    assert len(calm.effects("start")) == 2


async def test_kill_stops_what_runs_and_continue_runs_what_has_no_result(calm: Engine) -> None:
    items = [calm.item({"data": n, "effects": calm.effects_file}) for n in range(5)]
    items += [calm.item({"until": str(calm.gate()), "data": n, "effects": calm.effects_file}) for n in range(5, 10)]
    run = await calm.submit(items)
    await calm.started(10)
    await calm.status(run, lambda s: s.done == 5, "half of them")
    status = await calm.client.command(run, "kill", reason="enough")
    assert (status.state, status.reason, status.in_flight) == ("killed", "enough", 0)
    async with calm.idle():
        assert len(calm.effects("cancelled")) == 5, "the processes let go of them"
    calm.gate().touch()
    assert (await calm.client.command(run, "continue")).state == "running"
    entries, status = await calm.finish(run)
    assert (status.state, done(entries)) == ("completed", [str(n) for n in range(10)])
    assert len([e for e in calm.effects("start") if int(e.name) < 5]) == 5, "what was done is not done again"


async def test_delete_frees_rows_and_objects(calm: Engine) -> None:
    run = await calm.submit([calm.item({"size": 200_000}), calm.item({"pad": "z" * 9000})])
    await calm.finish(run)
    reply = await calm.client.delete(run)
    assert reply.items == 2 and reply.objects_freed >= 1, "a worker's own uploads stay pinned for a while"
    with pytest.raises(NotFoundError):
        await calm.client.get(run)
    held = await calm.submit([calm.item({"until": str(calm.gate("never")), "effects": calm.effects_file})])
    await calm.started(1)
    with pytest.raises(StateError, match="force"):
        await calm.client.delete(held)
    await calm.client.delete(held, force=True)
    async with calm.idle():
        assert len(calm.effects("cancelled")) == 1


async def test_priority_moves_a_run_that_is_under_way(calm: Engine) -> None:
    def items(name: str) -> list:
        body = {"sleep_ms": 25, "effects": calm.effects_file, "data": name}
        return [calm.item(body, require_labels=(("node", "3"),)) for _ in range(40)]

    first, second = await calm.submit(items("first")), await calm.submit(items("second"))
    assert (await calm.client.command(second, "priority", priority=6)).spec.priority in (0, 6)
    await calm.finish(second)
    assert [e.name for e in calm.effects("end")].count("first") < 30, "it overtook the other"
    await calm.client.command(first, "kill")
