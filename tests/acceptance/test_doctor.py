"""`rollout doctor` on a laptop, on the nodes of a cluster, and when something is wrong."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from acceptance_cli import Cli, Finished
from cluster import Cluster, write_toml
from postgres import PostgresServer


@pytest.fixture(autouse=True)
def quick(cli: Cli) -> None:
    """Importing torch takes seconds, and is tried in the test of engines alone."""
    broken = cli.directory / "engines"
    for package in ("torch", "transformers", "accelerate", "llguidance"):
        write(broken / package / "__init__.py", "__version__ = '1.0'")
    write(broken / "torch" / "__init__.py", "raise OSError('libcudart.so.12: cannot open shared object file')")
    cli.env["PYTHONPATH"] = str(broken)


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    soon = {"heartbeat_interval_ms": 200, "worker_self_fence_timeout_ms": 800, "coordinator_failure_timeout_ms": 1000}
    with Cluster(tmp_path / "nodes", transport=soon) as found:
        found.add_coordinator().wait_event("coordinator_ready")
        yield found


def checks(done: Finished, level: str | None = None) -> dict[str, dict[str, Any]]:
    found = {check["name"]: check for check in json.loads(done.out)["checks"]}
    return {name: check for name, check in found.items() if level in (None, check["level"])}


def test_on_a_machine_without_a_cluster(cli: Cli) -> None:
    done = cli.run("doctor", "--json")
    found = checks(done)
    assert {"version", "python", "packages", "open files", "gpu", "certificates", "cluster"} <= set(found)
    assert list(checks(done, "fault")) == ["engine (transformers)"] and done.code == 1
    broken = found["engine (transformers)"]
    assert "torch cannot be imported: OSError: libcudart.so.12" in broken["text"] and "pip install" in broken["remedy"]
    assert "none was joined" in found["cluster"]["text"]


def test_of_a_cluster_by_an_operator_and_of_each_node(cli: Cli, cluster: Cluster) -> None:
    worker = cluster.add_worker()
    worker.wait_event("worker_ready")
    at = cluster.operator()
    found = checks(cli.run("doctor", *at, "--json"))
    assert found[f"coordinator {cluster.addresses[0]}"]["text"].startswith("leader on ")
    assert found["database there"]["text"].startswith("SQLite, ")
    assert found["workers"]["text"] == "1 ready"
    for name in ("version there", "clock there", "objects port", "join port", "host certificate ends"):
        assert found[name]["level"] == "ok", found[name]
    for node in (cluster.coordinators[0], worker):
        cli.directory, back = node.directory, cli.directory
        found = checks(cli.run("doctor", "--config", str(next(node.directory.glob("*.toml"))), "--json"))
        cli.directory = back
        assert found[f"coordinator {cluster.addresses[0]}"]["level"] == "ok", found


def test_what_is_wrong_is_said_with_a_remedy(cli: Cli, cluster: Cluster, tmp_path: Path) -> None:
    worker = cluster.add_worker()
    worker.wait_event("worker_ready")
    at = cluster.operator()
    worker.kill()
    cluster.coordinators[0].wait_event("worker_failed")
    warned = checks(cli.run("doctor", *at, "--json"), "warning")
    assert [name.split()[0] for name in warned if "worker" in name] == ["worker", "workers"], warned
    cluster.coordinators[0].kill()
    began = time.monotonic()
    done = cli.run("doctor", *at)
    assert done.code == 1 and "Connection refused" in done.out and "-> check the address" in done.out, done
    assert time.monotonic() - began < 45
    file = write_toml(tmp_path / "coordinator.toml", {"storage": {"backend": "embeded"}, "transport": {}})
    done = cli.run("doctor", "--config", str(file))
    assert done.code == 1 and 'did you mean "embedded"' in done.out, done


@pytest.mark.slow
def test_of_a_leader_its_standby_and_their_postgres(cli: Cli, tmp_path: Path, postgres_server: PostgresServer) -> None:
    with Cluster(tmp_path / "nodes", postgres_url=postgres_server.url) as cluster:
        cluster.add_coordinator().wait_event("coordinator_ready")
        standby = cluster.add_coordinator(others=cluster.addresses[:1])
        standby.wait_event("coordinator_standby")
        leading, waiting = (f"coordinator {address}" for address in cluster.addresses)
        at = cluster.operator()
        found = checks(cli.run("doctor", *at, "--json"))
        assert found[leading]["text"].startswith("leader on ") and found[waiting]["text"].startswith("standby on ")
        for address in cluster.addresses:
            assert found[f"database at {address}"]["text"].startswith("PostgreSQL, ")
        postgres_server.stop(signal.SIGINT)
        standby.wait_event("database_failing")
        done = cli.run("doctor", *at, "--json")
        wrong = checks(done, "fault")
        assert done.code == 1 and {leading, waiting} <= set(wrong), done
        assert all("PostgreSQL cannot be reached" in wrong[name]["text"] for name in (leading, waiting)), wrong
        postgres_server.start()
