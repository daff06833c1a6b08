"""The commands against a cluster of real daemons with directories of their own, joined by token."""

from __future__ import annotations

import json
import re
import shlex
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import prefork
import psutil
import pytest
from acceptance_cli import Cli, until
from cluster import Cluster, binary


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    with Cluster(tmp_path / "nodes") as found:
        found.add_coordinator().wait_event("coordinator_ready")
        yield found


@pytest.fixture
def at(cluster: Cluster) -> list[str]:
    return cluster.operator()


def ask(cli: Cli, *args: str) -> dict[str, Any]:
    done = cli.run(*args, "--json")
    assert done.code == 0, done
    return json.loads(done.out)


def test_a_batch_is_submitted_commanded_and_collected(cli: Cli, cluster: Cluster, at: list[str]) -> None:
    cli.rows(160)
    config = str(cli.config(backend={"delay_ms": 800, "concurrency": 8}))
    for _ in range(2):
        cluster.add_worker()
    for worker in cluster.workers:
        worker.wait_event("worker_ready")
    command = [binary("rollout-coordinator"), "host", "list"]
    hosts = prefork.run(command, cwd=cluster.coordinators[0].directory, text=True).stdout
    for worker in ask(cli, "workers", *at)["workers"]:
        assert re.search(rf" worker .*  workers: .*{worker['worker_id'][-8:]} ready", hosts), hosts

    done = cli.run("infer", "batch", "--config", config, *at, "--detach")
    assert done.code == 0 and "this collects the results" in done.out, done
    (run,) = ask(cli, "run", "list", *at)["runs"]
    run_id = run["run_id"]
    assert (run["workload"], run["submitted"], run["sealed"]) == ("infer", 160, True)

    paused = ask(cli, "run", "pause", run_id, *at)
    assert paused["state"] in ("paused", "running")
    until(lambda: ask(cli, "run", "show", run_id, *at)["state"] == "paused", "the pause")
    assert run_id in cli.run("run", "list", *at, "--state", "paused").out
    assert ask(cli, "run", "resume", run_id, *at)["state"] == "running"

    workers = ask(cli, "workers", *at)
    assert {worker["state"] for worker in workers["workers"]} == {"ready"} and len(workers["workers"]) == 2
    assert workers["leader"] == cluster.addresses[0]

    collected = cli.run("infer", "batch", "--config", config, *at)
    assert collected.code == 0, collected
    assert [row["n"] for row in cli.completions()] == list(range(160))
    watched = cli.run("run", "watch", run_id, *at)
    assert watched.code == 0 and "completed: 160 done" in watched.out
    assert cli.run("run", "pause", run_id, *at).code == 2

    ask(cli, "workers", "drain", workers["workers"][0]["worker_id"], *at)
    until(lambda: len(ask(cli, "workers", *at)["workers"]) == 1, "the worker to leave")
    assert ask(cli, "run", "delete", run_id, *at)["items"] == 160
    assert cli.run("run", "show", run_id, *at).code == 2


def test_interrupted_the_run_goes_on(cli: Cli, cluster: Cluster, at: list[str]) -> None:
    cli.rows(200)
    config = str(cli.config(backend={"delay_ms": 200, "concurrency": 8}))
    cluster.add_worker().wait_event("worker_ready")
    process = cli.start("infer", "batch", "--config", config, *at)
    cli.wait_for_rows(10, process)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130, (out, err)
    run_id = (cli.directory / "out" / "run-id").read_text().strip()
    seen = run_id[-8:]
    assert f": rollout run pause {seen}" in out
    until(lambda: ask(cli, "run", "show", run_id, *at)["state"] == "completed", "the run to end without us")
    (cli.directory / "out" / "run-id").unlink()
    assert cli.run("infer", "batch", "--config", config, *at, "--resume", seen[:6].lower()).code == 0
    assert [row["n"] for row in cli.completions()] == list(range(200))


def test_a_worker_that_goes_on_with_a_run_has_its_new_settings(cli: Cli, cluster: Cluster, at: list[str]) -> None:
    cli.rows(200)
    worker = cluster.add_worker()
    worker.wait_event("worker_ready")
    config = str(cli.config(backend={"delay_ms": 2000, "concurrency": 2}))
    assert cli.run("infer", "batch", "--config", config, *at, "--detach").code == 0
    worker.wait_event("engine_ready")
    cli.config(backend={"concurrency": 50})
    done = cli.run("infer", "batch", "--config", config, *at)
    assert done.code == 0 and "backend.delay_ms: 2000.0 -> 0.0" in done.out, done
    assert [row["n"] for row in cli.completions()] == list(range(200))


