"""A disk that fails under the database: the cause is told at once, to everybody who waits; nothing is lost."""

from __future__ import annotations

import json
import resource
import sys
import urllib.error
import urllib.request
from pathlib import Path

import psutil
import pytest
from acceptance_cli import Cli, until
from cluster import Cluster

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="prlimit makes the writes of another process fail")

LARGEST = 150_000
"""Bytes: the ledger's log soon grows beyond it, the daemon's own does not."""


def no_large_files(pid: int) -> None:
    """From now on its writes far into a file fail, as on a disk that is full there, with `File too large`."""
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (LARGEST, resource.RLIM_INFINITY))


def coordinator_of(pid: int) -> int:
    return next(c.pid for c in psutil.Process(pid).children() if "rollout_coordinator" in c.cmdline())


@pytest.mark.slow
def test_an_embedded_run_ends_with_the_cause(cli: Cli) -> None:
    cli.rows(200)
    config = str(cli.config(backend={"delay_ms": 100, "concurrency": 4}))
    process = cli.start("infer", "batch", "--config", config)
    cli.wait_for_rows(20, process)
    no_large_files(coordinator_of(process.pid))
    _, err = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "rollout.db: File too large (SQLITE_IOERR" in err and "raise the limit" in err, err
    assert "nothing acknowledged is lost" in err and "Traceback" not in err
    done = cli.run("infer", "batch", "--config", str(cli.config(backend={"delay_ms": 1, "concurrency": 64})))
    assert done.code == 0 and [row["n"] for row in cli.completions()] == list(range(200)), done


def test_a_coordinator_tells_everybody_and_goes_on(cli: Cli, tmp_path: Path) -> None:
    with Cluster(tmp_path / "nodes") as cluster:
        node = cluster.add_coordinator()
        http = node.wait_event("coordinator_ready")["http_addr"]
        at = cluster.operator()
        cluster.add_worker().wait_event("worker_ready")
        assert node.process is not None
        no_large_files(node.process.pid)
        cli.rows(600)
        config = str(cli.config(backend={"delay_ms": 1}))
        process = cli.start("infer", "batch", "--config", config, *at)
        told = node.wait_event("database_failing")
        assert told["level"] == "error" and "File too large" in told["error"] and "raise the limit" in told["error"]

        def readiness() -> str:
            try:
                with urllib.request.urlopen(f"http://{http}/readyz", timeout=60) as answer:
                    return f"{answer.status} {answer.read().decode()}"
            except urllib.error.HTTPError as error:
                return f"{error.code} {error.read().decode()}"

        until(lambda: readiness().startswith("503") and "File too large" in readiness(), "readiness to say why")
        examined = cli.run("doctor", *at, "--json")
        assert examined.code == 1 and any("File too large" in c["text"] for c in json.loads(examined.out)["checks"])
        assert len(list(node.events("database_failing"))) == 1
        resource.prlimit(node.process.pid, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        _, err = process.communicate(timeout=60)
        if process.returncode != 0:  # it had waited for long enough: it names the cause, and goes on
            assert "File too large" in err, err
            assert cli.run("infer", "batch", "--config", config, *at).code == 0
        assert [row["n"] for row in cli.completions()] == list(range(600))
        until(lambda: readiness() == "200 leader\n", "readiness")
