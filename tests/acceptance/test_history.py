"""What people read afterwards: lines that functions printed on workers that are gone, and what happened, in sentences."""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from acceptance_cli import Cli, until
from cluster import Cluster

WORK = """
import pathlib, sys, time

SPOKEN = pathlib.Path(%r)

def talk(row):
    if row["n"] == 3:
        print("secret ghp_" + "a" * 30, file=sys.stderr)
    print(f"hello from {row['n']}")
    if row["n"] == 39:  # when the others' lines have come: what its worker cannot take goes with any line that comes then
        while len(list(SPOKEN.iterdir())) < 39:
            time.sleep(0.05)
        time.sleep(0.5)
        for _ in range(20_000):
            print("one of very many lines, as a loop that was left in prints them")
    time.sleep(0.05)
    (SPOKEN / str(row["n"])).touch()
    return {"ok": True}
"""


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    with Cluster(tmp_path / "nodes") as found:
        found.add_coordinator().wait_event("coordinator_ready")
        for _ in range(2):
            found.add_worker()
        for worker in found.workers:
            worker.wait_event("worker_ready")
        yield found


def lines(cli: Cli, *args: str) -> list[dict[str, Any]]:
    done = cli.run(*args, "--json")
    assert done.code == 0, done
    return [json.loads(line) for line in done.out.splitlines()]


def test_what_was_printed_is_read_after_its_worker_was_killed_and_what_happened_is_told(
    cli: Cli, cluster: Cluster
) -> None:
    at = cluster.operator()
    code = cli.directory / "code"
    code.mkdir()
    spoken = cli.directory / "spoken"
    spoken.mkdir()
    (code / "work.py").write_text(WORK % str(spoken))
    cli.rows(40)
    done = cli.run("map", "work:talk", "--code", "code", "--input", "in.jsonl", "--output", "out", *at)
    assert done.code == 0, done
    run_id = (cli.directory / "out" / "run-id").read_text().strip()

    def all_has_come() -> bool:
        printed = lines(cli, "logs", run_id, *at)
        said = {line["text"] for line in printed}
        missing = [line["left_out"]["lines"] for line in printed if "left_out" in line]
        all_counted = len(printed) - len(missing) + sum(missing) == 40 + 1 + 20_000
        return said >= {f"hello from {n}" for n in range(40)} and len(missing) > 0 and all_counted

    until(all_has_come, "what was printed, and how much of it was left out")
    cluster.workers[0].kill(signal.SIGKILL)
    cluster.coordinators[0].wait_event("worker_failed")

    printed = lines(cli, "logs", run_id, *at)
    assert len({line["worker_id"] for line in printed}) == 2 and {line["run_id"] for line in printed} == {run_id}
    assert [line["time"] for line in printed] == sorted(line["time"] for line in printed)
    assert any(line["text"] == "secret ***" and line["executor"] == "map" for line in printed)
    many = sum(line["text"].startswith("one of very many lines") for line in printed)
    assert many < 20_000
    assert all(line["row"] == int(line["text"].split()[-1]) + 1 for line in printed if line["text"].startswith("hello"))
    of_row = lines(cli, "logs", run_id, *at, "--row", "8")
    assert [(line["text"], line["row"], line["attempt"]) for line in of_row if "left_out" not in line] == [
        ("hello from 7", 8, 1)
    ]
    followed = cli.run("logs", run_id, *at, "--follow", "--worker", printed[-1]["worker_id"])
    assert followed.code == 0 and printed[-1]["text"] in followed.out, "following ends with the run"
    assert followed.out.count("hello from") == sum(
        line["text"].startswith("hello") for line in printed if line["worker_id"] == printed[-1]["worker_id"]
    )

    names = [event["event"] for event in lines(cli, "events", *at)]
    assert names[0] == "coordinator_ready" and names.count("worker_registered") == 2
    assert names.index("run_submitted") < names.index("run_completed") < names.index("worker_failed")
    of_run = lines(cli, "events", run_id, *at)
    assert {event.get("run_id", run_id) for event in of_run} == {run_id}
    assert "run_completed" in {e["event"] for e in of_run}

    leader = cluster.coordinators[0]
    leader.kill(signal.SIGKILL)
    leader.start()
    leader.wait_event("coordinator_ready")
    text = cli.run("events", *at)
    assert text.code == 0 and text.out.count("leads the cluster") == 2 and "ended without being stopped" in text.out, (
        text
    )
    assert (
        "(map) was submitted by the operator on host " in text.out and "has all of its input: 40 items" in text.out
    ), text
    assert "is complete: 40 of 40 items done\n" in text.out, text
    assert re.search(r"warning: worker \w{8} on \S+ \(127.0.0.1\) is lost: silent for 6.*, the limit is 6 s", text.out)
    assert "hello from 7" in cli.run("logs", run_id, *at).out

    assert cli.run("run", "delete", run_id, *at).code == 0
    gone = cli.run("logs", run_id, *at)
    assert gone.code == 2 and "there is no run" in gone.err