@pytest.mark.slow
def test_a_killed_run_fails_the_command_and_goes_on_only_when_that_is_asked_for(
    cli: Cli, cluster: Cluster, at: list[str]
) -> None:
    cli.rows(100)
    config = str(cli.config(backend={"delay_ms": 300, "concurrency": 4}))
    cluster.add_worker().wait_event("worker_ready")
    process = cli.start("infer", "batch", "--config", config, *at)
    cli.wait_for_rows(5, process)
    run_id = (cli.directory / "out" / "run-id").read_text().strip()
    assert ask(cli, "run", "kill", run_id, *at, "--reason", "enough")["state"] == "killed"
    out, err = process.communicate(timeout=60)
    assert process.returncode == 1 and "killed" in out, (out, err)
    again = cli.run("infer", "batch", "--config", config, *at)
    assert again.code == 2 and "was killed by the operator on host " in again.err and ": enough. Go on" in again.err
    assert f"rollout infer batch --config {config} {shlex.join(at)} --resume {run_id[-8:]}" in again.err, again.err
    assert ask(cli, "run", "show", run_id, *at)["state"] == "killed", "nothing was started"
    pause = cli.run("run", "pause", run_id, *at)
    assert pause.code == 2 and "`resume` goes on with it" in pause.err and "new run" not in pause.err
    done = cli.run("infer", "batch", "--config", config, *at, "--resume", run_id)
    assert done.code == 0 and "was killed (enough): it goes on" in done.out
    assert [row["n"] for row in cli.completions()] == list(range(100))


def test_joined_addresses_are_found(cli: Cli, cluster: Cluster) -> None:
    token = cluster.token("operator")
    done = cli.run("join", "--coordinator", cluster.join_address, "--token", token)
    assert done.code == 0 and 'joined cluster "rollout" as operator; ' in done.out
    assert cli.run("run", "list").code == 0
    cli.env["ROLLOUT_COORDINATOR"] = cluster.addresses[0]
    assert cli.run("workers").code == 0
    del cli.env["ROLLOUT_COORDINATOR"]
    cli.env |= {"HOME": str(cli.directory), "ROLLOUT_TLS_DIR": "~/data/tls"}
    assert cli.run("workers").code == 0
    wrong = cli.run(
        "join", "--coordinator", cluster.join_address, "--token", cluster.token("worker"), "--tls-dir", "t2"
    )
    assert wrong.code == 2 and "this token enrols a host as worker" in wrong.err
    used = cli.run("join", "--coordinator", cluster.join_address, "--token", token, "--tls-dir", "t3")
    assert used.code == 2 and "token" in used.err
    missing = cli.run("run", "show", "01ARZ3NDEKTSV4RRFFQ69G5FAV")
    assert missing.code == 2 and "01ARZ3NDEKTSV4RRFFQ69G5FAV" in missing.err


def test_a_run_of_another_cluster_is_not_started_again(cli: Cli, cluster: Cluster, at: list[str]) -> None:
    cli.rows(20)
    cluster.add_worker().wait_event("worker_ready")
    config = str(cli.config())
    assert cli.run("infer", "batch", "--config", config).code == 0
    (cli.directory / "out" / "summary.json").unlink()  # as if it had been cut off before its end
    done = cli.run("infer", "batch", "--config", config, *at)
    assert done.code == 2 and "was started on this machine" in done.err and "--local" in done.err


def test_a_worker_that_joined_needs_no_configuration(cli: Cli, tmp_path: Path) -> None:
    """It learns from the join which coordinators there are and what their cluster is called."""
    with Cluster(tmp_path / "nodes", transport={"cluster": "prod"}) as cluster:
        cluster.add_coordinator().wait_event("coordinator_ready")
        worker = cli.start("run", program=binary("rollout-worker"))
        assert "rollout-worker join --coordinator" in worker.communicate(timeout=60)[0] and worker.returncode == 2
        (cli.directory / "worker.toml").write_text("[worker]\nslots = 2\n")
        plan = cli.run("plan", "--config", "worker.toml")
        assert plan.code == 2 and "./data/tls has not joined a cluster" in plan.err
        join = ("join", "--coordinator", cluster.join_address, "--token", cluster.token("worker"))
        assert cli.start(*join, program=binary("rollout-worker")).wait(60) == 0
        plan = cli.run("plan", "--config", "worker.toml")
        assert plan.code == 0 and f"works for {cluster.addresses[0]}" in plan.out
        worker = cli.start("run", program=binary("rollout-worker"))
        at = cluster.operator()
        until(lambda: [w["state"] for w in ask(cli, "workers", *at)["workers"]] == ["ready"], "the worker")
        worker.send_signal(signal.SIGTERM)
        assert worker.wait(60) == 0
        (cli.directory / "data/tls/join.json").write_text("{")
        worker = cli.start("run", program=binary("rollout-worker"))
        assert "join.json is damaged" in worker.communicate(timeout=60)[1] and worker.returncode == 2


def test_a_coordinator_told_twice_to_stop_ends_at_once(cluster: Cluster) -> None:
    """The first signal waits for the objects server; with that one stopped, for seconds."""
    (coordinator,) = cluster.coordinators
    assert coordinator.process is not None
    (server,) = psutil.Process(coordinator.process.pid).children()
    server.suspend()
    try:
        coordinator.process.send_signal(signal.SIGINT)
        coordinator.wait_event("coordinator_stopping")
        coordinator.process.send_signal(signal.SIGINT)
        assert coordinator.process.wait(timeout=60) == 130
        assert all(event["event"] != "coordinator_stopped" for event in coordinator.events()), "it did not wait"
    finally:
        server.resume()
    server.wait(timeout=60)  # it sees that its coordinator has gone
    coordinator.start().wait_event("coordinator_ready", count=2)
