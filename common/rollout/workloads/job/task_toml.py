"""The keys of task.toml, of both formats and every version up to the newest, before defaults are resolved.

Old names are accepted besides the new ones (`version`, `memory`, `storage`, `allow_internet`); if both are present and
disagree, the file is refused.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal, Self, cast

from pydantic import BeforeValidator, Field, field_validator, model_validator

from rollout.config.load import Located
from rollout.config.section import Section
from rollout.workloads.job.artifacts import MAIN_SERVICE, SERVICE, ArtifactKey
from rollout.workloads.job.dialect import DialectName, version_of
from rollout.workloads.job.names import portable_name, same_name
from rollout.workloads.job.network import NetworkKeys
from rollout.workloads.job.quantities import Cpus, Mebibytes, Size
from rollout.workloads.job.templates import check_variables

Seconds = Annotated[float, Field(gt=0, le=30 * 86400)]
Rewards = dict[str, float]


def _user(value: Any) -> Any:
    return str(value) if isinstance(value, int) and not isinstance(value, bool) else value


def _lower(value: Any) -> Any:
    return value.lower() if isinstance(value, str) else value


def _thresholds(value: Any) -> Any:
    if isinstance(value, int | float) and not isinstance(value, bool):
        return {"reward": value}
    if value is not None and not isinstance(value, dict):
        raise ValueError("must be a number, or a table of numbers such as { reward = 0.5 }")
    return value  # pyright: ignore[reportUnknownVariableType]


User = Annotated[str, Field(min_length=1), BeforeValidator(_user)]
"""A user name or number."""


class EnvKeys(Section):
    env: dict[str, str] = Field(default_factory=dict[str, str])

    @field_validator("env")
    @classmethod
    def _env(cls, value: dict[str, str]) -> dict[str, str]:
        check_variables(value)
        return value


class Author(Section):
    name: str
    email: str | None = None


class PackageKeys(Section):
    """`[task]`"""

    name: str = Field(pattern=r"^[a-zA-Z0-9][a-zA-Z0-9._-]*/[a-zA-Z0-9][a-zA-Z0-9._-]*$")
    version: str | None = Field(default=None, min_length=1)
    description: str = ""
    authors: list[Author] = Field(default_factory=list[Author])
    keywords: list[str] = Field(default_factory=list[str])


class Healthcheck(Section):
    """Like Docker's HEALTHCHECK: the sandbox is ready once `command` exits with 0."""

    command: str = Field(min_length=1)
    interval_sec: Seconds = 5.0
    timeout_sec: Seconds = 30.0
    start_period_sec: float = Field(default=0.0, ge=0, le=86400)
    start_interval_sec: Seconds = 5.0
    retries: int = Field(default=3, ge=1, le=10_000)


class Tpu(Section):
    type: str = Field(min_length=1)
    topology: str = Field(pattern=r"^[1-9]\d*(x[1-9]\d*)+$")


class McpServer(Section):
    name: str = Field(min_length=1)
    transport: Literal["stdio", "sse", "streamable-http"] = "sse"
    url: str | None = None
    command: str | None = None
    args: list[str] = Field(default_factory=list[str])
    headers: dict[str, str] = Field(default_factory=dict[str, str])

    @field_validator("transport", mode="before")
    @classmethod
    def _short_name(cls, value: Any) -> Any:
        return "streamable-http" if value == "http" else value

    @model_validator(mode="after")
    def _reachable(self) -> Self:
        if self.transport == "stdio" and (not self.command or self.headers):
            raise ValueError('transport "stdio" needs a command, and takes no headers')
        if self.transport != "stdio" and not self.url:
            raise ValueError(f'transport "{self.transport}" needs a url')
        return self


