"""What an operator sees of runs, rows and workers of a real cluster: counts that agree, causes, files from anywhere."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from acceptance_cli import Cli, until
from cluster import Cluster

ROWS = 120
DELAY_MS = 300


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    with Cluster(tmp_path / "nodes") as found:
        found.add_coordinator().wait_event("coordinator_ready")
        for _ in range(2):
            found.add_worker()
        for worker in found.workers:
            worker.wait_event("worker_ready")
        yield found


@pytest.fixture
def at(cluster: Cluster) -> list[str]:
    return cluster.operator()


def ask(cli: Cli, *args: str) -> dict[str, Any]:
    done = cli.run(*args, "--json")
    assert done.code == 0, done
    return json.loads(done.out)


def lines(cli: Cli, *args: str) -> list[dict[str, Any]]:
    done = cli.run(*args, "--json", "--limit", "0")
    assert done.code == 0, done
    return [json.loads(line) for line in done.out.splitlines()]


def batch(cli: Cli) -> str:
    cli.rows(ROWS)
    backend = {"delay_ms": DELAY_MS, "concurrency": 4, "fail_match": "row 17"}
    return str(cli.config(backend=backend, run={"max_attempts": 1}))


def test_counts_agree_wherever_they_are_shown_though_a_worker_is_killed(
    cli: Cli, cluster: Cluster, at: list[str]
) -> None:
    process = cli.start("infer", "batch", "--config", batch(cli), *at, "--json")
    cli.wait_for_rows(20, process)
    run_id = (cli.directory / "out" / "run-id").read_text().strip()
    cluster.workers[0].kill()
    stopping = ask(cli, "run", "pause", run_id, *at)
    assert stopping["state"] == "paused" and stopping["workers"] <= 1, "the dead worker does not count"
    until(lambda: ask(cli, "run", "show", run_id, *at)["pausing"] is False, "the pause")
    paused = ask(cli, "run", "show", run_id, *at)
    assert paused["state"] == "paused" and paused["eta_s"] is None
    partial = cli.run("run", "results", run_id, *at, "--output", "elsewhere")
    assert partial.code == 1 and "is paused" in partial.out and "the same command adds" in partial.out, partial
    assert process.stdout is not None
    events: list[dict[str, Any]] = []
    while not events or events[-1].get("state") != "paused":  # it asks at its own times
        events.append(json.loads(process.stdout.readline()))
    ask(cli, "run", "resume", run_id, *at)
    events += [json.loads(line) for line in process.stdout]
    assert process.wait(60) == 0, events[-3:]

    progress = [event for event in events if event["event"] == "progress"]
    assert max(event["workers"] for event in progress) == 2
    assert all(event["eta_s"] is None for event in progress if event["state"] == "paused" or not event["workers"])
    summary = json.loads((cli.directory / "out" / "summary.json").read_text())
    shown = ask(cli, "run", "show", run_id, *at)
    assert summary["attempts"] == {
        "total": shown["attempts"],
        "retried": shown["retried"],
        "worker_lost": shown["worker_lost"],
    }
    assert 0 < shown["worker_lost"] == shown["retried"] <= 4, "the worker had at most 4 rows that had begun"
    retried = lines(cli, "run", "items", run_id, *at, "--retried")
    assert sum(row["attempts"] - 1 for row in retried) == shown["retried"]
    assert (
        sum(row["attempts"] for row in lines(cli, "run", "items", run_id, *at))
        == shown["attempts"]
        == ROWS + len(retried)
    )
    assert summary["durations"]["attempt_mean_ms"] < 2 * DELAY_MS, "waiting in the engine's queue is no work"

    row = retried[0]["row"]
    item = ask(cli, "item", "show", run_id, str(row), *at)
    assert item["input"] == {"prompt": f"row {row - 1}", "n": row - 1} and item["from"].endswith(f"in.jsonl:{row}")
    assert item["rendered"]["prompts"] == [] and "model.tokenizer" in item["rendered"]["why"]  # the mock has none
    ends = [attempt for attempt in item["history"] if attempt["began_at"]]
    assert [attempt["ending"] for attempt in ends] == ["worker_lost", "done"] and ends[0]["worker"] != ends[1]["worker"]
    (failed,) = lines(cli, "run", "items", run_id, *at, "--failed")
    (error,) = [json.loads(line) for line in (cli.directory / "out" / "errors.jsonl").read_text().splitlines()]
    assert error["row"] == error["line"] == failed["row"] == 18 and error["attempts"] == failed["attempts"] == 1
    assert [one["row"] for one in shown["failures"] if one["final"]] == [18] and shown["failures"][0]["at"]

    whole = cli.run("run", "results", run_id, *at, "--output", "elsewhere")
    assert whole.code == 0, whole
    for name in ("completions.jsonl", "errors.jsonl", "summary.json"):
        assert (cli.directory / "elsewhere" / name).read_bytes() == (cli.directory / "out" / name).read_bytes()
    there = cli.config("there.toml", backend={"delay_ms": DELAY_MS}, output={"dir": "elsewhere"})
    goes_on = cli.run("infer", "batch", "--config", str(there), *at)
    assert goes_on.code == 0 and "is complete already: 119 completions, 1 failed" in goes_on.out, goes_on


WORK = """
import time
from pathlib import Path
if not Path("able").exists():  # of the worker
    raise ImportError("no numbers here")
