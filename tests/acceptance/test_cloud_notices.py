"""Machines of a spot market that go away while they work: drained in time, and the work goes on elsewhere."""

from __future__ import annotations

import asyncio
import json
import signal
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from acceptance_cli import Cli
from cluster import Cluster, Node, wait_until
from metadata_server import Ec2, serving

QUICK = {"heartbeat_interval_ms": 250, "worker_self_fence_timeout_ms": 2000, "coordinator_failure_timeout_ms": 2500}


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    with (
        tempfile.TemporaryDirectory(prefix="rn-", ignore_cleanup_errors=True) as root,
        Cluster(Path(root), transport=QUICK) as cluster,
    ):
        cluster.add_coordinator().wait_event("coordinator_ready")
        yield cluster


@pytest.fixture
async def ec2() -> AsyncIterator[Ec2]:
    async with serving(Ec2()) as served:
        assert isinstance(served, Ec2)
        yield served


def spot_worker(cluster: Cluster, ec2: Ec2) -> Node:
    """It takes work one after the other, and knows its machine by the metadata service."""
    node = cluster.add_worker(start=False, worker={"slots": 1}, cloud={"provider": "aws"})
    node.env = {"AWS_EC2_METADATA_SERVICE_ENDPOINT": ec2.address, "AWS_EC2_METADATA_DISABLED": "false"}
    node.start()
    node.wait_event("worker_ready")
    return node


@pytest.mark.slow
@pytest.mark.parametrize("left_s", [120.0, 4.0, None], ids=["in time", "late", "none"])
async def test_rows_of_a_machine_that_goes_away_are_done_elsewhere(
    cluster: Cluster, cli: Cli, ec2: Ec2, left_s: float | None
) -> None:
    leaver = await asyncio.to_thread(spot_worker, cluster, ec2)
    cli.rows(80)
    config = cli.config(backend={"delay_ms": 400, "concurrency": 4})
    process = cli.start("infer", "batch", "--config", str(config), *cluster.operator())
    await asyncio.to_thread(cli.wait_for_rows, 4, process)
    began = time.monotonic()
    if left_s is None:
        leaver.kill(signal.SIGKILL)
    else:
        ec2.interrupt(left_s)
        notice = await asyncio.to_thread(leaver.wait_event, "preemption_notice")
        assert notice["budget_s"] == left_s / 2
        await asyncio.to_thread(wait_until, lambda: not leaver.alive(), 60, "the worker to leave")
        assert leaver.process is not None and leaver.process.returncode == 0
        assert time.monotonic() - began < 5 + left_s, "it asks every 5 s"
    cluster.add_worker()
    out, err = await asyncio.to_thread(process.communicate, timeout=100)
    assert process.returncode == 0, (out, err)
    assert len(cli.completions()) == 80
    summary = json.loads((cli.directory / "out" / "summary.json").read_text())
    if left_s is not None:
        assert summary["attempts"]["worker_lost"] == 0


@pytest.mark.engine
@pytest.mark.slow
@pytest.mark.timeout(600)
async def test_a_segment_of_a_machine_that_goes_away_ends_in_the_same_bytes(
    cluster: Cluster, cli: Cli, ec2: Ec2, tmp_path: Path
) -> None:
    from rollout_worker.backends.tiny import make_tiny

    steps, model = 1500, tmp_path / "tiny"
    make_tiny(model)
    rows = [{"prompt": f"{n} and {n} is", "completion": f" {2 * n}"} for n in range(48)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    def configured(name: str) -> str:
        (cli.directory / f"{name}.toml").write_text(f"""
[algorithm]
kind = "sft"
[algorithm.sft]
base_model.uri = "{model}"
dataset.path = "{tmp_path / "rows.jsonl"}"
minibatch_size = 4
optimizer = {{ lr = 1e-3, schedule = "cosine" }}
budget.max_steps = {steps}
seed = 7
[snapshots]
every_steps = {steps}
[output]
dir = "{name}"
""")
        return f"{name}.toml"

    calm = await asyncio.to_thread(cli.run, "train", "sft", "--config", configured("calm"), timeout=300)
    assert calm.code == 0, calm
    leaver = await asyncio.to_thread(spot_worker, cluster, ec2)
    process = cli.start("train", "sft", "--config", configured("out"), *cluster.operator())
    operator = cluster.operator()
    deadline = time.monotonic() + 200
    while '"step"' not in (await asyncio.to_thread(cli.run, "run", "show", "out", "--json", *operator)).out:
        assert time.monotonic() < deadline and process.poll() is None
    ec2.interrupt(10)
    await asyncio.to_thread(leaver.wait_event, "preemption_notice")
    await asyncio.to_thread(wait_until, lambda: not leaver.alive(), 100, "the worker to leave")
    assert "handed_over" in leaver.log.read_text()
    heir = cluster.add_worker()
    out, err = await asyncio.to_thread(process.communicate, timeout=300)
    assert process.returncode == 0, (out, err)
    assert "hand_over_taken" in heir.log.read_text()
    ends = [json.loads((cli.directory / name / "summary.json").read_text()) for name in ("calm", "out")]
    same = ("state", "steps", "tokens", "final_snapshot", "weights_hash")
    assert [ends[0][key] for key in same] == [ends[1][key] for key in same]
