"""The configuration of `rollout train grpo` and `ppo`: samples, rewards and generation."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal, Self, cast

from pydantic import BeforeValidator, ConfigDict, Field, ValidationError, field_validator, model_validator

from rollout.config.declared import KEPT
from rollout.config.section import Section, raise_faults
from rollout.config.wording import describe
from rollout.workloads.engine_options import refused_options
from rollout.workloads.job.agent_kinds import SHELL_LOOP, kind_of
from rollout.workloads.job.config import AgentSection, DatasetSection, JobConfig, TaskSection
from rollout.workloads.job.config import EnvironmentSection as JobEnvironment
from rollout.workloads.local_model import names_snapshot
from rollout.workloads.sections import BackendSection
from rollout.workloads.train.base_config import Reference, TrainingSection
from rollout.workloads.train.rollouts import ENVIRONMENT, Episode

Correction = Literal["off", "sequence_mask", "sequence_truncate", "token_mask", "token_truncate"]

_OF_COMPLETIONS = (
    "no_supervised_token", "stop_token_outside", "merged_at_seam", "empty_completion", "identical_pair"
)  # fmt: skip
"""Keys of `rows` that only apply to rows with completions."""
TASKS = "tasks_path"
"""The kind of a dataset whose rows are tasks."""
_TASK_KEYS = {"dataset": "path", "eval_dataset": "eval_path"}
"""The key of a job environment that replaces each dataset."""


def as_reward(value: Any) -> Any:
    """Expand a name to the table that it abbreviates."""
    if not isinstance(value, str):
        return value
    return {"model": value} if names_snapshot(value) else {"function": value}


class RewardSection(Section):
    function: str | None = Field(
        default=None,
        description="PKG.MODULE:FUNCTION as in TRL: f(prompts, completions, **columns) returns a number or "
        "None per completion; `async def` or a class with __call__ also work.",
    )
    model: str | None = Field(
        default=None,
        description="Reward model in place of function: directory, Hugging Face name, snapshot:ID or run:RUN.",
    )
    weight: float = Field(default=1.0, ge=-1e6, le=1e6, description="Weight in the sum of rewards.")
    name: str = Field(
        default="",
        max_length=200,
        description="Name in metrics and samples; default: the function's, or the last part of the model's.",
    )

    @model_validator(mode="before")
    @classmethod
    def _named(cls, value: Any) -> Any:
        given = cast("dict[str, Any]", value) if isinstance(value, dict) else {}
        function, model = given.get("function"), given.get("model")
        if given.get("name", "") == "" and isinstance(function, str):
            return {**given, "name": function.rpartition(":")[2]}
        if given.get("name", "") == "" and isinstance(model, str):
            return {**given, "name": model.rstrip("/").rpartition("/")[2]}
        return cast(Any, value)

    @model_validator(mode="after")
    def _one(self) -> Self:
        if (self.function is None) == (self.model is None):
            raise ValueError("give function or model, one of them")
        return self


class SandboxSection(JobEnvironment):
    type: str = Field(default="bubblewrap", description="bubblewrap or process, or module:Class of one of your own.")


class EnvironmentSection(Section):
    """The environment that responds to the policy's samples, which then have several turns."""

    model_config = ConfigDict(populate_by_name=True)

    kind: Literal["multi_turn", "job"] = Field(
        description="multi_turn: a class with reset(**columns) and step(completion); job: an agent that asks "
        "the policy works at tasks."
    )
    class_: str | None = Field(
        default=None,
        alias="class",
        description="multi_turn: PKG.MODULE:CLASS, or a function that returns an object, called for each sample.",
    )
    path: str | None = Field(
        default=None, min_length=1, description="job: directory of tasks, or one task, in place of dataset."
    )
    eval_path: str | None = Field(default=None, min_length=1, description="job: the same in place of eval_dataset.")
    agent: AgentSection | None = Field(default=None, description="job: agent, as in `agents` of job.yaml.")
    sandbox: SandboxSection = Field(
        default=SandboxSection(),
        description="job: sandbox, as in `environment` of job.yaml; `type` is bubblewrap (default), process "
        "or module:Class.",
    )
    n_concurrent_trials: int = Field(default=8, ge=1, le=1_000_000, description="job: concurrent trials per worker.")
    max_turns: int = Field(default=8, ge=1, le=1000, description="Maximum turns of a sample.")
    weight: float = Field(
        default=1.0, ge=-1e6, le=1e6, description='Weight of its reward, "environment", in the sum of rewards.'
    )

    @model_validator(mode="after")
    def _of_its_kind(self) -> Self:
        raise_faults(self._faults())
        return self

    def _faults(self) -> Iterator[tuple[str, str]]:
        needed = {"multi_turn": {"class_": "class"}, "job": {"path": "path", "agent": "agent"}}
        own = {"class_", "path", "eval_path", "agent", "sandbox", "n_concurrent_trials"}
        for name, key in needed[self.kind].items():
            if getattr(self, name) is None:
                yield key, "is missing"
        others = own - {"class_"} if self.kind == "multi_turn" else {"class_"}
        for name in sorted(others):
            if getattr(self, name) != type(self).model_fields[name].default:  # a worker is told every key
                yield name.rstrip("_"), f'has no meaning with kind = "{self.kind}": remove it'
        if self.agent is not None and (fault := speechless(self.agent)):
            yield "agent", fault
        if self.kind == "job" and self.sandbox.type not in ADDRESS_PROVIDERS and ":" not in self.sandbox.type:
            known = " or ".join(f'"{name}"' for name in ADDRESS_PROVIDERS)
            yield "sandbox.type", f'"{self.sandbox.type}" sandboxes cannot reach the policy: set it to {known}'

    @property
    def episode(self) -> Episode | None:
        """The episode of a class, or None if the environment is not one."""
        return Episode(self.class_, self.max_turns) if self.class_ is not None else None

    def job(self, path: str | None) -> JobConfig:
        """Return the tasks at `path` (`path` or `eval_path`) as a job; with None, the job as workers see it."""
        given: dict[str, Any] = {} if path is None else {"datasets": [DatasetSection(path=path)]}
        if path is not None and (Path(path).expanduser() / "task.toml").is_file():
            given = {"tasks": [TaskSection(path=path)]}
        agents = [self.agent] if self.agent is not None else []
        trials = self.n_concurrent_trials
        return JobConfig(agents=agents, environment=self.sandbox, n_concurrent_trials=trials, **given)