class EnvironmentKeys(NetworkKeys, EnvKeys):
    build_timeout_sec: Seconds = 600.0
    docker_image: str | None = Field(default=None, min_length=1)
    os: Annotated[Literal["linux", "windows"], BeforeValidator(_lower)] = "linux"
    cpus: Cpus | None = None
    memory_mb: Mebibytes | None = None
    storage_mb: Mebibytes | None = None
    memory: Size | None = None
    storage: Size | None = None
    gpus: int | None = Field(default=None, ge=0, le=1024)
    gpu_types: list[str] | None = None
    tpu: Tpu | None = None
    allow_internet: bool | None = None
    mcp_servers: list[McpServer] = Field(default_factory=list[McpServer])
    skills_dir: str | None = Field(default=None, min_length=1)
    workdir: str | None = Field(default=None, pattern=r"^/")
    healthcheck: Healthcheck | None = None

    @model_validator(mode="after")
    def _old_names(self) -> Self:
        faults = list[str]()
        pairs = (("memory", self.memory, self.memory_mb), ("storage", self.storage, self.storage_mb))
        for name, old, new in pairs:
            if old is not None and new is not None and old != new:
                faults.append(f"{name} ({old} MiB) and {name}_mb ({new} MiB) disagree: keep {name}_mb")
        public = {"public": True, "no-network": False}.get(self.network_mode or "")
        if self.allow_internet is not None and self.network_mode is not None and public != self.allow_internet:
            shown = str(self.allow_internet).lower()
            faults.append(
                f'allow_internet = {shown} and network_mode = "{self.network_mode}" disagree: keep network_mode'
            )
        if faults:
            raise ValueError("; ".join(faults))
        return self


class AgentKeys(NetworkKeys):
    timeout_sec: Seconds | None = None
    install_timeout_sec: Seconds | None = None
    user: User | None = None


class CollectKeys(Section):
    """`[[verifier.collect]]`: run after the agent, before artifacts are collected."""

    command: str = Field(min_length=1)
    service: str = Field(default=MAIN_SERVICE, pattern=SERVICE)
    timeout_sec: Seconds = 60.0
    user: User | None = None


class VerifierKeys(NetworkKeys, EnvKeys):
    """`keep_processes` is None for the format's default."""

    timeout_sec: Seconds = 600.0
    user: User | None = None
    keep_processes: bool | None = None
    environment_mode: Literal["shared", "separate"] | None = None
    environment: EnvironmentKeys | None = None
    collect: list[CollectKeys] = Field(default_factory=list[CollectKeys])

    @model_validator(mode="after")
    def _one_place(self) -> Self:
        if self.environment_mode == "shared" and self.environment is not None:
            raise ValueError(
                'environment_mode = "shared" and an environment of its own disagree: leave one of them out'
            )
        return self


class StepKeys(Section):
    name: str
    agent: AgentKeys = AgentKeys()
    verifier: VerifierKeys = VerifierKeys()
    min_reward: Annotated[Rewards, BeforeValidator(_thresholds)] | None = None
    healthcheck: Healthcheck | None = None
    artifacts: list[ArtifactKey] = Field(default_factory=list[ArtifactKey])

    @field_validator("name")
    @classmethod
    def _portable(cls, value: str) -> str:
        return portable_name(value)


class SolutionKeys(EnvKeys):
    """`[solution]`"""


class TaskToml(Section):
    schema_version: str | None = None
    version: str | None = None
    dialect: DialectName | None = None
    source: str | None = None
    task: PackageKeys | None = None
    metadata: dict[str, Any] = Field(default_factory=dict[str, Any])
    verifier: VerifierKeys = VerifierKeys()
    agent: AgentKeys = AgentKeys()
    environment: EnvironmentKeys = EnvironmentKeys()
    solution: SolutionKeys = SolutionKeys()
    multi_step_reward_strategy: Literal["mean", "final"] | None = None
    steps: list[StepKeys] = Field(default_factory=list[StepKeys])
    artifacts: list[ArtifactKey] = Field(default_factory=list[ArtifactKey])

    @field_validator("version", "schema_version")
    @classmethod
    def _version(cls, value: str | None) -> str | None:
        if value is not None:
            version_of(None, value)
        return value

    @classmethod
    def prepare(cls, source: Located) -> list[str]:
        """Prepare a file for `rollout.config.load`."""
        return list(_across(source))


def _across(source: Located) -> Iterator[str]:
    """Yield faults that concern several keys. They are found in the raw file, so that they appear next to other
    faults."""
    versions = source.values.get("version"), source.values.get("schema_version")
    if all(isinstance(version, str) for version in versions) and versions[0] != versions[1]:
        yield (
            f'{source.where(("version",))}: version "{versions[0]}" and schema_version "{versions[1]}" disagree: keep '
            "schema_version"
        )
    steps = source.values.get("steps")
    seen: dict[str, str] = {}
    for index, step in enumerate(cast("list[Any]", steps) if isinstance(steps, list) else []):
        name = cast("dict[str, Any]", step).get("name") if isinstance(step, dict) else None
        if not isinstance(name, str):
            continue
        if (first := seen.get(same_name(name))) is not None:
            where = source.where(("steps", index, "name"))
            yield (f'{where}: steps.{index}.name: "{first}" and "{name}" are one name to file systems: rename one')
        seen.setdefault(same_name(name), name)
