"""A task as the rest of the program sees it: one model for both formats, complete, with all defaults resolved."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from rollout.config.section import Section
from rollout.workloads.job.artifacts import Artifact
from rollout.workloads.job.dialect import DIALECTS, Dialect, DialectName
from rollout.workloads.job.network import NetworkPolicy
from rollout.workloads.job.task_toml import (
    CollectKeys,
    EnvironmentKeys,
    Healthcheck,
    McpServer,
    Rewards,
    StepKeys,
    TaskToml,
    Tpu,
    VerifierKeys,
)

ENVIRONMENT = "environment"
TESTS = "tests"
BUILD_FILE = "Dockerfile"
"""The file from which a sandbox is built."""
VerifierMode = Literal["shared", "separate"]


class Environment(Section):
    """A sandbox to create. Values of `env` are templates (`templates.fill_in`). None means the provider's default.

    It starts from `docker_image`, or is built in the directory `build`, relative to the task's: one of them is None.
    """

    docker_image: str | None
    build: str | None
    build_timeout_s: float
    os: Literal["linux", "windows"]
    cpus: float | None
    memory_mb: int | None
    storage_mb: int | None
    gpus: int
    gpu_types: tuple[str, ...]
    tpu: Tpu | None
    network: NetworkPolicy
    env: dict[str, str]
    mcp_servers: tuple[McpServer, ...]
    skills_dir: str | None
    workdir: str | None
    healthcheck: Healthcheck | None


class AgentPhase(Section):
    """`timeout_s` is None for no limit. `network` applies while the agent works, and may differ from the
    environment's."""

    timeout_s: float | None
    install_timeout_s: float
    user: str | None
    network: NetworkPolicy


class VerifierPhase(Section):
    """`environment` is the verifier's own sandbox in mode "separate", None if it runs in the agent's.
    `keeps_processes`: processes that the agent left keep running meanwhile."""

    timeout_s: float
    env: dict[str, str]
    user: str | None
    network: NetworkPolicy
    mode: VerifierMode
    environment: Environment | None
    collect: tuple[CollectKeys, ...]
    keeps_processes: bool


class Step(Section):
    """One instruction and its verification. The step of a task without steps has the name "".

    The paths are relative to the task's directory; `solution` is None if there is none. `min_reward`: a step whose
    rewards miss one of these ends the trial.
    """

    name: str
    instruction: str
    tests: tuple[str, ...]
    solution: str | None
    agent: AgentPhase
    verifier: VerifierPhase
    min_reward: Rewards
    healthcheck: Healthcheck | None
    artifacts: tuple[Artifact, ...]


class Task(Section):
    """`name` is that of the directory, unique in its dataset; `package` is the `org/name` of [task]. `checksum` is the
    content id, in hex, of the directory; `git_commit_id` is the commit it was read at, if it was in a repository."""

    name: str
    directory: Path
    package: str | None
    schema_version: str
    dialect_name: DialectName
    source: str | None
    metadata: dict[str, Any]
    environment: Environment
    steps: tuple[Step, ...] = Field(min_length=1)
    reward_strategy: Literal["mean", "final"]
    solution_env: dict[str, str]
    checksum: str = ""
    git_commit_id: str | None = None

    @property
    def dialect(self) -> Dialect:
        return DIALECTS[self.dialect_name]

    @property
    def has_steps(self) -> bool:
        return self.steps[0].name != ""


def resolve(
    keys: TaskToml, *, name: str, directory: Path, version: str, dialect: Dialect, solution: str | None
) -> Task:
    """Apply the defaults of `dialect` to `keys`. `solution` is the directory of the reference solution, if there is
    one."""
    environment = _environment(keys.environment, dialect)
    if keys.steps:
        steps = tuple(_step(keys, step, environment, dialect, directory) for step in keys.steps)
    else:
        steps = (
            Step(
                name="",
                instruction="instruction.md",
                tests=(TESTS,),
                solution=solution,
                agent=_agent(keys, None, environment.network, dialect),
                verifier=_verifier(keys, None, environment, dialect, directory),
                min_reward={},
                healthcheck=None,
                artifacts=tuple(keys.artifacts),
            ),
        )
    return Task(
        name=name,
        directory=directory,
        package=keys.task.name if keys.task else None,
        schema_version=version,
        dialect_name=dialect.name,
        source=keys.source,
        metadata=_plain(keys.metadata),
        environment=environment,
        steps=steps,
        reward_strategy=keys.multi_step_reward_strategy or "mean",
        solution_env=keys.solution.env,
    )


