"""experiment.yaml (`experiment_v1_0`): its keys, and the overrides that are applied before validation."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, cast

from pydantic import AfterValidator, Field, field_validator

from rollout.config.declared import Setting
from rollout.config.environment import unknown_env_vars, variables
from rollout.config.load import Located, from_options, validated
from rollout.config.section import Section
from rollout.config.written import Text
from rollout.model.errors import ConfigError
from rollout.model.problems import faults_of
from rollout.workloads.experiment.contracts import (
    Comparison,
    Direction,
    EvidencePolicy,
    Id,
    NetworkMode,
    ScheduleOrder,
    StatePolicy,
    WorkspacePath,
)
from rollout.workloads.job.config import PROVIDERS, Env, SizeText, provider_name
from rollout.workloads.job.engine import EngineSection
from rollout.workloads.job.errors import ERRORS
from rollout.workloads.job.network import allowed_hosts
from rollout.workloads.job.quantities import Cpus
from rollout.workloads.sections import WorkersSection

LOCAL = ("process", "bubblewrap")
"""Providers whose sandboxes use the programs of the worker's machine unless an image is named."""
_MODES = {"local": "process", "container": "docker", "bwrap": "bubblewrap", "k8s": "kubernetes"}
RETRY_GROUPS = ("infrastructure", "api", "agent", "verifier")


def _some(value: list[str] | str) -> list[str] | str:
    if not value or not value[0].strip():
        raise ValueError("must not be empty")
    return value


Command = Annotated[list[Text] | Text, AfterValidator(_some)]
Milliseconds = Annotated[int, Field(ge=1, le=30 * 86_400_000)]


class ExperimentKeys(Section):
    id: Id = Field(description="Name of the experiment and of its runs' directories.")
    name: str = Field(default="", description="Information for readers.")
    description: str = Field(default="", description="Information for readers.")
    tags: list[Text] = Field(default_factory=list[Text], description="Information for readers.")


class DatasetKeys(Section):
    path: str = Field(min_length=1, description="JSONL file with one task per line, an object with task_id.")
    limit: int | None = Field(default=None, ge=1, description="Use only the first N tasks.")


class DesignKeys(Section):
    comparison: Comparison = Field(default="paired", description="Compare variants task by task (paired) or overall.")
    replications: int = Field(default=1, ge=1, le=10_000, description="Trials per variant and task.")
    seed: int = Field(default=0, ge=0, description="Seed of the randomized order.")
    order: ScheduleOrder = Field(
        default="paired_interleaved",
        description="Order of trials: by task, then variant; by variant, then task; or shuffled.",
    )
    max_concurrency: Annotated[int, Setting("--concurrent")] = Field(
        default=4, ge=1, le=100_000, description="Maximum concurrent trials."
    )


class VariantKeys(Env):
    variant_id: Id = Field(description="Name of the variant in facts and reports.")
    args: list[Text] = Field(default_factory=list[Text], description="Arguments appended to runtime.command.")
    image: str | None = Field(default=None, min_length=1, description="Image in place of runtime.image.")
    bindings: dict[str, Any] = Field(default_factory=dict[str, Any], description="Settings passed to the agent.")
    max_parallel_trials: int | None = Field(
        default=None, ge=1, description="Maximum concurrent trials of this variant."
    )
    engine: EngineSection | None = Field(
        default=None, description="A model for this variant, instead of the runtime's."
    )


class AgentKeys(Section):
    image_source: Literal["global", "per_task"] = Field(default="global", description="Use one image, or one per task.")
    image: str | None = Field(default=None, min_length=1, description="The same as runtime.image.")
    artifact: str | None = Field(
        default=None,
        min_length=1,
        description="Directory or archive with the agent, frozen and copied into each sandbox.",
    )


class NetworkKeys(Section):
    mode: NetworkMode = Field(default="none", description="Network access of sandboxes.")
    allowed_hosts: list[str] = Field(default_factory=list[str], description="Hosts that allowlist_enforced permits.")

    @field_validator("allowed_hosts")
    @classmethod
    def _hosts(cls, value: list[str]) -> list[str]:
        return allowed_hosts(value)


class ResourceKeys(Section):
    cpus: Cpus | None = Field(default=None, description="Processors of a sandbox.")
    memory: SizeText | None = Field(default=None, description='Memory of a sandbox, such as "4G".')
    storage: SizeText | None = Field(default=None, description='Storage of a sandbox, such as "20G".')


class SandboxKeys(Section):
    mode: Annotated[str, Setting("--provider", "TYPE")] = Field(
        default="docker", description="Provider of sandboxes; local means process, container means docker."
    )
    resources: ResourceKeys = ResourceKeys()
    provider_config: dict[str, Any] = Field(
        default_factory=dict[str, Any], description="Settings of the provider; see its documentation."
    )

    @field_validator("mode")
    @classmethod
    def _provider(cls, value: str) -> str:
        return provider_name(value, _MODES)


