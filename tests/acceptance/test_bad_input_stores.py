"""Stores that fail under a running cluster of daemons: a full disk at either end, and a database that goes away."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from acceptance_cli import Cli, until
from cluster import Cluster, Node
from postgres import PostgresServer

ROWS = 800


def fill(directory: Path) -> Path:
    """A file that takes all that is left."""
    ballast = directory / "ballast"
    with ballast.open("wb", buffering=0) as file:
        for size in (1 << 16, 1 << 12, 1):
            try:
                while True:
                    file.write(b"x" * size)
            except OSError:
                continue
    return ballast


def every_row_once(cli: Cli, rows: int = ROWS, output: str = "out") -> None:
    assert [row["n"] for row in cli.completions(output)] == list(range(rows))


def test_a_full_disk_under_the_coordinator(cli: Cli, tmp_path: Path, small_disk: Callable[[Path, int], None]) -> None:
    with Cluster(tmp_path / "nodes") as cluster:
        node = cluster.add_coordinator(start=False)
        data = node.directory / "data"
        small_disk(data, 24 << 10)
        node.start().wait_event("coordinator_ready")
        at = cluster.operator()
        cluster.add_worker().wait_event("worker_ready")
        cli.rows(ROWS)
        config = str(cli.config(backend={"delay_ms": 200, "concurrency": 32}))
        process = cli.start("infer", "batch", "--config", config, *at)
        cli.wait_for_rows(100, process)
        ballast = fill(data)
        full = node.wait_event("storage_full")
        assert node.process is not None and node.process.wait(timeout=60) == 1
        assert full["level"] == "error" and "free some space" in full["error"]
        assert not any("Traceback" in line for line in node.log.read_text().splitlines())
        kept = len(cli.completions())
        assert 100 <= kept < ROWS
        ballast.unlink()
        node.start().wait_event("coordinator_ready", count=2)
        out, err = process.communicate(timeout=60)
        if process.returncode != 0:  # it gave up before the coordinator was back: the same command goes on
            assert "Traceback" not in err
            done = cli.run("infer", "batch", "--config", config, *at)
            assert done.code == 0, (done, out, err)
        every_row_once(cli)


def test_a_full_disk_under_the_collector(cli: Cli, tmp_path: Path, small_disk: Callable[[Path, int], None]) -> None:
    with Cluster(tmp_path / "nodes") as cluster:
        cluster.add_coordinator().wait_event("coordinator_ready")
        at = cluster.operator()
        cluster.add_worker().wait_event("worker_ready")
        small_disk(cli.directory / "out", 8 << 10)
        cli.rows(ROWS)
        config = str(cli.config(backend={"delay_ms": 100, "concurrency": 32}))
        process = cli.start("infer", "batch", "--config", config, *at)
        cli.wait_for_rows(100, process)
        ballast = fill(cli.directory / "out")
        out, err = process.communicate(timeout=60)
        assert process.returncode == 1, (out, err)
        assert "Traceback" not in err and "fault of the program" not in err, err
        assert "no space left while writing out/completions.jsonl" in err, err
        assert "free some space and run the same command again" in err
        ballast.unlink()
        done = cli.run("infer", "batch", "--config", config, *at)
        assert done.code == 0, done
        every_row_once(cli)


@pytest.mark.slow
def test_a_database_that_stops_and_crashes_and_returns(
    cli: Cli, tmp_path: Path, postgres_server: PostgresServer
) -> None:
    with Cluster(tmp_path / "nodes", postgres_url=postgres_server.url) as cluster:
        node = cluster.add_coordinator()
        node.wait_event("coordinator_ready")
        at = cluster.operator()
        for _ in range(2):
            cluster.add_worker()
        for worker in cluster.workers:
            worker.wait_event("worker_ready")
        cli.rows(ROWS)
        config = str(cli.config(backend={"delay_ms": 300, "concurrency": 32}))
        process = cli.start("infer", "batch", "--config", config, *at)
        for number, how in enumerate((signal.SIGINT, signal.SIGKILL), 1):
            cli.wait_for_rows(number * 150, process)
            seen = away(node)
            postgres_server.stop(how)
            until(lambda seen=seen: len(away(node)) > len(seen), "the outage to be told")
            start_again(postgres_server)
        out, err = process.communicate(timeout=90)
        assert process.returncode == 0, (out, err)
        every_row_once(cli)
        assert node.alive() and all(worker.alive() for worker in cluster.workers)
        assert any("[storage.postgres] url" in e.get("error", "") for e in away(node)), away(node)


def away(node: Node) -> list[dict[str, Any]]:
    """What the coordinator said about its database being away."""
    told = ("storage_unavailable", "ledger_unreachable", "lease_lost", "storage_unreachable")
    return [event for event in node.events() if event["event"] in told]


def start_again(server: PostgresServer) -> None:
    """After a kill -9 the old backends may hold the shared memory for a moment."""

    def up() -> bool:
        try:
            server.start()
        except RuntimeError:
            server.process = None
            return False
        return True

    until(up, "PostgreSQL to start again")
