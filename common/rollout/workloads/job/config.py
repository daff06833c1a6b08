"""job.yaml: every key of the format, with Harbor's names as aliases (docs/job.md lists them)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from importlib.metadata import entry_points
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self, cast

from pydantic import AfterValidator, Field, field_validator, model_validator

from rollout.config.cloud import WithCloud
from rollout.config.declared import Setting
from rollout.config.load import YAML, Located
from rollout.config.locate import Place
from rollout.config.section import Section
from rollout.config.written import Flag, Text
from rollout.workloads.job.agent_kinds import (
    ENGINE,
    KINDS,
    ORACLE,
    SHELL_LOOP,
    kind_of,
    kwargs_faults,
    unknown_agent,
)
from rollout.workloads.job.artifacts import ArtifactKey
from rollout.workloads.job.dialect import DialectName
from rollout.workloads.job.engine import EngineSection
from rollout.workloads.job.errors import ERRORS, HARBOR_NAMES, PolicyOverride, types_of
from rollout.workloads.job.git import checked_url
from rollout.workloads.job.harbor_keys import rename
from rollout.workloads.job.names import portable_name, same_name
from rollout.workloads.job.network import allowed_hosts
from rollout.workloads.job.quantities import Cpus, Mebibytes, mebibytes
from rollout.workloads.job.task_toml import Tpu
from rollout.workloads.job.templates import check_variables

HARBOR_REGISTRY = "https://raw.githubusercontent.com/laude-institute/harbor/main/registry.json"
SANDBOXES = "rollout.sandboxes"
"""Entry point group of sandbox providers."""
PROVIDERS = ("process", "bubblewrap", "docker", "podman", "kubernetes", "modal", "command")
"""Built-in ones."""
_PROVIDER_ALIASES = {"k8s": "kubernetes", "bwrap": "bubblewrap"}
_IMPORT_PATH = r"^[A-Za-z_][\w.]*:[A-Za-z_][\w.]*$"
Timeout = Annotated[float, Field(ge=0, le=30 * 86400)]
"""A time limit in seconds; 0 becomes None, no limit."""
Multiplier = Annotated[float, Field(gt=0, le=1000)]


def _size_text(value: str) -> str:
    mebibytes(value)
    return value


SizeText = Annotated[Text, AfterValidator(_size_text)]
"""Memory or storage with its unit, as written."""
EnvVariables = dict[str, Text]


def _env_of_list(items: list[Any]) -> dict[str, str]:
    """Parse `- NAME=value` as in Harbor's and Docker's files; `- NAME` takes the value from the environment."""
    values: dict[str, str] = {}
    for item in items:
        if not isinstance(item, str) or not item.partition("=")[0]:
            raise ValueError(f'must hold items such as "NAME=value", not {item!r:.60}')
        name, given, value = item.partition("=")
        if name in values:
            raise ValueError(f"has {name} twice")
        values[name] = value if given else f"${{{name}}}"
    return values


def _check_env(value: dict[str, str]) -> dict[str, str]:
    check_variables(value)
    return value


class Env(Section):
    env: EnvVariables = Field(
        default_factory=dict[str, Text],
        description="Environment variables, by name or listed as NAME=value; ${VAR} and ${VAR:-default} are expanded.",
    )

    @field_validator("env", mode="before")
    @classmethod
    def _listed(cls, value: Any) -> Any:
        return _env_of_list(cast("list[Any]", value)) if isinstance(value, list) else value

    @field_validator("env")
    @classmethod
    def _env(cls, value: dict[str, str]) -> dict[str, str]:
        return _check_env(value)


class RetrySection(Section):
    max_attempts: int = Field(default=3, ge=1, le=100, description="Attempts at a trial, including the first.")
    initial_delay_ms: int = Field(default=1000, ge=0, le=3_600_000, description="Before the second try.")
    max_delay_ms: int = Field(default=30_000, ge=0, le=86_400_000, description="At most between two tries.")
    multiplier: float = Field(default=2.0, ge=1, le=100, description="Of the delay, from one try to the next.")
    include: list[str] = Field(
        default_factory=list[str], description="Error types that are tried again, and no others; empty: the table's."
    )
    exclude: list[str] = Field(default_factory=list[str], description="Error types that are never tried again.")

    @field_validator("include", "exclude")
    @classmethod
    def _types(cls, value: list[str]) -> list[str]:
        return list(dict.fromkeys(found for name in value for found in _error_types(name)))


def _error_types(name: str) -> tuple[str, ...]:
    try:
        return types_of(name)
    except KeyError:
        near = get_close_matches(name, [*ERRORS, *HARBOR_NAMES], n=1)
        hint = f'did you mean "{near[0]}"?' if near else "see the table in docs/job.md"
        raise ValueError(f'"{name[:60]}" is no type of error; {hint}') from None


def provider_name(value: str, aliases: Mapping[str, str]) -> str:
    """Return the sandbox provider with that name or alias: built in, installed, or module:Class. Raises ValueError."""
    name = aliases.get(value, value)
    if name in PROVIDERS or ":" in name:
        return name
    known = list(dict.fromkeys((*PROVIDERS, *sorted(entry_points(group=SANDBOXES).names))))
    if name in known:
        return name
    near = get_close_matches(value, [*known, *aliases], n=1)
    hint = f'did you mean "{near[0]}"?' if near else f"known are {', '.join(known)}, and module:Class"
    raise ValueError(f'there is no provider "{value[:40]}"; {hint}')


class EnvironmentSection(Env):
    type: Annotated[str, Setting("--provider", "TYPE")] = Field(
        default="docker", description="Provider of sandboxes, or module:Class of one of your own."
    )
    force_build: Flag = Field(default=False, description="Build images although they are there.")
    preserve_env: Literal["never", "always", "on_failure"] = Field(
        default="never", description="Which sandboxes stay after their trial."
    )
    provider_config: dict[str, Any] = Field(
        default_factory=dict[str, Any], description="Settings of the provider; see its documentation."
    )
    override_cpus: Cpus | None = Field(default=None, description="Instead of the task's cpus.")
    override_memory: SizeText | None = Field(default=None, description='Instead of the task\'s memory, such as "4G".')
    override_storage: SizeText | None = Field(
        default=None, description='Instead of the task\'s storage, such as "20G".'
    )
    override_memory_mb: Mebibytes | None = Field(default=None, description="As override_memory, in MiB.")
    override_storage_mb: Mebibytes | None = Field(default=None, description="As override_storage, in MiB.")
    override_gpus: int | None = Field(default=None, ge=0, le=1024, description="Instead of the task's gpus.")
    override_tpu: Tpu | None = Field(default=None, description="Instead of the task's tpu.")
    cpu_enforcement_policy: Literal["auto", "limit", "request", "guarantee", "ignore"] = Field(
        default="auto", description="What the provider makes of cpus."
    )
    memory_enforcement_policy: Literal["auto", "limit", "request", "guarantee", "ignore"] = Field(
        default="auto", description="What the provider makes of memory."
    )
    network_mode: Literal["host"] | None = Field(
        default=None,
        description='"host": sandboxes of tasks whose network is public share that of the worker, its loopback and all '
        "that listens there included. Default: each has one of its own.",
    )
    mounts: list[dict[str, Any]] = Field(
        default_factory=list[dict[str, Any]],
        description="More mounts of the agent's sandbox, as Docker Compose has them.",
    )
    extra_allowed_hosts: list[str] = Field(
        default_factory=list[str], description="Hosts that every sandbox may reach beside those of its task."
    )

    @field_validator("type")
    @classmethod
    def _provider(cls, value: str) -> str:
        return provider_name(value, _PROVIDER_ALIASES)

    @field_validator("extra_allowed_hosts")
    @classmethod
    def _hosts(cls, value: list[str]) -> list[str]:
        return allowed_hosts(value)

    @model_validator(mode="after")
    def _one_size(self) -> Self:
        pairs = (
            ("memory", self.override_memory, self.override_memory_mb),
            ("storage", self.override_storage, self.override_storage_mb),
        )
        faults = [
            f"override_{name} and override_{name}_mb disagree: keep one"
            for name, text, number in pairs
            if text is not None and number is not None and mebibytes(text) != number
        ]
        if faults:
            raise ValueError("; ".join(faults))
        return self

    @property
    def memory_mb(self) -> int | None:
        return self.override_memory_mb if self.override_memory is None else mebibytes(self.override_memory)

    @property
    def storage_mb(self) -> int | None:
        return self.override_storage_mb if self.override_storage is None else mebibytes(self.override_storage)


class VerifierSection(Env):
    override_timeout_sec: Timeout | None = Field(default=None, description="Instead of the task's.")
    max_timeout_sec: Timeout | None = Field(default=None, description="At most, whatever the task says.")
    disable: Flag = Field(default=False, description="Verify nothing: trials have no reward.")


class MetricSection(Section):
    type: Literal["sum", "min", "max", "mean", "custom", "uv-script"] = Field(
        default="mean", description="Of the rewards of an agent in a dataset."
    )
    name: str | None = Field(default=None, min_length=1, description="In the results; default: the type.")
    function: str | None = Field(
        default=None, pattern=_IMPORT_PATH, description="For custom: module:function that takes the list of rewards."
    )
    kwargs: dict[str, Any] = Field(default_factory=dict[str, Any], description="For uv-script: script_path.")

    @model_validator(mode="after")
    def _complete(self) -> Self:
        if (self.type == "custom") != (self.function is not None):
            raise ValueError('type: custom and function: "module:function" go together')
        if self.type == "uv-script" and not isinstance(self.kwargs.get("script_path"), str):
            raise ValueError("type: uv-script needs kwargs: {script_path: FILE}")
        return self


class AgentSection(Env):
    name: str = Field(
        default=ORACLE, min_length=1, description="oracle runs the task's solution, nop does nothing; others are yours."
    )
    label: str | None = Field(
        default=None, description="In results and directories; default: the name. Two agents need two labels."
    )
    description: str = Field(default="", description="Information for readers.")
    install: str = Field(default="", description="bash, run once in every sandbox before the agent.")
    execute: str = Field(default="", description="bash, which does the task.")
    import_path: str | None = Field(
        default=None, pattern=_IMPORT_PATH, description="module:Class of an agent of your own."
    )
    model_name: str | None = Field(default=None, min_length=1, description="Model that the agent asks.")
    base_url: str | None = Field(default=None, min_length=1, description="Endpoint of that model.")
    n_concurrent: int | None = Field(default=None, ge=1, description="Trials of this agent at once, at most.")
    concurrency_group: str | None = Field(
        default=None, min_length=1, description="Agents of one group share their n_concurrent."
    )
    override_timeout_sec: Timeout | None = Field(default=None, description="Instead of the task's.")
    override_setup_timeout_sec: Timeout | None = Field(default=None, description="Instead of the task's, of install.")
    max_timeout_sec: Timeout | None = Field(default=None, description="At most, whatever the task says.")
    skills: list[str] = Field(default_factory=list[str], description="Directories given to the agent.")
    kwargs: dict[str, Any] = Field(default_factory=dict[str, Any], description="Arguments of the agent's class.")

    @model_validator(mode="before")
    @classmethod
    def _named(cls, data: Any) -> Any:
        """Name an imported agent after its class, unless it has a name."""
        if isinstance(data, dict) and "name" not in data and isinstance(cast("Any", data).get("import_path"), str):
            values = cast("dict[str, Any]", data)
            return {**values, "name": _class_name(values["import_path"])}
        return data  # pyright: ignore[reportUnknownVariableType]

    @field_validator("name", "label")
    @classmethod
    def _directory(cls, value: str | None) -> str | None:
        return None if value is None else portable_name(value)

    @model_validator(mode="after")
    def _one_way(self) -> Self:
        kind = KINDS.get(self.name)
        if kind is not None and kind.reserved and (self.execute or self.install or self.import_path):
            raise ValueError(f'"{self.name}" is built in and takes no install, execute or import_path: rename yours')
        if self.execute and self.import_path:
            raise ValueError("execute and import_path are two ways to run an agent: keep one")
        if self.install and not self.execute:
            raise ValueError("install goes with execute: an agent of another kind installs itself")
        if not self.execute and not self.import_path and (fault := unknown_agent(self.name)):
            raise ValueError(fault)
        if self.concurrency_group is not None and self.n_concurrent is None:
            raise ValueError("concurrency_group needs n_concurrent")
        return self

    @property
    def id(self) -> str:
        """Identifies it in results and directories."""
        return self.label or self.name

    @property
    def own(self) -> bool:
        """Whether the job defines the agent itself, by bash or a class, so that its name is only a name."""
        return bool(self.execute or self.import_path)

    @property
    def lane(self) -> str:
        """Trials of one lane share one limit."""
        return self.id if self.concurrency_group is None else f"group:{self.concurrency_group}"


class RegistryKeys(Section):
    path: str | None = Field(default=None, min_length=1, description="registry.json on this machine.")
    url: str | None = Field(default=None, pattern=r"^https?://", description="registry.json on the web.")

    @model_validator(mode="after")
    def _one(self) -> Self:
        if (self.path is None) == (self.url is None):
            raise ValueError("name either a path or a url")
        return self


class DatasetSection(Section):
    path: str | None = Field(
        default=None, min_length=1, description="Directory of task directories, or bundled:rollout or bundled:harbor."
    )
    registry: RegistryKeys | None = Field(default=None, description="Where name and version are looked up.")
    name: str | None = Field(default=None, min_length=1, description="In the registry; with path: in the results.")
    version: Text | None = Field(default=None, min_length=1, description="In the registry; default: the newest.")
    git_url: str | None = Field(default=None, description="Repository in which path lies.")
    git_commit_id: Text | None = Field(default=None, min_length=1, description="Commit, tag or branch of git_url.")
    task_names: list[Text] = Field(default_factory=list[Text], description="Globs of the tasks to take; empty: all.")
    exclude_task_names: list[Text] = Field(default_factory=list[Text], description="Globs of tasks to leave out.")
    n_tasks: int | None = Field(default=None, ge=1, description="The first so many of them.")
    dialect: DialectName | None = Field(
        default=None, description="Format of its tasks, where it is not the one that their version decides."
    )

    @field_validator("git_url")
    @classmethod
    def _url(cls, value: str | None) -> str | None:
        return None if value is None else checked_url(value)

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        if self.path is None and self.registry is None and self.git_url is None and self.name is not None:
            raise ValueError(
                f'name needs a registry in which "{self.name}" is looked up; that of Harbor is registry: {{url: '
                f"{HARBOR_REGISTRY}}}"
            )
        if self.path is None and self.registry is None and self.git_url is None:
            raise ValueError("name a path, a registry with a name, or a git_url")
        if self.registry is not None and (self.path is not None or self.git_url is not None):
            raise ValueError("registry does not go with path or git_url: make two datasets of them")
        if self.registry is not None and self.name is None:
            raise ValueError("registry needs the name of a dataset")
        if self.git_commit_id is not None and self.git_url is None:
            raise ValueError("git_commit_id needs git_url")
        if self.version is not None and self.git_url is not None:
            raise ValueError("version does not go with git_url: name its git_commit_id")
        return self


class TaskSection(Section):
    """`tasks` are single ones in addition to those of datasets; they form a dataset called "adhoc"."""

    path: str = Field(min_length=1, description="Task directory, in git_url where that is set.")
    git_url: str | None = Field(default=None, description="Repository in which path lies.")
    git_commit_id: Text | None = Field(default=None, min_length=1, description="Commit, tag or branch of git_url.")
    dialect: DialectName | None = Field(
        default=None, description="Its format, where it is not the one that its version decides."
    )

    @field_validator("git_url")
    @classmethod
    def _url(cls, value: str | None) -> str | None:
        return None if value is None else checked_url(value)


class BudgetSection(Section):
    """When one of these is used up, no further trial starts."""

    max_tokens: int | None = Field(default=None, ge=1, description="Tokens of all trials.")
    max_cost_usd: float | None = Field(default=None, gt=0, description="Cost of all trials, in US dollars.")
    max_wall_time_sec: float | None = Field(default=None, gt=0, description="Since the job began.")


class InfrastructureSection(Section):
    min_success_rate: float = Field(
        default=0.5,
        ge=0,
        le=1,
        description="The job stops when fewer of its trials end without such a fault; 0: never.",
    )
    after_trials: int = Field(default=20, ge=1, description="Trials before that is looked at.")


class JobConfig(WithCloud):
    in_yaml: ClassVar[bool] = True

    name: Annotated[str | None, Setting("--name")] = Field(
        default=None,
        description="Name of the job and its directory; default: the file's.",
    )
    schema_version: Literal[1] = Field(default=1, description="Of Harbor's job files.")
    jobs_dir: Annotated[str, Setting("--jobs-dir", "DIR")] = Field(
        default="jobs", min_length=1, description="Directory of all jobs."
    )
    n_attempts: Annotated[int, Setting("--attempts")] = Field(
        default=1, ge=1, le=10_000, description="Trials of every agent at every task."
    )
    n_concurrent_trials: Annotated[int, Setting("--concurrent")] = Field(
        default=4, ge=1, le=1_000_000, description="Maximum concurrent trials."
    )
    timeout_multiplier: Multiplier = Field(default=1.0, description="Of every timeout of tasks and agents.")
    agent_timeout_multiplier: Multiplier | None = Field(default=None, description="Instead, while the agent works.")
    verifier_timeout_multiplier: Multiplier | None = Field(default=None, description="Instead, for verification.")
    agent_setup_timeout_multiplier: Multiplier | None = Field(default=None, description="Instead, for install.")
    environment_build_timeout_multiplier: Multiplier | None = Field(default=None, description="Instead, for builds.")
    retry: RetrySection = RetrySection()
    log_level: Literal["debug", "info", "warn", "warning", "error"] = Field(default="info", description="Of logs.")
    instruction_path: str = Field(
        default="/tmp/instruction.md", pattern=r"^/", description="Where the instruction lies in the sandbox."
    )
    environment: EnvironmentSection = EnvironmentSection()
    verifier: VerifierSection = VerifierSection()
    metrics: list[MetricSection] = Field(
        default_factory=list[MetricSection], description="Beside mean reward and pass rate, which always are there."
    )
    agents: list[AgentSection] = Field(
        default_factory=lambda: [AgentSection()], min_length=1, description="Who is evaluated; default: the oracle."
    )
    engine: EngineSection | None = Field(
        default=None, description="A model on engines of this cluster, which agents without base_url ask."
    )
    datasets: list[DatasetSection] = Field(default_factory=list[DatasetSection], description="At what.")
    tasks: list[TaskSection] = Field(default_factory=list[TaskSection], description="Single tasks beside them.")
    artifacts: list[ArtifactKey] = Field(default_factory=list[ArtifactKey], description="Files kept of every trial.")
    override_error_policy: dict[str, PolicyOverride] = Field(
        default_factory=dict[str, PolicyOverride], description="What follows from an error, by its type."
    )
    budget: BudgetSection = BudgetSection()
    infrastructure: InfrastructureSection = InfrastructureSection()

    @field_validator("name")
    @classmethod
    def _directory(cls, value: str | None) -> str | None:
        return None if value is None else portable_name(value)

    @field_validator("override_error_policy")
    @classmethod
    def _types(cls, value: dict[str, PolicyOverride]) -> dict[str, PolicyOverride]:
        return {found: policy for name, policy in value.items() for found in _error_types(name)}

    @classmethod
    def prepare(cls, source: Located) -> list[str]:
        """Prepare a file for `rollout.config.load`."""
        _drop_empty(source.values)
        faults = [*rename(source), *_across(source)]
        if Path(source.path).suffix.lower() in YAML:
            source.values.setdefault("name", Path(source.path).stem)
        return faults


def environments(config: JobConfig) -> Iterator[tuple[Place, dict[str, str]]]:
    """Yield every `env` of the file with its section, for `templates.unset`."""
    yield ("environment",), config.environment.env
    if not config.verifier.disable:
        yield ("verifier",), config.verifier.env
    for index, agent in enumerate(config.agents):
        yield ("agents", index), agent.env


def asks_engine(agent: AgentSection, config: JobConfig) -> bool:
    """Return whether it may query the engines of this cluster: bash agents and coding CLIs cannot."""
    loop = agent.import_path is not None or kind_of(agent.name) in (None, KINDS[SHELL_LOOP])
    named = agent.model_name in (None, ENGINE)
    return config.engine is not None and agent.base_url is None and not agent.execute and loop and named


_KEEPS_EMPTY = ("kwargs", "provider_config", "mounts", "env")
"""Sections in which an empty key is a user's value or a mistake."""