def double(row):
    while not Path("go").exists():
        time.sleep(0.05)
    return {"twice": 2 * row["n"], "pad": "x" * 9000}
"""


def test_a_run_of_map_that_one_worker_only_can_load_and_its_results_from_another_place(
    cli: Cli, cluster: Cluster, at: list[str]
) -> None:
    code = cli.directory / "code"
    code.mkdir()
    (code / "work.py").write_text(WORK)
    cli.rows(20)
    command = ["map", "work:double", "--code", "code", "--input", "in.jsonl", "--output", "out", *at, "--json"]
    failed = cli.run(*command)
    summary = failed.event("summary")
    assert (failed.code, summary["state"], summary["rows"]["committed"]) == (1, "failed", 0), failed
    assert summary["reason"].startswith(
        "executor 'map' cannot start on any of the 2 workers that could host it: work:double cannot be loaded: "
        "importing work failed: ImportError: no numbers here\n"
    )
    assert 'File "work.py", line 5' in summary["reason"] and summary["durations"]["wall_s"] < 20
    run_id = (cli.directory / "out" / "run-id").read_text().strip()

    able, unable = cluster.workers
    (able.directory / "able").touch()
    process = cli.start(*command)

    def told() -> list[tuple[list[str], bool]]:
        causes = ask(cli, "run", "show", run_id, *at)["causes"]
        return [(cause["workers"], cause["everywhere"]) for cause in causes if "no numbers here" in cause["message"]]

    only = unable.wait_event("worker_ready")["incarnation"]
    until(lambda: told() == [([only], False)], "the run to name the worker that cannot load the function")
    (able.directory / "go").touch()
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0, (out, err)
    assert (cli.directory / "out" / "run-id").read_text().strip() == run_id
    assert not (cli.directory / "out" / "errors.jsonl").read_bytes()
    (cli.directory / "in.jsonl").unlink()
    fetched = cli.run("run", "results", run_id, *at, "--output", "again")
    assert fetched.code == 0 and "20 of 20 rows are in the files" in fetched.out, fetched
    for name in ("results.jsonl", "errors.jsonl", "summary.json"):
        assert (cli.directory / "again" / name).read_bytes() == (cli.directory / "out" / name).read_bytes()
    item = ask(cli, "item", "show", run_id, "3", *at)
    assert item["output"]["twice"] == 4 and len(item["output"]["pad"]) == 9000, "the object behind it is read"
    other = cli.run("run", "results", run_id, *at, "--output", "again", "--set", "dyr=1")
    assert other.code == 2 and "dyr" in other.err
    missing = cli.run("item", "show", run_id, "21", *at)
    assert missing.code == 2 and "has 20 rows; row 21: there is no such row" in missing.err

    worker_id = item["worker"]
    worker = ask(cli, "workers", "show", worker_id, *at)
    assert worker["state"] == "ready" and "map" in worker["executors"] and worker["runs"] == [] and worker["done"] > 0
    drained = cli.run("workers", "drain", worker_id, *at)
    assert drained.code == 0 and "finishes what it runs and stops" in drained.out
    until(lambda: len(ask(cli, "workers", *at)["workers"]) == 1, "the worker to leave")
    gone = ask(cli, "workers", "show", worker_id, *at)
    assert gone["state"] == "gone" and gone["ended_at"]
    for node in cluster.workers:
        node.kill(signal.SIGKILL)
