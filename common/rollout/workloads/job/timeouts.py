"""Time limits of the phases of a trial: the smaller of base and maximum, times a multiplier.

The base is the job's override or else the task's. An override or maximum of 0 counts as none.
"""

from __future__ import annotations

from dataclasses import dataclass

from rollout.workloads.job.config import AgentSection, JobConfig
from rollout.workloads.job.task import Step, Task


@dataclass(frozen=True, slots=True)
class Timeouts:
    """Time limits in seconds; None is no limit."""

    build_s: float
    install_s: float
    agent_s: float | None
    verifier_s: float


def timeouts(job: JobConfig, agent: AgentSection, task: Task, step: Step) -> Timeouts:
    """Return the limits for `agent` on `step` of `task` in `job`."""
    general = job.timeout_multiplier
    verifier = job.verifier
    verifier_s = _at_most(verifier.override_timeout_sec or step.verifier.timeout_s, verifier.max_timeout_sec)
    install_s = agent.override_setup_timeout_sec or step.agent.install_timeout_s
    agent_s = agent.override_timeout_sec or step.agent.timeout_s or agent.max_timeout_sec
    agent_s = _at_most(agent_s, agent.max_timeout_sec) if agent_s else None
    return Timeouts(
        build_s=task.environment.build_timeout_s * (job.environment_build_timeout_multiplier or general),
        install_s=install_s * (job.agent_setup_timeout_multiplier or general),
        agent_s=None if agent_s is None else agent_s * (job.agent_timeout_multiplier or general),
        verifier_s=verifier_s * (job.verifier_timeout_multiplier or general),
    )


def _at_most(seconds: float, maximum: float | None) -> float:
    return min(seconds, maximum) if maximum else seconds