class RuntimePolicyKeys(Section):
    timeout_ms: Milliseconds = Field(default=600_000, description="Time limit of the agent's command.")
    network: NetworkKeys = NetworkKeys()
    sandbox: SandboxKeys = SandboxKeys()


class DependencyKeys(Section):
    services: dict[str, Any] | None = Field(default=None, description="Passed to the agent unchanged.")


class RuntimeKeys(Env):
    image: str | None = Field(default=None, min_length=1, description="Image of sandboxes.")
    command: Command | None = Field(
        default=None, description="Agent: a list of words, or a line for /bin/sh; excludes function."
    )
    function: str | None = Field(
        default=None,
        min_length=1,
        description="Agent as MODULE:FUNCTION of this directory, called as function(row, **bindings), as in "
        "`rollout map`.",
    )
    agent: AgentKeys = AgentKeys()
    policy: RuntimePolicyKeys = RuntimePolicyKeys()
    workspace: WorkspacePath | None = Field(
        default=None, description="Working directory of the agent; default: /agentlab/contract/workspace."
    )
    dependencies: DependencyKeys = DependencyKeys()
    engine: EngineSection | None = Field(
        default=None, description="A model on engines of this cluster, at $OPENAI_BASE_URL in the sandbox."
    )


class GradingKeys(Env):
    command: Command = Field(
        description="Grader, run in the workspace after the agent; it writes the file $AGENTLAB_GRADE_PATH."
    )
    assets: str | None = Field(
        default=None, min_length=1, description="Directory that the grader needs, in $AGENTLAB_GRADING_DIR."
    )
    timeout_ms: Milliseconds = Field(default=600_000, description="Time limit of the grader.")


class RetryKeys(Section):
    max_attempts: int = Field(default=3, ge=1, le=100, description="Attempts at a trial, including the first.")
    retry_on: list[str] = Field(
        default_factory=lambda: ["infrastructure", "api"],
        description="Error types to retry, or all of a kind: infrastructure, api, agent, verifier.",
    )

    @field_validator("retry_on")
    @classmethod
    def _types(cls, value: list[str]) -> list[str]:
        for name in value:
            if name not in RETRY_GROUPS and name not in ERRORS:
                near = get_close_matches(name, [*RETRY_GROUPS, *ERRORS], n=1)
                hint = f'did you mean "{near[0]}"?' if near else "see the table in docs/job.md"
                raise ValueError(f'"{name[:60]}" is no type of error; {hint}')
        return value

    @property
    def types(self) -> list[str]:
        """Types in the order of the table of errors."""
        return [name for name, row in ERRORS.items() if name in self.retry_on or row.blame in self.retry_on]


class PruningKeys(Section):
    max_consecutive_failures: int | None = Field(
        default=None, ge=1, description="Prune a variant after this many consecutive failures; default: never."
    )


class PolicyKeys(Section):
    state_policy: StatePolicy = Field(
        default="isolate_per_trial",
        description="Where a trial starts: with the task's workspace, with that of the variant's last trial "
        "at the task, or of its last trial.",
    )
    retry: RetryKeys = RetryKeys()
    pruning: PruningKeys = PruningKeys()
    pause_timeout_ms: Milliseconds = Field(
        default=3_600_000, description="Time after which a pause interrupts trials that still run."
    )


class MetricKeys(Section):
    name: str = Field(default="score", min_length=1, max_length=200, description="Metric that compares variants.")
    direction: Direction = Field(default="maximize", description="Direction of improvement.")
    passed_from: float = Field(default=1.0, description="Score from which a trial counts as passed.")
    non_inferiority_margin: float | None = Field(
        default=None, gt=0, description="Loss against the baseline that still counts as not worse."
    )


