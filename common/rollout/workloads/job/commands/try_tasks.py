"""`rollout task oracle`: runs a job of two agents on a private cluster and judges its tasks."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Mapping, Sequence
from json import dumps
from pathlib import Path
from typing import Any, Literal

import typer

from rollout.cli.boundary import FAILED, INTERRUPTED, OK
from rollout.cli.progress import Display, Snapshot, display_for
from rollout.cli.session import run_workload
from rollout.cli.show import print_json
from rollout.cli.words import counted
from rollout.cli.work_options import Options
from rollout.config.load import load_settings
from rollout.config.visible import visible
from rollout.model.errors import IncompleteError
from rollout.workloads.job.agent_kinds import NOP, ORACLE
from rollout.workloads.job.check_tasks import is_task
from rollout.workloads.job.commands.show_job import end_of_output
from rollout.workloads.job.config import JobConfig
from rollout.workloads.job.dialect import DialectName
from rollout.workloads.job.job_directory import JobDirectory, KeptTrial, read_job_directory
from rollout.workloads.job.overview import seconds
from rollout.workloads.job.verdict import Verdict, verdicts
from rollout.workloads.output import RUN_ID
from rollout.workloads.registered import load

NAME = "oracle"
"""Name of the job."""
_KEPT_TO_ITSELF = frozenset({"cluster", "run_opened", "summary"})
"""Events of a job that are not printed, because the job is temporary."""


class _Brief(Display):
    """Shows the progress and notes of a job, but not its run and files."""

    def __init__(self, inner: Display) -> None:
        self._inner = inner

    def note(self, message: str) -> None:
        self._inner.note(message)

    def event(self, name: str, message: str, /, **fields: Any) -> None:
        if name not in _KEPT_TO_ITSELF:
            self._inner.event(name, message, **fields)

    def progress(self, snapshot: Snapshot) -> None:
        self._inner.progress(snapshot)

    def step(self, message: str) -> None:
        self._inner.step(message)

    def close(self) -> None:
        self._inner.close()


def try_tasks(
    paths: Sequence[Path],
    *,
    provider: str,
    provider_config: Mapping[str, Any],
    network_mode: Literal["host"] | None,
    attempts: int,
    concurrency: int,
    output: Path | None,
    dialect: DialectName | None,
    json: bool,
) -> int:
    """Test the tasks and return the exit code: 0 if every task is good, 1 if not. If `output` is None, the directory is
    temporary, and kept if a task fails. Raises ConfigError with all faults of the tasks before anything runs."""
    meant = {"dialect": dialect} if dialect else {}
    keys = {
        "name": NAME,
        "n_attempts": attempts,
        "n_concurrent_trials": concurrency,
        "agents": [{"name": ORACLE}, {"name": NOP}],
        "environment.type": provider,
        "environment.provider_config": dict(provider_config),
        **({"environment.network_mode": network_mode} if network_mode else {}),
        "tasks": [{"path": str(path), **meant} for path in paths if is_task(path)],
        "datasets": [{"path": str(path), **meant} for path in paths if not is_task(path)],
    }
    words = ["rollout", "task", "oracle", *map(str, paths), "--provider", provider]
    for key, value in provider_config.items():
        words += ["--provider-config", f"{key}={value if isinstance(value, str) else dumps(value)}"]
    words += ["--network-mode", network_mode] if network_mode else []
    words += ["--attempts", str(attempts), "--concurrency", str(concurrency)]
    words += ["--dialect", dialect] if dialect else []
    if output is not None:
        return _try(keys, words, output, json=json)
    directory, code = Path(tempfile.mkdtemp(prefix="rollout-oracle-")), FAILED
    try:
        code = _try(keys, words, directory, json=json)
        return code
    finally:
        if code == OK or not (directory / NAME / RUN_ID).exists():
            shutil.rmtree(directory, ignore_errors=True)


def _try(keys: Mapping[str, Any], words: Sequence[str], directory: Path, *, json: bool) -> int:
    settings = load_settings(JobConfig, None, {**keys, "jobs_dir": str(directory)}, environ={})
    options = Options(words=(*words, "--output", str(directory)), json=json, local=True)
    code = run_workload(load("job"), settings, options, _Brief(display_for(json=json)))
    if code == INTERRUPTED:
        return code
    job = read_job_directory(directory / NAME)
    if job.state != "completed":
        why = f"{job.state}: {job.reason}" if job.reason else job.state or "not over"
        raise IncompleteError(f"not every trial was run ({why})\nwhat there is lies in {job.path}")
    return _tell(job, verdicts(job), json=json)


def _tell(job: JobDirectory, found: Sequence[Verdict], *, json: bool) -> int:
    bad = sum(not one.ok for one in found)
    for one in found:
        if json:
            print_json({"event": "task", **one.to_json()})
        else:
            _print(job, one)
    if json:
        print_json({"event": "oracle", "tasks": len(found), "failed": bad, "directory": str(job.path) if bad else None})
    elif bad:
        are = "is" if bad == 1 else "are"
        typer.echo(f"{bad:,} of {counted(len(found), 'task')} {are} not good; what their trials left is in {job.path}")
    else:
        are = "is" if len(found) == 1 else "are"
        typer.echo(f"{counted(len(found), 'task')} {are} good: {ORACLE} passes, {NOP} does not")
    return FAILED if bad else OK


def _print(job: JobDirectory, verdict: Verdict) -> None:
    say = typer.echo
    trials = ", ".join(_trial(trial) for trial in verdict.trials)
    say(f"{visible(f'{verdict.dataset}/{verdict.task}')}: {'ok' if verdict.ok else 'NOT GOOD'}: {visible(trials)}")
    for warning in verdict.warnings:
        say(f"  warning: {visible(warning)}")
    for complaint in verdict.complaints:
        say(f"  {visible(complaint.message)}")
        for line in end_of_output(job, complaint.trial):
            say(f"  {line}")


def _trial(trial: KeptTrial) -> str:
    """Format a trial, as `oracle 1 in 0.4 s`."""
    result = trial.result
    if result is None:
        return f"{trial.agent} did not run"
    rewards = trial.record.rewards if trial.record is not None else None
    if rewards is not None and len(rewards) > 1:
        came = " ".join(f"{name} {value:g}" for name, value in rewards.items())
    elif result.reward is not None:
        came = f"{result.reward:g}"
    else:
        came = result.error.type if result.error is not None else "not verified"
    return f"{trial.agent} {came} in {seconds(result.durations.total_sec)}"
