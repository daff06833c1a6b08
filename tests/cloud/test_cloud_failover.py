"""The production set-up: Postgres, a bucket, two coordinators that share no directory. One is lost with its disk."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import prefork
import pytest
from cluster import Cluster, binary, wait_until, write_toml
from moto_locked import REGION, AwsEmulator

ROWS = 80


@pytest.mark.slow
def test_a_leader_is_lost_with_its_disk(tmp_path: Path, postgres_url: str, aws: AwsEmulator) -> None:
    """Rows and results are objects; the run is completed by the standby, from the database and the bucket alone."""
    bucket = aws.bucket()
    sections: dict[str, Any] = {
        "cloud": {"provider": "aws", "region": REGION, "endpoint_url": aws.endpoint},
        "cloud.s3": {"bucket": bucket, "prefix": "prod/"},
    }
    timings = {"coordinator_failure_timeout_ms": 2000, "worker_self_fence_timeout_ms": 1500}
    with Cluster(tmp_path / "nodes", postgres_url=postgres_url, transport=timings) as cluster:
        leader = cluster.add_coordinator(**sections)
        leader.wait_event("coordinator_ready")
        standby = cluster.add_coordinator(others=list(cluster.addresses), **sections)
        standby.wait_event("coordinator_standby")
        worker = cluster.add_worker()
        worker.wait_event("worker_ready")

        running, out = submitted(tmp_path, cluster.operator())
        wait_until(lambda: lines(out) >= ROWS // 4, 60, "some results")
        leader.kill()
        shutil.rmtree(leader.directory)
        assert standby.wait_event("coordinator_ready")["epoch"] == 1
        said, _ = running.communicate(timeout=90)
        assert running.returncode == 0, said

        found = [json.loads(line) for line in (out / "completions.jsonl").read_text().splitlines()]
        assert [row["n"] for row in found] == list(range(ROWS))
        assert all(len(row["prompt"]) > 6000 for row in found)
        summary = json.loads((out / "summary.json").read_text())
        assert (summary["state"], summary["rows"]["completed"]) == ("completed", ROWS)
        kept = set(aws.keys(bucket)) - {"prod/ledger.json"}
        assert kept and all(key.startswith("prod/cas/") for key in kept), kept
        assert aws.unfinished(bucket) == []
        for node in (standby, worker):
            assert not [path for path in node.directory.rglob("*") if path.name in ("object-store", "rollout.db")]


def submitted(directory: Path, operator: list[str]) -> tuple[subprocess.Popen[str], Path]:
    """A batch whose rows are too large for the ledger, and its output directory."""
    rows = [{"prompt": f"row {n} " + "x" * 6000, "n": n} for n in range(ROWS)]
    (directory / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    out = directory / "out"
    config = write_toml(
        directory / "batch.toml",
        {
            "model": {"uri": "mock"},
            "backend": {"kind": "mock", "delay_ms": 500, "concurrency": 10},
            "input": {"glob": str(directory / "in.jsonl")},
            "output": {"dir": str(out)},
        },
    )
    command = [binary("rollout"), "infer", "batch", "--config", str(config), *operator]
    process = prefork.Popen(
        command, cwd=directory, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=dict(os.environ)
    )
    return process, out


def lines(out: Path) -> int:
    path = out / "completions.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


pytestmark = pytest.mark.timeout(180)