ADDRESS_PROVIDERS = ("bubblewrap", "process")
"""Sandbox providers in which the policy has an address."""


def speechless(agent: AgentSection) -> str:
    """Return why this agent cannot query the policy, or "" if it can."""
    kind = None if agent.own else kind_of(agent.name)
    if agent.base_url is not None or agent.model_name is not None:
        return "asks the policy that is trained: remove model_name and base_url"
    if kind is not None and kind.name != SHELL_LOOP:
        return (
            f"{kind.name} asks no model that it is given, so nothing would be learnt: name {SHELL_LOOP}, or an agent "
            "of your own with execute or import_path"
        )
    return ""


def _rewards(value: Any) -> Any:
    listed = cast("list[Any]", value if isinstance(value, list) else [value])
    return [as_reward(one) for one in listed]


class PolicySection(TrainingSection):
    """Shared keys of algorithms that train on samples of the policy itself. A step is one batch of samples. Each of its
    `num_minibatches` parts is an update of the optimiser, `num_iterations` times."""

    @model_validator(mode="before")
    @classmethod
    def _tasks_are_rows(cls, value: Any) -> Any:
        given = cast("dict[str, Any]", value) if isinstance(value, dict) else {}
        environment = given.get("environment")
        if not isinstance(environment, dict) or cast("dict[str, Any]", environment).get("kind") != "job":
            return cast(Any, value)
        paths = {key: cast("dict[str, Any]", environment).get(name) for key, name in _TASK_KEYS.items()}
        paths["dataset"] = paths["dataset"] or "."  # which is told to be missing
        return {key: {"kind": TASKS, "path": path} for key, path in paths.items() if path is not None} | given

    minibatch_size: int = Field(
        default=8,
        ge=1,
        le=1 << 20,
        description="Samples per device and pass; affects memory and speed only. An update has "
        "prompts_per_step x num_generations / num_minibatches samples.",
    )
    max_length: int = Field(
        default=1024, ge=2, le=1 << 24, description="Maximum tokens of a prompt with its completion."
    )
    disable_dropout: bool = Field(default=True, description="Train without dropout, which would change every ratio.")
    num_generations: int = Field(default=1, ge=1, le=1 << 16, description="Samples per prompt (a group).")
    prompts_per_step: int = Field(default=8, ge=1, le=1 << 20, description="Prompts per step.")
    max_completion_length: int = Field(default=256, ge=1, le=1 << 24, description="Maximum tokens of a sample.")
    temperature: float = Field(default=1.0, gt=0, le=100, description="Sampling temperature.")
    stop_token_ids: list[int] = Field(
        default_factory=list[int], max_length=64, description="Additional tokens that end a sample."
    )
    mask_truncated_completions: bool = Field(
        default=False, description="Exclude samples that max_completion_length truncated."
    )
    num_iterations: int = Field(default=1, ge=1, le=1000, description="Training passes over a step's samples.")
    num_minibatches: int = Field(default=1, ge=1, le=1 << 20, description="Optimiser updates per iteration.")
    lag: int = Field(
        default=0,
        ge=0,
        le=64,
        description="Steps by which the sampling policy lags behind, so that sampling overlaps training; "
        "affects the result.",
    )
    reward: Annotated[list[RewardSection], BeforeValidator(_rewards)] = Field(
        default_factory=list[RewardSection],
        max_length=64,
        description="Functions and reward models, as tables or names with weight 1; the reward is their "
        "weighted sum. Required without an environment.",
    )
    environment: EnvironmentSection | None = Field(
        default=None, description="What answers the samples, turn by turn, and rewards them."
    )
    reward_code: str | None = Field(
        default=None,
        description="Directory of the functions' code, copied to the workers; default: the current one if it "
        "has their modules.",
    )
    on_reward_error: Literal["stop", "drop_group", "zero"] = Field(
        default="stop",
        description="When a function raises or returns no reward; stop: fail the run; drop_group: exclude and"
        " count the group; zero: use the reward 0.",
    )
    reward_timeout: float = Field(
        default=300.0, gt=0, le=86_400, description="Seconds for one of three attempts to score a group."
    )
    reference: str = Reference
    epsilon: float = Field(default=0.2, gt=0, lt=1, description="Clipping range of the ratio.")
    importance_sampling_correction: Correction | None = Field(
        default=None,
        description="Correction for differing log-probabilities of engine and trainer; default: off with "
        "transformers, sequence_mask with vllm.",
    )
    importance_sampling_cap: float = Field(
        default=3.0, gt=0, le=1e6, description="Ratio beyond which the correction masks or truncates."
    )

    @property
    def step_rows(self) -> int:
        return self.prompts_per_step

    @property
    def samples(self) -> int:
        """Samples of a step."""
        return self.prompts_per_step * self.num_generations

    @property
    def updates(self) -> int:
        """Updates of the optimiser in a step."""
        return self.num_iterations * self.num_minibatches

    @property
    @abstractmethod
    def kl_key(self) -> str:
        """The key with the weight of the KL divergence."""

    @property
    def compared(self) -> str:
        return self.reference if getattr(self, self.kl_key) else "free"

    @property
    def functions(self) -> list[str]:
        """Rewards that are code, in order."""
        return [one.function for one in self.reward if one.function is not None]

    @property
    def runs_code(self) -> bool:
        """Whether the run sends code of the user."""
        return bool(self.functions) or self.episode is not None

    @property
    def episode(self) -> Episode | None:
        """The episode of a class, or None if no class responds to the samples."""
        found = self.environment.episode if self.environment is not None else None
        return found and replace(found, max_prompt=self.max_length - self.max_completion_length)

    @property
    def tasks(self) -> EnvironmentSection | None:
        """The environment, if its samples are trials."""
        return self.environment if self.environment is not None and self.environment.kind == "job" else None

    @property
    def weights(self) -> dict[str, float]:
        """Weights of all rewards by name."""
        given = {one.name: one.weight for one in self.reward}
        return given if self.environment is None else {**given, ENVIRONMENT: self.environment.weight}

    @property
    def judges(self) -> list[str]:
        """Names of the rewards that a group's result has, in the same order."""
        given = [one.name for one in self.reward if one.function is not None]
        return given if self.environment is None else [*given, ENVIRONMENT]

    @property
    def reward_models(self) -> list[str]:
        """URIs of the reward models, in order."""
        return [one.model for one in self.reward if one.model is not None]

    def rules(self) -> Iterator[tuple[str, str]]:
        yield from super().rules()
        if self.gradient_accumulation != 1:
            yield (
                "gradient_accumulation",
                "follows from the other keys: an update is of prompts_per_step x num_generations / num_minibatches = "
                f"{self.samples // self.num_minibatches:,} samples, minibatch_size of them at once: remove it",
            )
        share, left = divmod(self.samples, self.num_minibatches)
        if left:
            yield (
                "num_minibatches",
                f"the {self.samples:,} samples of a step ({self.prompts_per_step:,} of prompts_per_step x "
                f"{self.num_generations:,} of num_generations) cannot be divided into {self.num_minibatches:,} equal "
                "parts: change one of them",
            )
        elif share % self.devices:
            yield (
                "devices",
                f"the {share:,} samples of an update (prompts_per_step x num_generations / num_minibatches) cannot be "
                f"divided among {self.devices} devices: change one of them",
            )
        if any(token < 0 for token in self.stop_token_ids):
            yield "stop_token_ids", "holds a negative number, which is no token: remove it"
        if self.max_completion_length >= self.max_length:
            yield (
                "max_completion_length",
                f"is {self.max_completion_length:,} of the {self.max_length:,} tokens that max_length allows prompt "
                "and completion together, and leaves none for the prompt: lower it, or raise max_length",
            )
        weight = getattr(self, self.kl_key)
        if weight and self.reference == "free":
            yield "reference", f'{self.kl_key} = {weight:g} needs something to compare with: name it, or set "base"'
        if not weight and self.reference not in ("base", "free"):
            yield "reference", f"has no meaning with {self.kl_key} = 0: remove it"
        if self.rows.too_long == "keep":
            yield "rows.too_long", 'a prompt that is cut off asks something else: set it to "error" or "drop"'
        for name in _OF_COMPLETIONS:
            if getattr(self.rows, name) != "error":
                yield f"rows.{name}", "is of rows with completions, which prompts do not have: remove it"
        names = [one.name for one in self.reward]
        if not names and self.environment is None:
            yield "reward", "must not be empty: name a function or a reward model, or give an environment"
        if self.environment is not None and ENVIRONMENT in names:
            place = names.index(ENVIRONMENT)
            yield f"reward.{place}", f'the reward of the environment is called "{ENVIRONMENT}": give this one a name'
        for place, name in enumerate(names):
            if name in names[:place]:
                yield f"reward.{place}", f'another reward is called "{name}" too: give this one a name of its own'
        for key, name in _TASK_KEYS.items():
            dataset = self.dataset if key == "dataset" else self.eval_dataset
            if self.tasks is not None and dataset is not None and dataset.kind != TASKS:
                yield key, f"the tasks of environment.{name} are the rows: remove it"
        if self.reward_code is not None and not self.runs_code:
            yield "reward_code", "has no meaning without a function among the rewards: remove it"


