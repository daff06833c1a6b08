"""Looking into runs of a real cluster: rows by what became of them, children, large inputs, pages."""

from __future__ import annotations

from typing import Any

import pytest
from engine_cluster import Engine
from rollout.model.errors import InputError, NotFoundError
from rollout.wire.v1 import runs_pb2 as pb


async def rows(engine: Engine, run_id: str, which: str = "all", **more: Any) -> list[pb.ItemStatus]:
    return [item async for page in engine.client.items(run_id, which, **more) for item in page.items]


async def test_children_are_found_below_their_parents(calm: Engine) -> None:
    family = {"spawn": ["{}", {"fatal": True, "fail_code": "sad"}, {"spawn": [{"data": "x" * 5000}]}]}
    run_id = await calm.submit([calm.item(b"noop"), calm.item(family)])
    await calm.finish(run_id)
    children = await rows(calm, run_id, parent=[1])
    assert [(one.seq, one.state, one.code) for one in children] == [
        (0, "done", ""),
        (1, "failed", "sad"),
        (2, "done", ""),
    ]
    assert [one.seq for one in await rows(calm, run_id, "failed", parent=[1])] == [1]
    reply = await calm.client.item(run_id, [1])
    assert (reply.children, reply.children_final, reply.item.state) == (3, 3, "done")
    below = await calm.client.item(run_id, [1, 2, 0])
    payload, result = await calm.client.item_bytes(run_id, below)
    assert len(payload) > 5000 and result == b"x" * 5000, "objects"
    with pytest.raises(NotFoundError, match=r"row 1 has no children"):
        await rows(calm, run_id, parent=[0])
    with pytest.raises(InputError, match="There are no 'bad' items"):
        await rows(calm, run_id, "bad")


async def test_rows_that_run_that_wait_and_that_were_tried_twice(calm: Engine) -> None:
    gate = {"until": str(calm.gate()), "effects": calm.effects_file}
    run_id = await calm.submit([calm.item({"fail_times": 1}), *(calm.item(gate) for _ in range(200))])
    await calm.status(run_id, lambda status: status.retried == 1 and status.running >= 4, "four to run")
    running = await rows(calm, run_id, "running")
    assert running and all(one.state == "running" and one.attempts == 1 and one.at_ms for one in running)
    pending = await rows(calm, run_id, "pending", limit=3)
    assert len(pending) == 3 and {one.state for one in pending} == {"pending"}
    detail = await calm.client.worker(running[0].worker)
    assert run_id in [run.run_id for run in detail.runs]
    assert (running[0].seq,) in [tuple(one.place) for one in detail.held if one.run_id == run_id]
    described = await calm.client.describe(run_id, failures=5)
    assert {one.incarnation for one in described.workers} >= {one.worker for one in running}
    assert [(one.seq, one.code, one.final) for one in described.failures] == [(0, "scripted", False)]
    calm.gate().touch()
    _, status = await calm.finish(run_id)
    (again,) = await rows(calm, run_id, "retried")
    assert (again.seq, again.state, again.attempts) == (0, "done", 2)
    assert (status.attempts, status.retried) == (202, 1)
    assert [one.ending for one in (await calm.client.item(run_id, [0])).attempts] == ["failed", "done"]


async def test_pages_of_a_long_run(calm: Engine) -> None:
    run_id = await calm.submit([calm.item(b"noop") for _ in range(1300)])
    await calm.finish(run_id)
    pages = [len(page.items) async for page in calm.client.items(run_id)]
    assert pages == [500, 500, 300]
    assert [one.seq for one in await rows(calm, run_id, from_seq=1290, limit=5)] == list(range(1290, 1295))
    assert await rows(calm, run_id, "pending") == await rows(calm, run_id, "running") == []