class ExperimentConfig(Section):
    """experiment.yaml."""

    in_yaml: ClassVar[bool] = True

    schema_version: Literal["experiment_v1_0"] = Field(
        default="experiment_v1_0", description="Version of the file's format."
    )
    experiment: ExperimentKeys
    dataset: DatasetKeys
    design: DesignKeys = DesignKeys()
    baseline: VariantKeys
    variant_plan: list[VariantKeys] = Field(
        default_factory=list[VariantKeys], description="Variants to compare with the baseline."
    )
    runtime: RuntimeKeys
    grading: GradingKeys | None = Field(default=None, description="Without: the agent's own outcome is the score.")
    policy: PolicyKeys = PolicyKeys()
    evidence: EvidencePolicy = EvidencePolicy()
    primary_metric: MetricKeys = MetricKeys()
    workers: WorkersSection = WorkersSection()
    runs_dir: Annotated[str, Setting("--runs-dir", "DIR")] = Field(
        default=".lab/runs", min_length=1, description="Directory of all runs."
    )

    @property
    def variants(self) -> list[VariantKeys]:
        """All variants, the baseline first."""
        return [self.baseline, *self.variant_plan]

    @property
    def is_per_task(self) -> bool:
        return self.runtime.agent.image_source == "per_task"

    @property
    def image(self) -> str | None:
        """The image of all variants without their own."""
        return self.runtime.agent.image or self.runtime.image

    @property
    def provider(self) -> str:
        return self.runtime.policy.sandbox.mode

    @classmethod
    def prepare(cls, source: Located) -> list[str]:
        """Apply overrides, for `rollout.config.load`. Returns faults that concern several keys."""
        return list(_across(source))


class OverridesFile(Section):
    """`--overrides FILE` (experiment_overrides_v1)."""

    in_yaml: ClassVar[bool] = True

    schema_version: Literal["experiment_overrides_v1"] = "experiment_overrides_v1"
    values: dict[str, Any] = Field(description="By dotted key of experiment.yaml.")


def load_experiment(
    path: Path,
    overrides: Path | None = None,
    assignments: Sequence[str] = (),
    typed: Mapping[str, Any] | None = None,
    *,
    environ: Mapping[str, str] | None = None,
) -> ExperimentConfig:
    """Load the file and apply, in this order, the environment, the file of overrides, `KEY=VALUE` assignments and
    options.

    Raises ConfigError with all faults, as `file:line: key: what`.
    """
    source = Located.read(path)
    environment = os.environ if environ is None else environ
    faults = unknown_env_vars(ExperimentConfig, environment)
    source.override(variables(ExperimentConfig, environment))
    if overrides is not None:
        faults += _lay_over(source, overrides)
    for text in assignments:
        faults += _assign(source, text)
    source.override(from_options(typed))
    return validated(ExperimentConfig, source, faults)


def with_assignments(config: ExperimentConfig, assignments: Sequence[str]) -> ExperimentConfig:
    """Apply assignments, as `load_experiment` does, to an experiment that was already read."""
    source = Located("--set", config.model_dump(mode="json"), {})
    return validated(ExperimentConfig, source, [fault for text in assignments for fault in _assign(source, text)])


def _lay_over(source: Located, path: Path) -> list[str]:
    """Apply the file of overrides, and return its faults."""
    try:
        file = Located.read(path)
        found = validated(OverridesFile, file)
    except ConfigError as error:
        return faults_of(error.message)
    faults: list[str] = []
    for key, value in found.values.items():
        where = file.where(("values", key))
        faults += [f"{where}: values.{key}: {fault}" for fault in _put(source, key, value, where)]
    return faults


def _assign(source: Located, text: str) -> list[str]:
    from rollout.config.yaml import YamlError, parse_yaml  # 45 ms of every command's start, for those that need it

    key, equals, written = text.partition("=")
    if not equals or not key.strip():
        return [f"--set {text[:80]}: must be KEY=VALUE, such as design.replications=3"]
    try:
        values, _ = parse_yaml(f"value: {written}\n")
    except YamlError as error:
        return [f"--set {key}: {fault}" for _, fault in error.faults]
    return [f"--set {key}: {fault}" for fault in _put(source, key.strip(), values.get("value"), f"--set {key.strip()}")]


def _put(source: Located, key: str, value: Any, origin: str) -> Iterator[str]:
    """Set a dotted key; a number, or the id of a variant, selects an entry of a list."""
    place: tuple[str | int, ...] = ()
    at: Any = source.values
    *above, last = key.split(".")
    for part in above:
        step: str | int = part
        if isinstance(at, list):
            found = _entry(cast("list[Any]", at), part)
            if found is None:
                yield f'there is no entry "{part}" in {".".join(map(str, place))}'
                return
            step = found
            at = cast("list[Any]", at)[found]
        elif isinstance(at, dict):
            at = cast("dict[str, Any]", at).setdefault(part, {})
        place = (*place, step)
        if not isinstance(at, dict | list):
            yield f"{'.'.join(map(str, place))} is no section"
            return
    if isinstance(at, list):
        index = _entry(cast("list[Any]", at), last)
        if index is None:
            yield f'there is no entry "{last}" in {".".join(map(str, place))}'
            return
        cast("list[Any]", at)[index] = value
        place = (*place, index)
    else:
        at[last] = value
        place = (*place, last)
    source.origins[place] = origin


def _entry(items: list[Any], name: str) -> int | None:
    ids = [cast("dict[str, Any]", item).get("variant_id") if isinstance(item, dict) else None for item in items]
    if name in ids:
        return ids.index(name)
    return int(name) if name.isdigit() and int(name) < len(items) else None