class GrpoSection(PolicySection):
    num_generations: int = Field(default=8, ge=1, le=1 << 16, description="Samples per prompt (a group).")
    beta: float = Field(default=0.0, ge=0, le=1e3, description="Weight of the KL divergence (k3) from the reference.")
    epsilon_high: float | None = Field(
        default=None,
        gt=0,
        le=1e6,
        description="Upper clipping range; default: epsilon; cispo: the ratio's bound itself.",
    )
    delta: float | None = Field(
        default=None, gt=1, le=1e6, description="Upper bound of the ratio for negative advantages (dual clip)."
    )
    loss_type: Literal["grpo", "bnpo", "dapo", "dr_grpo", "cispo"] = Field(
        default="dapo",
        description="Divisor of the token sum: a sample's length (grpo), tokens of the minibatch (bnpo) or "
        "update (dapo), max_completion_length (dr_grpo); cispo: another loss with dapo's divisor.",
    )
    scale_rewards: Literal["group", "batch", "none"] = Field(
        default="group", description="Set whose standard deviation divides advantages."
    )
    importance_sampling_level: Literal["token", "sequence"] = Field(
        default="token", description="Level of the ratio; sequence: GSPO, best with loss_type = grpo."
    )
    dynamic_sampling: int = Field(
        default=0,
        ge=0,
        le=64,
        description="Maximum number of times to replace groups whose rewards are all equal (DAPO).",
    )

    @field_validator("num_generations")
    @classmethod
    def _group(cls, value: int) -> int:
        if value < 2:
            raise ValueError(
                f"must be at least 2, not {value}: an advantage compares a sample with the others of its group"
            )
        return value

    @field_validator("scale_rewards", mode="before")
    @classmethod
    def _scale(cls, value: Any) -> Any:
        return {True: "group", False: "none"}[value] if isinstance(value, bool) else value

    @property
    def kl_key(self) -> str:
        return "beta"

    def rules(self) -> Iterator[tuple[str, str]]:
        yield from super().rules()
        if self.dynamic_sampling and self.reward_models:
            yield (
                "dynamic_sampling",
                "does not go together with a reward model, which scores when all groups of a step are there: remove "
                "one of them",
            )
        if self.loss_type == "cispo":
            if self.epsilon_high is None:
                yield "epsilon_high", 'is the bound of the ratio with loss_type = "cispo": give it, such as 5.0'
            if self.delta is not None:
                yield "delta", 'has no meaning with loss_type = "cispo": remove it'


