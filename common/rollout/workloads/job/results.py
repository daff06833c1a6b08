"""result.json of trials and of the job: exactly these fields in this order, because other programs read them.

What else is known of a job is in stats.json (`statistics_file`).
"""

from __future__ import annotations

import json
from datetime import UTC, datetime
from typing import Annotated

from pydantic import AwareDatetime, BaseModel, ConfigDict, Field, PlainSerializer

ZERO_TIME = datetime(1, 1, 1, tzinfo=UTC)
"""The time of a phase that was not reached, in a field that cannot be null."""


def rfc3339(moment: datetime) -> str:
    """Format a time in UTC with as many digits of a second as it has: "2026-01-02T03:04:05.678Z" (RFC 3339, section
    5.6)."""
    utc = moment.astimezone(UTC)
    fraction = f".{utc.microsecond:06d}".rstrip("0") if utc.microsecond else ""
    return f"{utc.year:04d}-{utc:%m-%dT%H:%M:%S}{fraction}Z"


Time = Annotated[AwareDatetime, PlainSerializer(rfc3339)]


class _Result(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    def to_json(self) -> bytes:
        """Encode the file."""
        return json.dumps(self.model_dump(mode="json"), indent=2, ensure_ascii=False).encode() + b"\n"


class TrialError(_Result):
    """`type` is one of `errors.ERRORS`."""

    type: str
    message: str


class Durations(_Result):
    """Durations in seconds. For a phase that was not reached they are 0, `verifier_sec` null."""

    total_sec: float = 0.0
    environment_setup_sec: float = 0.0
    agent_setup_sec: float = 0.0
    agent_execution_sec: float = 0.0
    verifier_sec: float | None = None


class Timestamps(_Result):
    started_at: Time
    environment_setup_started_at: Time = ZERO_TIME
    environment_setup_ended_at: Time = ZERO_TIME
    agent_setup_started_at: Time = ZERO_TIME
    agent_setup_ended_at: Time = ZERO_TIME
    agent_execution_started_at: Time = ZERO_TIME
    agent_execution_ended_at: Time = ZERO_TIME
    verifier_started_at: Time | None = None
    verifier_ended_at: Time | None = None
    ended_at: Time

    def durations(self) -> Durations:
        """Durations of the phases, from when they began and ended."""
        return Durations(
            total_sec=_between(self.started_at, self.ended_at),
            environment_setup_sec=_between(self.environment_setup_started_at, self.environment_setup_ended_at),
            agent_setup_sec=_between(self.agent_setup_started_at, self.agent_setup_ended_at),
            agent_execution_sec=_between(self.agent_execution_started_at, self.agent_execution_ended_at),
            verifier_sec=None
            if self.verifier_started_at is None or self.verifier_ended_at is None
            else _between(self.verifier_started_at, self.verifier_ended_at),
        )


def _between(start: datetime, end: datetime) -> float:
    return max(0.0, (end - start).total_seconds()) if start != ZERO_TIME and end != ZERO_TIME else 0.0


class TrialResult(_Result):
    """`reward` is null if the verifier did not run or left nothing valid. `rewards` are by name, as it left them.
    `cost` is in US dollars."""

    task_name: str
    dataset_name: str
    agent_name: str
    attempt: int = Field(ge=1)
    task_git_commit_id: str | None
    reward: float | None
    cost: float = Field(ge=0)
    error: TrialError | None
    durations: Durations
    timestamps: Timestamps
    rewards: dict[str, float] | None = None


class AgentSummary(_Result):
    total_trials: int
    completed_trials: int
    failed_trials: int
    pass_rate: float
    mean_reward: float
    total_cost: float


class TrialSummary(_Result):
    task_name: str
    dataset_name: str
    agent_name: str
    attempt: int
    reward: float | None


class JobResult(_Result):
    """`aggregate` says how trials are counted, and which of them count for the rate and the mean."""

    job_name: str
    cancelled: bool
    total_trials: int
    completed_trials: int
    failed_trials: int
    skipped_trials: int
    pass_rate: float
    mean_reward: float
    total_cost: float
    total_duration_sec: float
    started_at: Time
    ended_at: Time
    agents: dict[str, AgentSummary]
    results: list[TrialSummary]