def _environment(keys: EnvironmentKeys, dialect: Dialect) -> Environment:
    internet = {None: "public", True: "public", False: "no-network"}[keys.allow_internet]
    return Environment(
        docker_image=keys.docker_image,
        build=None if keys.docker_image else ENVIRONMENT,
        build_timeout_s=keys.build_timeout_sec,
        os=keys.os,
        cpus=keys.cpus if keys.cpus is not None else dialect.cpus,
        memory_mb=_first(keys.memory_mb, keys.memory, dialect.memory_mb),
        storage_mb=_first(keys.storage_mb, keys.storage, dialect.storage_mb),
        gpus=keys.gpus or 0,
        gpu_types=tuple(keys.gpu_types or ()),
        tpu=keys.tpu,
        network=keys.policy or NetworkPolicy.model_validate({"mode": internet}),
        env=keys.env,
        mcp_servers=tuple(keys.mcp_servers),
        skills_dir=keys.skills_dir,
        workdir=keys.workdir,
        healthcheck=keys.healthcheck,
    )


def _first(*values: int | None) -> int | None:
    return next((value for value in values if value is not None), None)


def _agent(keys: TaskToml, step: StepKeys | None, network: NetworkPolicy, dialect: Dialect) -> AgentPhase:
    """Return the agent's phase of a step, or of the task if `step` is None; a step inherits the task's values."""
    own = step.agent if step else keys.agent
    timeout = own.timeout_sec if own.timeout_sec is not None else keys.agent.timeout_sec
    return AgentPhase(
        timeout_s=timeout if timeout is not None else dialect.agent_timeout_s,
        install_timeout_s=keys.agent.install_timeout_sec or dialect.install_timeout_s,
        user=own.user or keys.agent.user,
        network=own.policy or keys.agent.policy or network,
    )


def _verifier(
    keys: TaskToml, step: StepKeys | None, environment: Environment, dialect: Dialect, directory: Path
) -> VerifierPhase:
    own = step.verifier if step else keys.verifier
    mode = _mode(own) or _mode(keys.verifier) or "shared"
    sandbox = _verifier_environment(keys, step, environment, dialect, directory) if mode == "separate" else None
    timeout = own.timeout_sec if "timeout_sec" in own.model_fields_set else keys.verifier.timeout_sec
    keeps = own.keep_processes if own.keep_processes is not None else keys.verifier.keep_processes
    return VerifierPhase(
        timeout_s=timeout,
        env={**keys.verifier.env, **own.env},
        user=own.user or keys.verifier.user,
        network=own.policy or keys.verifier.policy or (sandbox or environment).network,
        mode=mode,
        environment=sandbox,
        collect=tuple(own.collect or keys.verifier.collect),
        keeps_processes=dialect.keeps_processes if keeps is None else keeps,
    )


def _verifier_environment(
    keys: TaskToml, step: StepKeys | None, environment: Environment, dialect: Dialect, directory: Path
) -> Environment:
    """Return the verifier's environment: the step's, else the task's, else the agent's. A named image, or one built
    next to the tests, takes precedence over the agent's own."""
    levels = [(keys.verifier, TESTS)]
    if step:
        levels.insert(0, (step.verifier, f"steps/{step.name}/{TESTS}"))
    own = next((level.environment for level, _ in levels if level.environment), None)
    sandbox = _environment(own, dialect) if own else environment
    for level, tests in levels:
        if level.environment and level.environment.docker_image:
            return sandbox.model_copy(update={"docker_image": level.environment.docker_image, "build": None})
        if (directory / tests / BUILD_FILE).is_file():
            return sandbox.model_copy(update={"docker_image": None, "build": tests})
    return sandbox.model_copy(update={"docker_image": environment.docker_image, "build": environment.build})


def _mode(keys: VerifierKeys) -> VerifierMode | None:
    return keys.environment_mode or ("separate" if keys.environment else None)


def _step(keys: TaskToml, step: StepKeys, environment: Environment, dialect: Dialect, directory: Path) -> Step:
    """Return a step. The task's tests are copied first and the step's over them, where each exists."""
    at = f"steps/{step.name}"
    tests = tuple(path for path in (TESTS, f"{at}/{TESTS}") if (directory / path).is_dir())
    solution = f"{at}/solution"
    return Step(
        name=step.name,
        instruction=f"{at}/instruction.md",
        tests=tests or (f"{at}/{TESTS}",),
        solution=solution if (directory / solution).is_dir() else None,
        agent=_agent(keys, step, environment.network, dialect),
        verifier=_verifier(keys, step, environment, dialect, directory),
        min_reward=step.min_reward or {},
        healthcheck=step.healthcheck,
        artifacts=(*keys.artifacts, *step.artifacts),
    )


def _plain(value: Any) -> Any:
    """Convert to JSON: TOML's dates and times become text."""
    if isinstance(value, dict):
        return {str(key): _plain(one) for key, one in value.items()}  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType]
    if isinstance(value, list):
        return [_plain(one) for one in value]  # pyright: ignore[reportUnknownVariableType]
    return value if isinstance(value, str | int | float | bool) or value is None else str(value)
