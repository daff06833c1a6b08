"""`rollout job run` and `tail`: a limit, an error that is mended, and files that somebody changed."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from acceptance_cli import Cli
from job_rig import counts, outcomes, write_job, write_task

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="sandboxes need Linux")


def mendable(cli: Cli) -> Path:
    """A file that is /flag/mended in sandboxes."""
    (cli.directory / "flag").mkdir()
    return cli.directory / "flag" / "mended"


def mounted(cli: Cli) -> dict[str, Any]:
    return {"mounts": [{"type": "bind", "source": str(cli.directory / "flag"), "target": "/flag"}]}


@pytest.mark.slow
def test_a_trial_that_failed_runs_once_more_and_changed_files_are_written_anew(cli: Cli) -> None:
    flag = mendable(cli)
    write_task(cli.directory / "tasks" / "good", "echo from the agent; sleep 3; touch done")  # workers ship each second
    write_task(cli.directory / "tasks" / "odd", test="test -e /flag/mended && echo 1 > /logs/verifier/reward.txt")
    job = write_job(cli, datasets=[{"path": "tasks"}], environment=mounted(cli))
    first = cli.run("job", "run", job)
    assert first.code == 0 and "errors: 1 verifier_" in first.out, first
    directory = cli.directory / "jobs" / "job"
    assert outcomes(directory)["tasks/good/script/1"] == (1.0, None)
    told = cli.run("job", "tail", "jobs/job", "good", "--json")
    lines = [json.loads(line) for line in told.out.splitlines()]
    assert ("tasks/good/script/1", "from the agent") in {(line["trial"], line["text"]) for line in lines}, told
    assert not any("odd" in line["trial"] for line in lines)
    flag.touch()
    (directory / "tasks/good/script/1/agent/stdout.txt").write_text("forged")
    error = outcomes(directory)["tasks/odd/script/1"][1]
    again = cli.run("job", "run", job, "--retry-errors", str(error))
    assert again.code == 0 and "trials: 1 as they are; 1 once more (tasks/odd/script/1)" in again.out, again
    assert {outcome for name, outcome in outcomes(directory).items() if "before" not in name} == {(1.0, None)}
    assert "from the agent" in (directory / "tasks/good/script/1/agent/stdout.txt").read_text()


@pytest.mark.slow
def test_a_job_whose_infrastructure_fails_stops_and_goes_on_when_it_is_mended(cli: Cli) -> None:
    flag = mendable(cli)
    write_task(cli.directory / "tasks" / "one")
    agent = {"name": "a", "install": "test -e /flag/mended", "execute": "true"}
    limit = {"min_success_rate": 0.5, "after_trials": 3}
    job = write_job(
        cli, datasets=[{"path": "tasks"}], agents=[agent], n_attempts=20, infrastructure=limit, n_concurrent_trials=1,
        environment=mounted(cli),
    )  # fmt: skip
    stopped = cli.run("job", "run", job)
    found = cli.directory / "jobs" / "job"
    assert stopped.code == 1 and "the job was stopped" in stopped.out, stopped
    assert counts(found)["failed"] >= 3 and counts(found)["skipped"] > 10
    flag.touch()
    done = cli.run("job", "run", job)
    failed = counts(found)["failed"]
    assert done.code == 0 and counts(found) == {"total": 20, "completed": 20 - failed, "failed": failed, "skipped": 0}
    done = cli.run("job", "run", job, "--retry-errors", "agent_install_failed")
    assert done.code == 0 and counts(found)["completed"] == 20
