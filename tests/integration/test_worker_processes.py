"""Real workers, real child processes, a real coordinator, real mTLS."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from blake3 import blake3
from rollout.client import Runs
from rollout.model.item import ItemSpec, Outcome
from worker_nodes import Nodes, leftovers, run_all, script, started, submit, until


@pytest.fixture
async def nodes(tmp_path: Path) -> AsyncIterator[Nodes]:
    nodes = Nodes(tmp_path)
    try:
        await nodes.coordinator().event("coordinator_ready")
        yield nodes
    finally:
        nodes.close()


@pytest.fixture
async def runs(nodes: Nodes) -> AsyncIterator[Runs]:
    async with await nodes.client() as runs:
        yield runs


async def test_items_of_every_kind(nodes: Nodes, runs: Runs) -> None:
    await nodes.worker(worker__slots=2).event("worker_ready")
    chain = ItemSpec(chain="c")
    payloads = [
        script({"data": "hello"}),
        script({"echo": True, "x": 1}),
        script({"fail_times": 1, "data": "second try"}, ItemSpec(retry_backoff_ms=10)),
        script({"fatal": True, "fail_code": "mine"}),
        script({"size": 100_000}),
        script({"chain_append": True, "data": "a"}, chain),
        script({"chain_append": True, "data": "b"}, chain),
        script({"spawn": [{"data": "x"}, {"sleep_ms": 30, "data": "y"}, {"data": "z"}]}),
        script({"skip": True}),
        script({"sleep_ms": 60_000}, ItemSpec(timeout_ms=200, max_attempts=1)),
        script(b"noop"),
        script({"put": 5000}),
    ]
    entries = await run_all(runs, payloads)
    data = [e.data for e in entries]
    assert data[0] == b"hello"
    assert data[1] == payloads[1].payload
    assert (data[2], entries[2].attempt) == (b"second try", 2)
    assert entries[3].failure is not None and entries[3].failure.code == "mine"
    assert len(data[4]) == 100_000
    assert data[5:7] == [b"a", b"ab"]
    assert json.loads(data[7]) == ["x", "y", "z"]
    assert entries[8].outcome is Outcome.SKIPPED
    assert entries[9].failure is not None and entries[9].failure.code == "timeout"
    assert data[10] == b""
    assert len(data[11]) == 64


async def test_a_child_that_holds_the_interpreter_delays_no_beat(nodes: Nodes, runs: Runs) -> None:
    worker = nodes.worker()
    entries = await run_all(runs, [script({"busy_ms": 7000, "data": "done"})])
    assert entries[0].data == b"done" and entries[0].attempt == 1
    assert not worker.events("worker_fenced")


async def test_a_killed_daemon_leaves_no_process(nodes: Nodes, runs: Runs) -> None:
    worker = nodes.worker(worker__slots=3)
    run_id = await submit(
        runs, [script({"busy_ms": 60_000}, salt=0), *[script({"sleep_ms": 60_000}, salt=i) for i in range(1, 3)]]
    )
    await started(runs, run_id, 3)
    family = worker.family()
    worker.kill()
    await until(lambda: not leftovers(family), "the children to be gone", 10)
    await runs.command(run_id, "kill")


async def test_an_executor_that_cannot_start_fails_few_rows(nodes: Nodes, runs: Runs) -> None:
    worker = nodes.worker()
    items = [script({"data": "x"}, ItemSpec(max_attempts=2, retry_backoff_ms=10), salt=i) for i in range(1000)]
    run_id = await submit(runs, items, config={"start_error": "no such model"})
    await worker.event("engine_start_failed", 2)
    status = await runs.get(run_id)
    assert status.failed <= 2
    await runs.command(run_id, "kill")
    entries = await run_all(runs, [script({"data": "fine"})])
    assert entries[0].data == b"fine"


async def test_many_short_items(nodes: Nodes, runs: Runs) -> None:
    for _ in range(2):
        nodes.worker()
    entries = await run_all(runs, [script(b"noop" + i.to_bytes(4, "big"), salt=i) for i in range(20_000)])
    assert [e.seq for e in entries] == list(range(20_000))
    # By the worker that was idle first, and what it took had not begun.
    stolen = sum(event["count"] for event in nodes.daemons[0].events("work_stolen"))
    assert sum(e.attempt - 1 for e in entries) <= stolen, "nothing else takes an item from its first worker"


async def test_a_process_sees_the_devices_its_item_asked_for_and_no_other(nodes: Nodes, runs: Runs) -> None:
    nodes.worker(worker__slots=3, worker__devices=["GPU-a", "GPU-b"])
    asks = {"environ": ["CUDA_VISIBLE_DEVICES"]}

    def visible(value: str) -> bytes:
        return json.dumps({"CUDA_VISIBLE_DEVICES": value and blake3(value.encode()).hexdigest()}).encode()

    def gpus(count: int) -> ItemSpec:
        return ItemSpec(resources=(("slots", 1.0), ("gpus", float(count))))

    entries = await run_all(runs, [script(asks), script(asks, gpus(2)), script(asks, gpus(1))])
    assert [entries[0].data, entries[1].data] == [visible(""), visible("GPU-a,GPU-b")]
    assert entries[2].data in (visible("GPU-a"), visible("GPU-b"))


async def test_output_without_end_fills_neither_the_log_nor_the_daemon(nodes: Nodes, runs: Runs) -> None:
    worker = nodes.worker()
    entries = await run_all(runs, [script({"print_mib": 512, "data": "done"}), script({"print": "and after it"})])
    assert entries[0].data == b"done"

    def told() -> int:
        lines = sum(len(event["text"]) + 1 for event in worker.events("child_output"))
        return lines + sum(event["bytes"] for event in worker.events("child_output_dropped"))

    await until(lambda: told() >= 512 << 20, "all of it to be told of", 10)
    assert worker.log.stat().st_size < 2 << 20
    assert not worker.events("worker_fenced")
