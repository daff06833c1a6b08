"""A provider of sandboxes of somebody else's package, installed from a directory, is a provider like ours."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from acceptance_cli import ROLLOUT, Cli
from job_rig import trials, write_job, write_task
from rollout_worker.sandboxes.conformance import CASES

SAMPLE = Path(__file__).parent / "sample_provider"
PARTS = ("commands", "deadlines", "files", "life")


def test_it_is_at_most_150_lines() -> None:
    files = [SAMPLE / "pyproject.toml", *SAMPLE.rglob("*.py")]
    assert sum(len(file.read_text().splitlines()) for file in files) <= 150


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The environment of programs that find it by its entry point."""
    target = tmp_path_factory.mktemp("site")
    pip = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-build-isolation", "--no-index"]
    subprocess.run([*pip, "--target", str(target), str(SAMPLE)], check=True, timeout=100)
    return {**os.environ, "PYTHONPATH": str(target)}


def test_it_does_what_it_says_it_can(installed: dict[str, str], tmp_path: Path) -> None:
    command = [sys.executable, "-m", "rollout_worker.sandboxes.conformance", "directories", "--json", "--large-mb", "1"]
    command += [f"--case={case.name}" for case in CASES if case.part in PARTS]
    done = subprocess.run([*command, "--state", str(tmp_path)], env=installed, capture_output=True, text=True)
    outcomes = {one["name"]: one for one in json.loads(done.stdout)} if done.stdout else {}
    assert done.returncode == 0, [one for one in outcomes.values() if one["outcome"] == "failed"] or done.stderr
    not_claimed = {name for name, one in outcomes.items() if one["outcome"] == "not applicable"}
    assert not_claimed == {"a_deadline_ends_daemons", "a_fork_bomb_is_contained", "a_lost_sandbox_is_no_failed_command"}
    assert [path for part in ("boxes", "claims") for path in (tmp_path / "state/directories" / part).iterdir()] == []


def test_its_settings_are_checked(installed: dict[str, str], tmp_path: Path) -> None:
    command = [sys.executable, "-m", "rollout_worker.sandboxes.conformance", "directories", "--state", str(tmp_path)]
    done = subprocess.run([*command, "--config", '{"max": 1}'], env=installed, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "")
    assert "provider_config.max: " in done.stderr


def test_a_job_names_it_by_its_entry_point(installed: dict[str, str], tmp_path: Path) -> None:
    """The sandbox is refused for what the provider says of itself, so the trial reached it."""
    write_task(tmp_path / "tasks/one", dockerfile="FROM python:3.12-slim\n")
    environment = {"type": "directories", "provider_config": {}}
    job = write_job(Cli(tmp_path), environment=environment, datasets=[{"path": "tasks"}])
    command = [ROLLOUT, "job", "run", job]
    without = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert without.returncode == 2 and "environment.type: " in without.stderr
    subprocess.run(command, env=installed, cwd=tmp_path, capture_output=True, timeout=100)
    [(_, trial)] = trials(tmp_path / "jobs/job")
    error = trial.result["error"]
    assert error["type"] == "environment_start_failed" and "nothing is isolated" in error["message"]
