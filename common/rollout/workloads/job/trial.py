"""The payload of a trial's item. What all trials share is in the run's configuration:

{"input": {...}, "run": {...},
"job": JobConfig as JSON, templates of variables not filled in,
"trees": {checksum: checksum of every task directory of the run},
"executors": {"infer": {...}}}       only if an agent queries engines of this cluster
"""

from __future__ import annotations

import json
from typing import Any, Self

from pydantic import Field, ValidationError

from rollout.config.section import Section
from rollout.model.errors import InputError
from rollout.workloads.job.dialect import DialectName
from rollout.workloads.json_form import canonical


class TrialSpec(Section):
    """`id` and `checksum` are in hex; `checksum` is that of the task directory, and the id of its uploaded tree.

    `agent` is the `id` of a section of `job.agents`. `regrade` is the `files` of a record (in hex) whose artifacts are
    verified in place of an agent's work. `policy` answers the agent if the trial is the environment of a policy in
    training (`rollout.workloads.train.rollouts.TrialPolicy`). `contract` is the input of the agent if the trial belongs
    to an experiment (`rollout.workloads.experiment.contracts.TrialInput.payload`). `engine` is the executor of the
    model that its agent's commands reach at an address in the sandbox. `begins_with` is an uploaded tree (its id in
    hex) with the evidence of a trial of another run, in whose workspace this one starts unless its chain has an earlier
    trial in its own run.
    """

    id: str
    dataset: str
    task: str
    checksum: str
    dialect: DialectName
    commit: str | None = None
    agent: str
    attempt: int = Field(ge=1)
    regrade: str | None = None
    policy: dict[str, Any] | None = None
    contract: dict[str, Any] | None = None
    engine: str = ""
    begins_with: str = ""

    def encode(self) -> bytes:
        return canonical(self.model_dump(mode="json", exclude_defaults=True))

    @classmethod
    def decode(cls, payload: bytes) -> Self:
        """Decode a trial. Raises InputError."""
        try:
            return cls.model_validate(json.loads(payload))
        except (ValueError, ValidationError) as error:
            raise InputError(f"not a trial: {error}") from error

    @property
    def label(self) -> str:
        """The trial's name for users, and its directory below that of the job."""
        return f"{self.dataset}/{self.task}/{self.agent}/{self.attempt}"
