"""`rollout test` as a user meets it: projects of pytest, run twice, killed, changed, and wrong."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import psutil
import pytest
from acceptance_cli import Cli, until
from test_offload.suites import write

SUITE = """
import pathlib, pytest
COUNT = pathlib.Path(__file__).with_name("count.txt")

@pytest.mark.parametrize("value", ["a b", "[x]", "x::y"])
def test_odd(value): print("said", value)

@pytest.mark.skip(reason="later")
def test_later(): pass

def test_flaky():
    COUNT.write_text(str(tries := int(COUNT.read_text() if COUNT.exists() else 0) + 1))
    assert tries > 1

def test_wrong():
    print("what it printed")
    assert 1 == 2
"""
BROKEN = "import pytest\n@pytest.mark.parametrize('x', [1])\ndef test_new(): pass"
FILE = """
[groups.all]
retry_count = 1
[report]
fail_on_flaky = true
"""


def results(root: Path) -> dict[str, dict[str, Any]]:
    """By id; each is there once."""
    lines = [json.loads(line) for line in (root / "test-results/results.jsonl").read_text().splitlines()]
    found = {line["id"]: line for line in lines}
    assert len(found) == len(lines)
    return found


def test_run_again_mended_and_only_flaky(cli: Cli) -> None:
    """Without a file: a failure and a file that cannot be collected; then what failed, once more; then with retries."""
    root = write(cli.directory, {"pytest.ini": "[pytest]\n", "test_a.py": SUITE, "test_b.py": BROKEN})
    first = cli.run("test", "run", "--json")
    assert first.code == 1, first
    outcomes = {id: one["outcome"] for id, one in results(root).items()}
    odd = {f"test_a.py::test_odd[{value}]": "passed" for value in ("a b", "[x]", "x::y")}
    assert outcomes == odd | {
        "test_a.py::test_later": "skipped",
        "test_a.py::test_flaky": "failed",
        "test_a.py::test_wrong": "failed",
        "test_b.py": "error",
    }
    summary = first.event("summary")
    assert (summary["tests"]["total"], summary["tests"]["failing"]) == (7, 3)
    assert {Path(path).name for path in summary["files"].values()} >= {"results.jsonl", "junit.xml", "trace.json"}
    told = {event["id"]: event["outcome"] for event in first.events if event["event"] == "test"}
    assert told == {id: outcome for id, outcome in outcomes.items() if id != "test_b.py"}
    assert {event["workers"] for event in first.events if event["event"] == "progress"} <= {0, 1}
    logs = cli.run("test", "logs", "--failures", "--test-regex", "wrong$")
    assert logs.out.startswith("=== test_a.py::test_wrong [FAILED] ===\n") and "what it printed" in logs.out

    (root / "test_a.py").write_text(SUITE.replace("1 == 2", "1 == 1"))
    (root / "test_b.py").write_text("def test_new(): pass")
    again = cli.run("test", "rerun-failed")
    assert again.code == 0, again
    assert set(results(root)) == {"test_a.py::test_flaky", "test_a.py::test_wrong", "test_b.py::test_new"}

    (root / "count.txt").unlink()
    (root / "offload.toml").write_text(FILE)
    flaky = cli.run("test", "run")
    assert flaky.code == 3, flaky
    assert [one["outcome"] for one in results(root)["test_a.py::test_flaky"]["attempts"]] == ["failed", "passed"]
    assert "1 flaky" in flaky.out and cli.run("test", "rerun-failed").out == "no test failed\n"
    known = [json.loads(line) for line in cli.run("test", "history", "--sort", "flaky", "--json").out.splitlines()]
    assert known[0]["id"] == "test_a.py::test_flaky" and known[0]["statuses"] == ["failed", "passed", "flaky"]
    run = (root / "test-results/run-id").read_text().strip()
    told = cli.run("test", "history", run)
    assert told.code == 0 and "F.f" in told.out and "test_wrong" not in told.out
    assert cli.run("test", "history", f"{run}x").code == 2


def test_killed_it_goes_on_with_the_tests_that_have_no_result(cli: Cli) -> None:
    slow = "import time, pytest\n@pytest.mark.parametrize('n', range(20))\ndef test_slow(n): time.sleep(0.2)\n"
    root = write(cli.directory, {"pytest.ini": "[pytest]\n", "test_a.py": slow})
    file = root / "test-results/results.jsonl"
    process = cli.start("test", "run")
    until(lambda: (file.exists() and file.read_bytes().count(b"\n") >= 2) or process.poll() is not None, "results")
    process.send_signal(signal.SIGKILL)
    process.wait()
    until(lambda: not cli.left_behind(), "its workers to end")
    first = set(results(root))
    assert 2 <= len(first) < 20
    run = (root / "test-results/run-id").read_text()
    on = cli.run("test", "run", "--json")
    assert on.code == 0 and on.event("run_opened")["resumed"] and on.event("summary")["run_id"] == run.strip()
    assert len(results(root)) == 20 and first < set(results(root))


def test_a_failing_end_of_a_fixture_of_the_session_fails_the_run(cli: Cli) -> None:
    suite = """
import pytest
@pytest.fixture(scope="session")
def session():
    yield
    assert 0
