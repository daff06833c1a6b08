"""Task directories, repositories and trials, made for tests of jobs."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path

from rollout.workloads.job.aggregate import PlannedTrial
from rollout.workloads.job.results import Timestamps as Times
from rollout.workloads.job.results import TrialError, TrialResult

TASK = {
    "task.toml": 'version = "1.0"\ndialect = "rollout"\n',
    "instruction.md": "Write hello into hello.txt.\n",
    "environment/Dockerfile": "FROM debian:12\n",
    "tests/test.sh": "echo 1 > /logs/verifier/reward.txt\n",
    "solution/solve.sh": "echo hello > hello.txt\n",
}


def make_task(
    directory: Path,
    toml: str | None = None,
    *,
    without: tuple[str, ...] = (),
    files: Mapping[str, str] | None = None,
    **more: str,
) -> Path:
    """A task that is whole, with another task.toml, without some files, and with others (in `more`, `a__b` is a/b)."""
    wanted = {name: text for name, text in TASK.items() if name not in without}
    if toml is not None:
        wanted["task.toml"] = toml
    wanted |= {**(files or {}), **{name.replace("__", "/"): text for name, text in more.items()}}
    for name, text in wanted.items():
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return directory


def git(directory: Path, *arguments: str) -> str:
    identity = {f"GIT_{who}_{what}": "t@example.org" for who in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")}
    environment = {**os.environ, **identity, "GIT_CONFIG_GLOBAL": "/dev/null"}
    command = ["git", "-C", str(directory), *arguments]
    return subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout.strip()


def make_repository(directory: Path, *tasks: str) -> tuple[str, str]:
    """(url, commit) of a bare repository with these task directories below tasks/."""
    work = directory / "work"
    work.mkdir(parents=True)
    git(work, "init", "--quiet", "--initial-branch=main")
    for name in tasks:
        make_task(work / "tasks" / name)
    commit = commit_all(work)
    bare = directory / "bare.git"
    git(directory, "clone", "--quiet", "--bare", str(work), str(bare))
    return str(bare), commit


def commit_all(work: Path) -> str:
    git(work, "add", "-A")
    git(work, "commit", "--quiet", "-m", "tasks")
    return git(work, "rev-parse", "HEAD")


START = datetime(2026, 1, 2, 3, 4, 5, 600_000, tzinfo=UTC)


def trial(
    task: str,
    reward: float | None = None,
    error: str | None = None,
    *,
    agent: str = "a",
    attempt: int = 1,
    cost: float = 0.0,
    dataset: str = "d",
) -> PlannedTrial:
    """A trial that ended so."""
    times = Times(started_at=START, ended_at=START + timedelta(seconds=1))
    result = TrialResult(
        task_name=task,
        dataset_name=dataset,
        agent_name=agent,
        attempt=attempt,
        task_git_commit_id=None,
        reward=reward,
        cost=cost,
        error=None if error is None else TrialError(type=error, message=error),
        durations=times.durations(),
        timestamps=times,
    )
    return PlannedTrial(task, dataset, agent, attempt, result)