class PpoSection(PolicySection):
    num_iterations: int = Field(default=4, ge=1, le=1000, description="Training passes over a step's samples.")
    kl_coef: float = Field(
        default=0.05, ge=0, le=1e3, description="Weight of the KL divergence (k1) from the reference in the reward."
    )
    cliprange_value: float = Field(
        default=0.2, gt=0, le=1e6, description="Clipping range of values around those before the first update."
    )
    vf_coef: float = Field(default=0.1, ge=0, le=1e3, description="Weight of the value loss.")
    gamma: float = Field(default=1.0, gt=0, le=1, description="Discount per token.")
    lam: float = Field(default=0.95, ge=0, le=1, description="Lambda of generalised advantage estimation.")
    whiten_rewards: bool = Field(default=False, description="Whiten rewards before estimating advantages.")
    value: Literal["head", "model"] = Field(
        default="head", description="Source of values; head: a layer on the policy; model: a separate model."
    )

    @property
    def kl_key(self) -> str:
        return "kl_coef"


_SHARE = 0.3
_OF_GENERATION = frozenset({"kind", "dtype", "device"})
_NOT_OURS = frozenset(
    {"delay_ms", "jitter_ms", "token_ms", "concurrency", "fail_rate", "fail_match", "seed", "replicas"}
)