def _drop_empty(values: Any) -> None:
    """Remove keys without a value, such as `retry:` alone."""
    if isinstance(values, list):
        for item in cast("list[Any]", values):
            _drop_empty(item)
    elif isinstance(values, dict):
        table = cast("dict[str, Any]", values)
        for key in [key for key, value in table.items() if value is None]:
            del table[key]
        for key, value in table.items():
            if key not in _KEEPS_EMPTY:
                _drop_empty(value)


def _across(source: Located) -> Iterator[str]:
    """Yield faults that concern several keys. They are found in the raw file, so that they appear next to other
    faults."""
    values = source.values
    if not values.get("datasets") and not values.get("tasks"):
        yield f"{source.where(('datasets',))}: datasets: there are none, and no tasks: add - path: DIRECTORY"
    limit = values.get("n_concurrent_trials", 4)
    labels: dict[str, str] = {}
    groups: dict[str, Any] = {}
    for index, agent in enumerate(_tables(values.get("agents"))):
        label = agent.get("label") or agent.get("name") or _class_name(agent.get("import_path")) or ORACLE
        where = f"{source.where(('agents', index))}: agents.{index}"
        if isinstance(label, str):
            if same_name(label) in labels:
                model = str(agent.get("model_name") or "2").rpartition("/")[2]
                yield (
                    f'{where}: a second agent called "{label}", the name of its results and directories: give it a '
                    f"label of its own, such as label: {label}-{model}"
                )
            labels[same_name(label)] = label
        own = agent.get("n_concurrent")
        where = f"{source.where(('agents', index, 'n_concurrent'))}: agents.{index}.n_concurrent"
        if isinstance(own, int) and isinstance(limit, int) and own > limit:
            yield f"{where}: {own} is more than n_concurrent_trials, which is {limit}"
        yield from _of_kind(source, index, agent)
        group = agent.get("concurrency_group")
        if isinstance(group, str) and groups.setdefault(group, own) != own:
            yield f'{where}: {own}, where another agent of the group "{group}" has {groups[group]}'


