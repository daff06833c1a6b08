"""Real workers, real child processes, a real coordinator, real mTLS."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import prefork
import pytest
from blake3 import blake3
from rollout.client import Runs
from rollout.model.item import ItemSpec, Outcome
from rollout.wire.v1 import runs_pb2
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
    await until(lambda: not leftovers(family), "the children to be gone")
    await runs.command(run_id, "kill")


def shown(nodes: Nodes, *command: str) -> dict[str, Any]:
    """What a command prints for programs."""
    where = ["--coordinator", nodes.address, "--tls-dir", str(nodes.tls_dir), "--json"]
    rollout = str(Path(sys.executable).with_name("rollout"))
    return json.loads(prefork.run([rollout, *command, *where], text=True, timeout=60).stdout)


async def ended(runs: Runs, run_id: str) -> runs_pb2.RunStatus:
    until_s = asyncio.get_running_loop().time() + 60
    while (status := await runs.get(run_id)).state == "running":
        assert asyncio.get_running_loop().time() < until_s, status
        await asyncio.sleep(0.05)
    return status


async def test_an_executor_that_starts_nowhere_ends_its_run_and_harms_no_row(nodes: Nodes, runs: Runs) -> None:
    worker = nodes.worker()
    items = [script({"data": "x"}, ItemSpec(max_attempts=1), salt=i) for i in range(1000)]
    run_id = await submit(runs, items, config={"start_needs": "model"})
    status = await ended(runs, run_id)
    assert status.state == "failed"
    assert status.reason.endswith("cannot start on the only worker that could host it: there is no model in worker-0")
    assert (status.done, status.failed, status.retried, [c.everywhere for c in status.causes]) == (0, 0, 0, [True])

    (worker.log.parent / "model").touch()
    await runs.command(run_id, "continue")
    status = await ended(runs, run_id)
    assert (status.state, status.done, status.failed) == ("completed", 1000, 0)


async def test_a_worker_that_cannot_start_an_executor_is_shown_while_another_does_its_work(
    nodes: Nodes, runs: Runs
) -> None:
    for _ in range(2):
        await nodes.worker().event("worker_ready")
    (nodes.workers[1].log.parent / "model").touch()
    items = [script({"sleep_ms": 400, "data": "x"}, ItemSpec(max_attempts=1), salt=i) for i in range(30)]
    run_id = await submit(runs, items, config={"start_needs": "model"})
    await nodes.workers[0].event("engine_start_failed")
    (cause,) = (await asyncio.to_thread(shown, nodes, "run", "show", run_id))["causes"]
    assert (cause["executor"], cause["message"], cause["everywhere"]) == (
        "script", "there is no model in worker-0", False,
    )  # fmt: skip
    workers = (await asyncio.to_thread(shown, nodes, "workers"))["workers"]
    assert [w["worker_id"] for w in workers if w["causes"]] == cause["workers"]
    status = await ended(runs, run_id)
    assert (status.state, status.done, status.failed) == ("completed", 30, 0)


async def test_a_process_that_dies_at_its_start_says_why_in_its_own_words(nodes: Nodes, runs: Runs) -> None:
    nodes.worker()
    run_id = await submit(runs, [script({"data": "x"})], config={"start_print": "the disk is gone", "start_crash": 1})
    async with asyncio.timeout(60):
        while not (causes := (await runs.get(run_id)).causes):  # noqa: ASYNC110 - the ledger of another process
            await asyncio.sleep(0.05)
    assert "the process ended while it started: signal SIGKILL" in causes[0].message
    assert "it said: the disk is gone" in causes[0].message
    await runs.command(run_id, "kill")


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

    await until(lambda: told() >= 512 << 20, "all of it to be told of")
    assert worker.log.stat().st_size < 2 << 20
    assert not worker.events("worker_fenced")
