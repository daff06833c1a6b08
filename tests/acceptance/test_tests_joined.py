"""`rollout test` in a cluster of several workers: the project travels, and a lost worker costs no test."""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from acceptance_cli import Cli, until
from cluster import Cluster
from test_offload.suites import write

SUITE = """
import os, pathlib, pytest, time
def test_place(): print(os.getcwd()); assert pathlib.Path("made").read_text() == "ready\\n"
def test_writes(): pathlib.Path("written").write_text("x")
def test_wrong(): assert 0
def test_ends(): os._exit(3)
"""
SLOW = """
import time, pytest
@pytest.mark.parametrize("number", range(12))
def test_slow(number): time.sleep(0.7); print(number)
"""


@pytest.fixture
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with Cluster(tmp_path_factory.mktemp("nodes")) as found:
        found.add_coordinator().wait_event("coordinator_ready")
        for _ in range(2):
            found.add_worker()
        for worker in found.workers:
            worker.wait_event("worker_ready")
        yield found


def lines(root: Path) -> list[dict[str, Any]]:
    path = root / "test-results/results.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


@pytest.mark.parametrize("provider", ["local", pytest.param("process", marks=pytest.mark.slow)])
def test_the_project_travels_and_the_last_retry_is_elsewhere(cli: Cli, cluster: Cluster, provider: str) -> None:
    file = (
        f'[offload]\nsandbox_init_cmd = "echo ready > made"\n[provider]\ntype = "{provider}"\n'
        f'[framework]\ntype = "pytest"\npython = "{sys.executable}"\n[groups.all]\nretry_count = 1\n'
        '[report]\ndownload_globs = ["writ*"]\n'
    )
    root = write(cli.directory, {"test_a.py": SUITE, "offload.toml": file})
    done = cli.run("test", "run", *cluster.operator())
    assert done.code == 1, done
    found = {str(line["id"]).partition("::")[2]: line for line in lines(root)}
    assert {one: line["outcome"] for one, line in found.items()} == {
        "test_place": "passed", "test_writes": "passed", "test_wrong": "failed", "test_ends": "crashed",
    }  # fmt: skip
    for one in ("test_wrong", "test_ends"):
        tries = found[one]["attempts"]
        assert len({made["worker"] for made in tries}) == len({made["process"] for made in tries}) == 2
    assert str(root) not in found["test_place"]["attempts"][0]["stdout"]
    assert (root / "test-results/downloads/written").read_text() == "x"
    assert not (root / "written").exists() and not (root / "made").exists()


@pytest.mark.slow
def test_a_worker_that_is_killed_costs_no_test(cli: Cli, cluster: Cluster) -> None:
    file = f'[framework]\ntype = "pytest"\npython = "{sys.executable}"\n[groups.all]\nschedule_individual = true\n'
    root = write(cli.directory, {"test_a.py": SLOW, "offload.toml": file})
    running = cli.start("test", "run", *cluster.operator())
    until(lambda: len(lines(root)) > 2, "the first results")
    cluster.workers[0].kill(signal.SIGKILL)
    out, err = running.communicate(timeout=90)
    assert running.returncode == 0, out + err
    found = lines(root)
    assert sorted(str(line["id"]) for line in found) == sorted(f"test_a.py::test_slow[{n}]" for n in range(12))
    assert {line["outcome"] for line in found} == {"passed"}


def test_a_straggler_ends_on_an_idle_worker(cli: Cli, cluster: Cluster) -> None:
    """Of two instances of a test the first hangs."""
    hangs = cli.directory / "began"
    suite = f"""
import pathlib, time
def test_straggler():
    first = pathlib.Path({str(hangs)!r})
    if not first.exists():
        first.touch()
        time.sleep(600)
"""
    file = f'[framework]\ntype = "pytest"\npython = "{sys.executable}"\n'
    root = write(cli.directory, {"test_a.py": suite, "offload.toml": file})
    done = cli.run("test", "run", *cluster.operator())
    assert done.code == 0, done
    (found,) = lines(root)
    assert found["outcome"] == "passed" and len(found["attempts"]) == 1 and hangs.exists()