def _of_kind(source: Located, index: int, agent: dict[str, Any]) -> Iterator[str]:
    """Yield faults of a built-in agent. Its `kwargs` stay as they are sent: numbers keep their written form."""
    kind = kind_of(str(agent.get("name", ORACLE)))
    engine = bool(source.values.get("engine"))
    if agent.get("model_name") == ENGINE and agent.get("base_url") is None and not engine:
        where = source.where(("agents", index, "model_name"))
        yield f"{where}: agents.{index}.model_name: {ENGINE} is the model of the key engine, which is not here: add it"
    if kind is None or agent.get("execute") or agent.get("import_path"):
        return
    here = f"{source.where(('agents', index))}: agents.{index}"
    if kind.name == SHELL_LOOP:
        yield from (f"{here}: {fault}" for fault in _loop_faults(agent, engine))
    elif agent.get("model_name") == ENGINE:
        yield f"{here}: {kind.name} asks models over HTTP, not the engines of this cluster: only {SHELL_LOOP} does"
    elif kind.needs_model and not agent.get("model_name"):
        yield f"{here}: {kind.name} needs a model_name, such as {kind.model_example}"
    given = agent.get("kwargs", {})
    if not isinstance(given, dict):
        return  # told as what it is
    kwargs = cast("dict[str, Any]", given)
    faults = list(kwargs_faults(kind, kwargs))
    for place, text in faults:
        key = ("agents", index, "kwargs", *place)
        yield f"{source.where(key)}: {'.'.join(map(str, key))}: {text}"
    if not faults and kwargs:
        agent["kwargs"] = kind.kwargs.model_validate(kwargs, strict=True).model_dump(mode="json", exclude_unset=True)


def _loop_faults(agent: dict[str, Any], engine: bool) -> Iterator[str]:
    if agent.get("base_url") is not None:
        if agent.get("model_name") is None:
            yield f"{SHELL_LOOP} needs a model_name beside its base_url"
    elif not engine:
        yield f"{SHELL_LOOP} needs a base_url and a model_name, or the key engine, a model on this cluster's workers"
    elif agent.get("model_name") not in (None, ENGINE):
        yield f"{SHELL_LOOP} has a model_name and no base_url: add base_url, or write model_name: {ENGINE}"


def _class_name(import_path: Any) -> str:
    return import_path.rpartition(":")[2].rpartition(".")[2] if isinstance(import_path, str) else ""


def _tables(value: Any) -> list[dict[str, Any]]:
    items = cast("list[Any]", value) if isinstance(value, list) else []
    return [cast("dict[str, Any]", item) if isinstance(item, dict) else {} for item in items]