def _across(source: Located) -> Iterator[str]:
    values = source.values
    yield from _missing_files(source)
    variants = [(("baseline",), _table(values.get("baseline")))]
    plan = values.get("variant_plan")
    for index, one in enumerate(cast("list[Any]", plan) if isinstance(plan, list) else []):
        variants.append((("variant_plan", index), _table(one)))  # pyright: ignore[reportArgumentType]
    seen: dict[str, str] = {}
    for place, variant in variants:
        name, key = variant.get("variant_id"), ".".join(map(str, (*place, "variant_id")))
        if isinstance(name, str) and seen.setdefault(name.lower(), key) != key:
            yield f'{source.where((*place, "variant_id"))}: {key}: "{name}" is the id of {seen[name.lower()]}, too'
    runtime = _table(values.get("runtime"))
    agent = _table(runtime.get("agent"))
    mode = _table(_table(runtime.get("policy")).get("sandbox")).get("mode", "docker")
    provider = _MODES.get(mode, mode) if isinstance(mode, str) else mode
    if (runtime.get("command") is None) == (runtime.get("function") is None):
        yield f"{source.where(('runtime',))}: runtime: give either command or function"
    if runtime.get("function") is not None and agent.get("artifact") is not None:
        where = source.where(("runtime", "agent", "artifact"))
        yield f"{where}: runtime.agent.artifact: function brings its own code: leave one of them out"
    if agent.get("image_source") == "per_task":
        where = source.where(("runtime", "agent", "image_source"))
        if not agent.get("artifact") and runtime.get("function") is None:
            yield (
                f"{where}: runtime.agent.artifact: is missing, and image_source: per_task needs it: the agent is put "
                "into the image of each task"
            )
        if provider == "process":
            yield (
                f"{where}: runtime.agent.image_source: per_task needs sandboxes with images, and "
                "runtime.policy.sandbox.mode is process, which has none"
            )
        for place, variant in variants:
            if variant.get("image") is not None:
                key = ".".join(map(str, (*place, "image")))
                yield f"{source.where((*place, 'image'))}: {key}: each task has its own image (per_task): leave it out"
    elif (
        provider in PROVIDERS
        and provider not in LOCAL
        and not all(variant.get("image") or runtime.get("image") or agent.get("image") for _, variant in variants)
    ):
        where = source.where(("runtime",))
        yield f"{where}: runtime.image: is missing, and sandboxes of {provider} need one: add it"
    yield from _of_engines(source, variants, runtime, provider)
    policy = _table(values.get("policy"))
    if policy.get("state_policy") in ("persist_per_task", "accumulate") and (
        _table(values.get("design")).get("order") == "randomized"
    ):
        yield (
            f"{source.where(('policy', 'state_policy'))}: policy.state_policy: {policy['state_policy']} with "
            "design.order: randomized would hand workspaces on in a random order: choose another order"
        )


def _of_engines(
    source: Located,
    variants: Sequence[tuple[tuple[str | int, ...], dict[str, Any]]],
    runtime: dict[str, Any],
    provider: Any,
) -> Iterator[str]:
    for place, variant in variants:
        if variant.get("engine") is None and runtime.get("engine") is None:
            continue
        if variant.get("max_parallel_trials") is not None:
            key = (*place, "max_parallel_trials")
            yield (
                f"{source.where(key)}: {'.'.join(map(str, key))}: does not go with an engine: a trial gives its place "
                "to another while it waits for an answer. design.max_concurrency bounds them all"
            )
        if provider not in LOCAL:
            key = (*place, "engine") if variant.get("engine") is not None else ("runtime", "engine")
            yield (
                f"{source.where(key)}: {'.'.join(map(str, key))}: its address needs a sandbox of {' or '.join(LOCAL)}, "
                f"and runtime.policy.sandbox.mode is {provider}"
            )


_FILES = (("dataset", "path"), ("runtime", "agent", "artifact"), ("grading", "assets"))
_PATTERN = re.compile(r"[*?\[]|://")


def _missing_files(source: Located) -> Iterator[str]:
    """Yield missing files; the check of the run reports other faults of files."""
    for place in _FILES:
        found: Any = source.values
        for key in place:
            found = _table(found).get(key)
        if isinstance(found, str) and found and not _PATTERN.search(found) and not Path(found).expanduser().exists():
            below = "" if Path(found).is_absolute() else f" in {Path.cwd()}"
            yield f"{source.where(place)}: {'.'.join(place)}: {found}: no such file or directory{below}"


def _table(value: Any) -> dict[str, Any]:
    return cast("dict[str, Any]", value) if isinstance(value, dict) else {}