def test_a(session): pass
"""
    root = write(cli.directory, {"pytest.ini": "[pytest]\n", "test_a.py": suite})
    assert cli.run("test", "run").code == 1
    assert results(root)["test_a.py::test_a"]["outcome"] == "error"


@pytest.mark.slow
@pytest.mark.parametrize("who", ["worker-1.toml", "coordinator.toml"])
def test_each_test_is_reported_once_when_a_part_of_the_cluster_is_killed(cli: Cli, who: str) -> None:
    slow = "import time, pytest\n@pytest.mark.parametrize('n', range(20))\ndef test_slow(n): time.sleep(0.3)\n"
    root = write(cli.directory, {"pytest.ini": "[pytest]\n", "test_a.py": slow})
    file = root / "test-results/results.jsonl"
    process = cli.start("test", "run")
    until(lambda: file.exists() and file.read_bytes().count(b"\n") >= 2, "results")
    (part,) = [child for child in psutil.Process(process.pid).children() if who in " ".join(child.cmdline())]
    part.kill()
    out, _ = process.communicate(timeout=90)
    assert process.returncode == 0 and "(signal SIGKILL); it is started again" in out
    assert {one["outcome"] for one in results(root).values()} == {"passed"} and len(results(root)) == 20


@pytest.mark.slow
def test_enough_failures_end_it(cli: Cli) -> None:
    wrong = "import pytest\n@pytest.mark.parametrize('n', range(200))\ndef test_wrong(n): assert n < 0\n"
    root = write(cli.directory, {"pytest.ini": "[pytest]\n", "test_a.py": wrong})
    done = cli.run("test", "run", "--maxfail", "1", "--json")
    tests = done.event("summary")["tests"]
    assert done.code == 1 and 1 <= tests["failed"] < 200 and tests["not_run"] == 200 - len(results(root))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["run", "test_a.py::test_nosuch"], "test_nosuch"),
        (["run", "--config", "wrong.toml"], "wrong.toml:2: offload.max_parallel"),
        (["validate", "--config", "other.toml"], "other.toml:2: framework.type"),
        (["run", "empty"], "no tests"),
        (["run", "-k", "a or b"], "filters = \"-k 'a or b'\""),
        (["run", "--config", "option.toml"], "command line: unrecognized arguments: --no-such"),
        (["logs"], "test-results"),
        (["init"], "offload.toml"),
    ],
)
def test_what_is_wrong_is_told_before_anything_starts(cli: Cli, words: list[str], said: str) -> None:
    files = {
        "test_a.py": "def test_a(): pass",
        "offload.toml": "",
        "wrong.toml": "[offload]\nmax_parallel = 0",
        "other.toml": '[framework]\ntype = "pytst"',
        "empty/a.txt": "",
        "option.toml": '[framework]\nextra_args = ["--no-such"]',
    }
    write(cli.directory, files)
    done = cli.run("test", *words)
    assert done.code == 2 and said in done.err, done
    assert not (cli.directory / "test-results" / "run-id").exists()


@pytest.mark.parametrize(("interrupted", "code"), [(False, 2), (True, 130)])
def test_a_cluster_that_waits_for_the_collection_leaves_nothing_when_there_is_no_run(
    cli: Cli, interrupted: bool, code: int
) -> None:
    waits = (
        "import os, pytest, time\nwhile not os.path.exists('go'): time.sleep(0.02)\nraise pytest.UsageError('bad')\n"
    )
    root = write(cli.directory, {"pytest.ini": "[pytest]\n", "conftest.py": waits, "test_a.py": "def test_a(): pass\n"})
    process = cli.start("test", "run")
    until(lambda: all(who in " ".join(cli.left_behind()) for who in ("coordinator.toml", "worker-1.toml")), "daemons")
    assert not (root / "test-results/.rollout").exists()
    if interrupted:
        process.send_signal(signal.SIGINT)
    else:
        (root / "go").touch()
    process.communicate(timeout=60)
    assert process.returncode == code
    until(lambda: not cli.left_behind(), "what had just been started to end")
    assert not (root / "test-results").exists()


def test_collect_prints_ids_and_tells_what_it_could_not(cli: Cli) -> None:
    write(cli.directory, {"offload.toml": "", "test_a.py": SUITE, "test_b.py": "import nosuchmodule"})
    done = cli.run("test", "collect")
    assert done.code == 1 and "test_b.py" in done.err and "test_a.py::test_odd[a b]" in done.out.splitlines()
    one = cli.run("test", "collect", "test_a.py::test_odd[a b]", "--json")
    assert one.code == 0 and [event["line"] for event in map(json.loads, one.out.splitlines())] == [5]


def test_only_what_is_affected_runs(cli: Cli) -> None:
    files = {"pytest.ini": "[pytest]\n", "one.py": "", "test_a.py": "import one\ndef test_a(): pass\n"}
    root = write(cli.directory, files | {"test_b.py": "def test_b(): pass\n"})
    assert cli.run("test", "run", "--affected", "--json").event("summary")["tests"]["cached"] == 0
    (root / "one.py").write_text("changed = True")
    again = cli.run("test", "run", "--affected", "--json")
    assert again.code == 0 and again.event("summary")["tests"]["passed"] == 2
    ran = {id: "cached" not in one["attempts"][0] for id, one in results(root).items()}
    assert ran == {"test_a.py::test_a": True, "test_b.py::test_b": False}
    assert "2 of them in earlier runs" in cli.run("test", "run", "--affected").out