_UNKNOWN = "is no key of an engine: known are those of [backend] of `rollout infer batch`"


def _labels(value: Any) -> Any:
    """Parse `["name=value"]` as a table."""
    if not isinstance(value, list) or not all(isinstance(one, str) and "=" in one for one in cast("list[Any]", value)):
        return cast(Any, value)
    return {name: text for name, _, text in (one.partition("=") for one in cast("list[str]", value))}


class GenerationSection(Section):
    """How samples are generated."""

    backend: Literal["transformers", "vllm"] = Field(default="transformers", description="Inference engine.")
    placement: Annotated[Literal["colocated", "separate"], KEPT] = Field(
        default="colocated",
        description="colocated: engine and trainer take turns on the same devices; separate: engines run on "
        "workers with require_labels.",
    )
    require_labels: Annotated[dict[str, str], KEPT, BeforeValidator(_labels)] = Field(
        default_factory=dict[str, str],
        description='separate: labels of the sampling workers, as a table or a list of "name=value".',
    )
    dtype: Literal["float32", "bfloat16"] | None = Field(
        default=None,
        description="Data type of the engine's weights; default: float32, or bfloat16 with precision = bf16.",
    )
    device: Annotated[Literal["cpu", "cuda"] | None, KEPT] = Field(
        default=None, description="Device of the engine; default: the algorithm's."
    )
    groups_at_once: Annotated[int | None, KEPT] = Field(
        default=None, ge=1, le=4096, description="Concurrent groups per engine; default: 1, or 16 with vllm."
    )
    engine: dict[str, Any] = Field(
        default_factory=dict[str, Any],
        description="Additional keys of [backend], such as max_num_seqs.",
    )

    @model_validator(mode="after")
    def _placed(self) -> Self:
        raise_faults(self._rules())
        return self

    def _rules(self) -> Iterator[tuple[str, str]]:
        if self.placement == "separate" and not self.require_labels:
            yield (
                "require_labels",
                'placement = "separate" needs labels of the workers that draw samples, such as { role = "generate" }; '
                "a worker has them by labels in [worker] of its configuration",
            )
        if self.placement == "colocated" and self.require_labels:
            yield "require_labels", 'has no meaning with placement = "colocated": remove it, or set "separate"'
        for name in _OF_GENERATION & self.engine.keys():
            yield f"engine.{name}", "is a key of [generation] itself: set it there (kind is called backend)"
        try:
            BackendSection.model_validate({name: self.engine[name] for name in self.engine.keys() - _OF_GENERATION})
        except ValidationError as error:
            for entry in error.errors(include_url=False):
                place = ".".join(map(str, entry["loc"]))
                unknown = entry["type"] == "extra_forbidden"
                text = _UNKNOWN if unknown else describe(cast("dict[str, Any]", entry), place, "a table")
                yield f"engine.{place}", text
        given = self.engine.get("engine")
        for name, why in refused_options(
            self.backend, cast("dict[str, Any]", given) if isinstance(given, dict) else ()
        ):
            yield f"engine.engine.{name}", why
        for name in sorted(_NOT_OURS & self.engine.keys()):
            yield f"engine.{name}", _UNKNOWN

    def resolved(self, section: PolicySection) -> GenerationSection:
        """Return the section with all defaults resolved."""
        dtype = self.dtype or ("bfloat16" if section.precision == "bf16" else "float32")
        at_once = self.groups_at_once or (16 if self.backend == "vllm" else 1)
        update = {"dtype": dtype, "device": self.device or section.device, "groups_at_once": at_once}
        return self.model_copy(update=update)

    def correction(self, section: PolicySection) -> Correction:
        """Return the correction of the engine's log-probabilities in use."""
        default: Correction = "sequence_mask" if self.backend == "vllm" else "off"
        return section.importance_sampling_correction or default

    def backend_table(self, section: PolicySection) -> dict[str, Any]:
        """Return `backend` as engines take it; a vLLM that takes turns with training gets a third of the memory, as in
        TRL."""
        defaults: dict[str, Any] = {}
        if self.backend == "vllm":
            defaults["max_model_len"] = section.max_length
            if self.placement == "colocated":
                defaults["gpu_memory_utilization"] = _SHARE
        return {**defaults, **self.engine, "kind": self.backend, "dtype": self.dtype, "device": self.device}
