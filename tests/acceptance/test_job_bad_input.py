"""Jobs and tasks that cannot be run, told before anything runs; and an agent that prints more than anybody reads."""

from __future__ import annotations

import json
import sys

import pytest
from acceptance_cli import Cli
from job_rig import SCRIPT, SMALL, outcomes, trials, write_job, write_task

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="sandboxes need Linux")


def test_all_that_is_wrong_with_tasks_is_told_before_anything_runs(cli: Cli) -> None:
    tasks = cli.directory / "tasks"
    write_task(tasks / "good")
    (write_task(tasks / "circle") / "tests" / "loop").symlink_to("..")
    (write_task(tasks / "no tests") / "tests" / "test.sh").unlink()
    (write_task(tasks / "ünï 名") / "instruction.md").write_text("")
    write_task(tasks / "keys", toml="[agent]\ntimeout_sek = 1\n")
    write_task(cli.directory / "other" / "good")
    singles = [{"path": "tasks/good"}, {"path": "other/good"}, {"path": "nowhere"}]
    done = cli.run("job", "run", write_job(cli, datasets=[{"path": "tasks"}], tasks=singles))
    assert done.code == 2, done
    for expected in (
        "tasks/circle/tests/loop: a link to a directory above it",
        "tasks/no tests: there is no tests/test.sh",
        "tasks/ünï 名/instruction.md: empty",
        'tasks/keys/task.toml:2: agent.timeout_sek: unknown key; did you mean "timeout_sec"?',
        'two tasks are called "good": tasks/good and other/good',
        "nowhere: there is no such directory",
    ):
        assert expected in done.err, (expected, done.err)
    assert "6 problems" in done.err
    assert not list(cli.directory.glob("jobs/job/run-id"))


def test_every_fault_of_a_job_file_is_told_before_anything_runs(cli: Cli) -> None:
    write_task(cli.directory / "tasks" / "good")
    agents = [
        SCRIPT | {"n_concurent": 2},
        {"name": "orakle"},
        SCRIPT | {"label": "c", "env": {"KEY": "${NOT_SET_HERE}"}},
    ]
    job = write_job(
        cli,
        agents=agents,
        n_attempts=0,
        datasets=[{"path": "tasks", "task_names": ["x*"]}, {"path": "nowhere"}],
        environment={"type": "process", "provider_config": {"imag": "pull"}},
        metrics=[{"type": "custom", "function": "beside:here"}, {"type": "custom", "function": "nowhere_at_all:f"}],
        retry={"max_attempts": "many"},
    )
    (cli.directory / "beside.py").write_text("def here(rewards): return 1")
    done = cli.run("job", "run", job)
    assert done.code == 2, done
    for expected in (
        'agents.0.n_concurent: unknown key; did you mean "n_concurrent"?',
        '"orakle"',
        "n_attempts: must be at least 1, not 0",
        'retry.max_attempts: must be an integer, not "many"',
        'environment.provider_config.imag: unknown key; did you mean "image"?',
        "agents.2.env: KEY needs NOT_SET_HERE, which is not set here",
        'datasets.0: no task of tasks is called "x*"',
        "datasets.1: nowhere: there is no such directory",
    ):
        assert expected in done.err, (expected, done.err)
    assert done.err.count(f"{job}:") == 9, done.err
    assert not list(cli.directory.glob("jobs/job/run-id"))


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_log_of_two_gigabytes(cli: Cli) -> None:
    """It is cut, and told where; the trial counts as any other."""
    megabytes = 2048
    write_task(
        cli.directory / "tasks" / "loud",
        f"echo begin; yes 'a line of no use' | head -c {megabytes}M; echo; echo end",
        toml=SMALL.replace("storage_mb = 100", "storage_mb = 4000") + "[agent]\ntimeout_sec = 500\n",
    )
    done = cli.run("job", "run", write_job(cli, datasets=[{"path": "tasks"}]), timeout=500)
    assert done.code == 0, done
    job = cli.directory / "jobs" / "job"
    assert outcomes(job) == {"tasks/loud/script/1": (1.0, None)}
    ((_, trial),) = trials(job)
    kept = sum(path.stat().st_size for path in trial.directory.rglob("*") if path.is_file())
    assert kept < 16 << 20, f"{kept >> 20} MiB were kept"
    with (trial.directory / "agent" / "stdout.txt").open("rb") as file:
        assert file.readline() == b"begin\n"
        file.seek(-200, 2)
        assert file.read().endswith(b"\nend\n")
    assert json.loads((job / "result.json").read_text())["completed_trials"] == 1
