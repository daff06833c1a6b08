"""The input of a trial: its task, agent and settings, and where it may work. It does not change while the trial
runs."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from rollout.workloads.job.config import AgentSection, JobConfig
from rollout.workloads.job.task import Step, Task
from rollout.workloads.job.templates import fill_in, variables
from rollout.workloads.job.timeouts import Timeouts, timeouts
from rollout.workloads.job.trial import TrialSpec

from rollout_worker.sandboxes.port import Provider
from rollout_worker.trials.agents.policy_engine import PolicyEngine
from rollout_worker.trials.contracted import Contracted
from rollout_worker.trials.environment import Images
from rollout_worker.trials.lanes import Lanes
from rollout_worker.trials.masking import Masks, secrets_of
from rollout_worker.trials.port import Reply, UsageCount
from rollout_worker.trials.streams import Live


class Engine(Protocol):
    """Generations by the engines of this cluster for one trial, counted as it was told."""

    async def ask(self, messages: Sequence[Mapping[str, Any]], **sampling: Any) -> Reply: ...


@dataclass(frozen=True, slots=True)
class Environs:
    """Variables of each part, filled in. `hidden` are values that were filled in or are secret by name."""

    sandbox: Mapping[str, str]
    agent: Mapping[str, str]
    solution: Mapping[str, str]
    verifiers: Sequence[Mapping[str, str]]  # by step
    verifier_sandboxes: Sequence[Mapping[str, str]]  # by step, of separate ones
    hidden: frozenset[str]


def environs(
    job: JobConfig, section: AgentSection, task: Task, environ: Mapping[str, str], *, agent_works: bool = True
) -> Environs:
    """Fill in all variables. Raises ValueError with every variable that this process lacks. If `agent_works` is False,
    only verifiers run."""
    verified = not job.verifier.disable
    of_job = job.environment.env
    templates: dict[str, Mapping[str, str]] = {
        "sandbox": {**task.environment.env, **of_job},
        "agent": section.env if agent_works else {},
        "solution": task.solution_env if agent_works else {},
    }
    for index, step in enumerate(task.steps):
        own = step.verifier.environment
        templates[f"verifier {index}"] = {**step.verifier.env, **job.verifier.env} if verified else {}
        templates[f"separate {index}"] = {**own.env, **of_job} if verified and own is not None else {}
    filled, lacking = dict[str, dict[str, str]](), list[str]()
    for name, env in templates.items():
        try:
            filled[name] = fill_in(env, environ)
        except ValueError as error:
            lacking.append(str(error))
    if lacking:
        raise ValueError("; ".join(dict.fromkeys(lacking)))
    hidden = [secret for env in filled.values() for secret in secrets_of(env)]
    named = {name for env in templates.values() for name in variables(env)}
    steps = range(len(task.steps))
    return Environs(
        sandbox=filled["sandbox"],
        agent=filled["agent"],
        solution=filled["solution"],
        verifiers=[filled[f"verifier {index}"] for index in steps],
        verifier_sandboxes=[filled[f"separate {index}"] for index in steps],
        hidden=frozenset([*hidden, *(environ[name] for name in named if environ.get(name))]),
    )


@dataclass(frozen=True, slots=True)
class Told:
    """`files` is a directory for everything large, with the layout of the trial's directory. `regrade` is the directory
    of artifacts of an earlier trial. `policy` answers if a policy is in training. `is_last_try` means that no further
    try follows an error. `tree` returns a directory of this host for an uploaded tree's id in hex. `contract` belongs
    to an experiment's trial."""

    spec: TrialSpec
    job: JobConfig
    section: AgentSection
    task: Task
    provider: Provider
    environs: Environs
    files: Path
    masks: Masks
    live: Live
    images: Images
    lanes: Lanes
    engine: Callable[[UsageCount], Engine]
    policy: PolicyEngine | None
    progress: Callable[[str], None]
    tree: Callable[[str], Awaitable[Path]]
    is_last_try: bool = True
    regrade: Path | None = None
    contract: Contracted | None = None

    def timeouts(self, step: Step) -> Timeouts:
        return timeouts(self.job, self.section, self.task, step)

    def directory(self, step: Step, name: str) -> Path:
        """Return `name` below the trial's files, or below those of the step if there are several."""
        return self.files / "steps" / step.name / name if self.task.has_steps else self.files / name
