"""Directories of jobs as the job's own writer makes them, of trials that a test wants to have ended so."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

from blake3 import blake3
from job_files import START
from rollout.model.item import Outcome
from rollout.workloads.commit import CommitEntry
from rollout.workloads.job.config import JobConfig
from rollout.workloads.job.record import TrialRecord, Usage
from rollout.workloads.job.results import Timestamps, TrialError, TrialResult
from rollout.workloads.job.run_config import job_json
from rollout.workloads.job.trial import TrialSpec
from rollout.workloads.job.writer import JobWriter
from rollout.workloads.output import write_atomically

RUN_ID = "01K9ABCDEFGHJKMNPQRSTVWXYZ"


def record(
    task: str,
    agent: str = "a",
    attempt: int = 1,
    *,
    dataset: str = "d",
    reward: float | None = None,
    error: str | None = None,
    seconds: float = 10.0,
    cost: float = 0.0,
    commit: str | None = None,
    verified: bool | None = None,
    **more: Any,
) -> TrialRecord:
    """Of a trial whose agent worked for `seconds`; `verified`: the verifier began; `more`: of the record."""
    if verified is None:
        verified = reward is not None or (error or "").startswith("verifier")
    end = START + timedelta(seconds=3 + seconds)
    times = Timestamps(
        started_at=START,
        environment_setup_started_at=START,
        environment_setup_ended_at=START + timedelta(seconds=1),
        agent_setup_started_at=START + timedelta(seconds=1),
        agent_setup_ended_at=START + timedelta(seconds=2),
        agent_execution_started_at=START + timedelta(seconds=2),
        agent_execution_ended_at=START + timedelta(seconds=2 + seconds),
        verifier_started_at=end if verified else None,
        verifier_ended_at=end if verified else None,
        ended_at=end,
    )
    result = TrialResult(
        task_name=task,
        dataset_name=dataset,
        agent_name=agent,
        attempt=attempt,
        task_git_commit_id=commit,
        reward=reward,
        cost=cost,
        error=None if error is None else TrialError(type=error, message=f"{error} it was"),
        durations=times.durations(),
        timestamps=times,
    )
    rewards = None if reward is None else {"reward": reward}
    trial = blake3("/".join((dataset, task, agent, str(attempt))).encode()).hexdigest()
    return TrialRecord.model_validate({"trial": trial, "result": result, "rewards": rewards, **more})


def used(n_input: int, n_output: int, cost: float) -> Usage:
    return Usage(n_input_tokens=n_input, n_output_tokens=n_output, cost_usd=cost)


def make_job(
    path: Path,
    records: Sequence[TrialRecord],
    *,
    skipped: Sequence[str] = (),
    state: str = "completed",
    run_id: str = RUN_ID,
    files: Mapping[str, bytes] | None = None,
    **job: Any,
) -> Path:
    """`skipped`: labels of trials without a result. `state` "": the job goes on. `files`: of every trial. `job`: keys
    of job.yaml."""
    agents = dict.fromkeys(one.result.agent_name for one in records)
    wanted = {
        "name": path.name,
        "agents": [{"name": agent, "execute": "true"} for agent in agents],
        "datasets": [{"path": "d"}],
        **job,
    }
    settings = job_json(JobConfig.model_validate(wanted))
    planned = [[one.trial, _spec(one).label] for one in records] + [["00" * 32, label] for label in skipped]
    writer = JobWriter({"job": settings, "output": {"planned": planned, "job": settings, "kept": ""}})
    path.mkdir(parents=True)
    writer.open(path)
    for name in writer.files:
        (path / name).touch()
    for seq, one in enumerate(records):
        for name, line in writer.lines(_entry(seq, one)):
            with (path / name).open("ab") as file:
                file.write(line)
        directory = path / _spec(one).label
        for name, data in {"result.json": one.result.to_json(), **(files or {})}.items():
            (directory / name).parent.mkdir(parents=True, exist_ok=True)
            (directory / name).write_bytes(data)
    writer.refresh(state or "completed")
    (path / "run-id").write_text(run_id)
    if state:
        write_atomically(path / "summary.json", json.dumps({"run_id": run_id, "state": state}).encode())
    return path


def _spec(one: TrialRecord) -> TrialSpec:
    result = one.result
    return TrialSpec(
        id=one.trial,
        dataset=result.dataset_name,
        task=result.task_name,
        checksum="00" * 32,
        dialect="rollout",
        agent=result.agent_name,
        attempt=result.attempt,
    )


def _entry(seq: int, one: TrialRecord) -> CommitEntry:
    return CommitEntry(
        position=seq,
        seq=seq,
        attempt=1,
        outcome=Outcome.DONE,
        data=one.encode(),
        payload=_spec(one).encode(),
        id=bytes.fromhex(one.trial),
        worker="w1",
        tries=1,
    )
