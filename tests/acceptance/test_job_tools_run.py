"""Tasks that are tried and jobs that are verified again, with real processes."""

from __future__ import annotations

from pathlib import Path

import pytest
from acceptance_cli import Cli
from rollout.workloads.job.compare_directories import compare_directories
from rollout.workloads.job.job_directory import read_job_directory
from rollout.workloads.job.new_task import write_task
from rollout.workloads.job.overview import overview

JOB = """\
artifacts: [/app]
environment: {type: process}
n_concurrent_trials: 8
agents:
  - name: oracle
  - name: loud
    execute: echo "HELLO, WORLD!" > /app/hello.txt
  - name: broken
    execute: exit 3
datasets:
  - path: hello
"""


def replace(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


SHARED = ("--network-mode", "host")


def test_new_tasks_are_good_and_one_whose_test_or_solution_is_wrong_is_not(cli: Cli) -> None:
    tasks = cli.directory / "hello"
    write_task(tasks / "a-good", "rollout")
    write_task(tasks / "b-good", "harbor")
    write_task(tasks / "c-solution", "rollout")
    write_task(tasks / "d-test", "harbor")
    replace(tasks / "c-solution/solution/solve.sh", "Hello", "Hullo")
    replace(tasks / "d-test/tests/test.sh", "reward=0", "reward=1")
    done = cli.run(
        "task", "oracle", "hello", "--provider", "process", "--output", "kept", "--concurrency", "8", *SHARED
    )
    assert done.code == 1, done
    lines = done.out.splitlines()
    verdicts = [line.partition(" in ")[0] for line in lines if line.startswith("hello/")]
    assert verdicts == [
        "hello/a-good: ok: oracle 1",
        "hello/b-good: ok: oracle 1",
        "hello/c-solution: NOT GOOD: oracle 0",
        "hello/d-test: NOT GOOD: oracle 1",
    ]
    assert "  oracle: reward 0: the solution does not pass the tests" in lines
    assert "    /app/hello.txt does not hold the line" in lines  # the end of what the verifier printed
    assert "  nop: reward 1: an agent that does nothing passes, so the tests test nothing" in lines
    kept = read_job_directory(cli.directory / "kept" / "oracle").trials
    assert {trial.record.network for trial in kept if trial.record} == {"host"}
    assert lines[-1] == "2 of 4 tasks are not good; what their trials left is in kept/oracle"


@pytest.mark.slow
def test_what_agents_left_is_verified_by_the_tests_as_they_are_now(cli: Cli) -> None:
    write_task(cli.directory / "hello/one", "harbor")
    (cli.directory / "job.yaml").write_text(JOB)
    assert cli.run("job", "run", "job.yaml").code == 0
    job = read_job_directory(cli.directory / "jobs/job")
    rates = {one.agent: one.statistics.pass_rate and one.statistics.pass_rate.mean for one in overview(job).agents}
    assert rates == {"oracle": 1.0, "loud": 0.0, "broken": 0.0} and job.state == "completed"
    test = cli.directory / "hello/one/tests/test.sh"
    replace(test, '"$(cat /app/hello.txt)" = "Hello, world!"', '"$(tr a-z A-Z < /app/hello.txt)" = "HELLO, WORLD!"')
    done = cli.run("job", "regrade", "jobs/job", "--json")
    found = done.event("regraded")
    assert (done.code, found["directory"], found["regraded"]) == (0, "jobs/job/regrade-1", 3), done
    assert [(one["trial"], one["before"], one["after"]) for one in found["trials"]] == [("hello/one/loud/1", 0.0, 1.0)]
    # It is a job as any other, in which no agent worked; that which it is of is as it was.
    again = read_job_directory(cli.directory / found["directory"])
    (compared,), untold = compare_directories(job, again, ("loud",))
    assert (compared.comparison.difference, untold) == (1.0, [])
    assert all(trial.result and trial.result.durations.agent_execution_sec == 0 for trial in again.trials)
    assert read_job_directory(job.path) == job
