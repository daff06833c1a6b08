"""Sections that all algorithms of `rollout train` share: model, data, optimiser, budget and hardware."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal, Self, cast

from pydantic import BeforeValidator, Field, field_validator, model_validator

from rollout.config.section import Section, fault_at, raise_faults

Policy = Literal["error", "drop", "keep"]


def as_uri(value: Any) -> Any:
    return {"uri": value} if isinstance(value, str) else value  # pyright: ignore[reportUnknownVariableType]


class ModelSection(Section):
    uri: str = Field(
        min_length=1,
        description="Local directory, Hugging Face name, snapshot:ID or run:RUN (its last snapshot).",
    )
    revision: str | None = Field(default=None, description="Branch, tag or commit of a Hugging Face name.")
    tokenizer: str | None = Field(default=None, description="Tokenizer in place of the model's: directory or name.")
    chat_template: str | None = Field(
        default=None, description="File or built-in name of a chat template; default: the tokenizer's."
    )


class DatasetSection(Section):
    kind: Literal["jsonl_path", "parquet_path", "dataset_path", "tasks_path"] = Field(
        default="jsonl_path",
        description="Format: JSON Lines (plain, .gz, .zst), parquet, Dataset.save_to_disk, or instructions of"
        " a directory of tasks (set by a job environment). Default: by the path's ending.",
    )
    path: str | list[str] = Field(description="Files, patterns or directory, local or as s3:// and gs:// URLs.")
    split: str | None = Field(
        default=None, description="dataset_path: split of a DatasetDict; default: its only one, else train."
    )

    @model_validator(mode="before")
    @classmethod
    def _kind(cls, value: Any) -> Any:
        given = cast("dict[str, Any]", value) if isinstance(value, dict) else {}
        if "type" in given and "kind" not in given:
            return {("kind" if key == "type" else key): inner for key, inner in given.items()}
        paths: Any = given.get("path")
        if isinstance(paths, list) and paths:
            paths = cast("list[Any]", paths)[0]
        if "kind" not in given and isinstance(paths, str) and paths.endswith(".parquet"):
            return {**given, "kind": "parquet_path"}
        return cast(Any, value)

    @model_validator(mode="after")
    def _whole(self) -> Self:
        if not self.patterns or not all(self.patterns):
            raise fault_at("path", "must not be empty: name the files of the dataset")
        if self.split is not None and self.kind != "dataset_path":
            raise fault_at("split", f'is of kind = "dataset_path", and this is "{self.kind}": remove it')
        return self

    @property
    def patterns(self) -> list[str]:
        return [self.path] if isinstance(self.path, str) else list(self.path)


def as_kind(value: Any) -> Any:
    return cast(Any, {"kind": value} if isinstance(value, str) else value)


def as_path(value: Any) -> Any:
    return cast(Any, {"path": value} if isinstance(value, str | list) else value)


Schedule = Literal[
    "constant", "constant_with_warmup", "linear", "cosine", "cosine_with_min_lr", "polynomial", "inverse_sqrt"
]


class OptimizerSection(Section):
    kind: Literal["adamw", "adam", "sgd"] = Field(default="adamw", description="Optimiser of torch.optim.")
    lr: float = Field(gt=0, le=1e3, description="Peak learning rate.")
    weight_decay: float = Field(default=0.0, ge=0, le=10, description="Weight decay, except of biases and norms.")
    betas: tuple[float, float] = Field(default=(0.9, 0.999), description="adamw, adam: decay rates of the moments.")
    momentum: float = Field(default=0.0, ge=0, lt=1, description="sgd: momentum.")
    eps: float = Field(default=1e-8, gt=0, le=1, description="adamw, adam: term that avoids division by zero.")
    schedule: Schedule = Field(default="linear", description="Schedule of the learning rate after the warm-up.")
    warmup_steps: int = Field(default=0, ge=0, description="Steps of linear warm-up.")
    warmup_ratio: float = Field(default=0.0, ge=0, lt=1, description="Warm-up as a share of all steps.")
    min_lr_ratio: float = Field(default=0.0, ge=0, le=1, description="cosine_with_min_lr: final rate as a share of lr.")
    max_grad_norm: float = Field(default=1.0, ge=0, description="Norm at which gradients are clipped; 0: never.")

    @field_validator("betas", mode="before")
    @classmethod
    def _betas(cls, value: Any) -> Any:
        return tuple(cast("list[Any]", value)) if isinstance(value, list) else value

    @field_validator("betas")
    @classmethod
    def _range(cls, value: tuple[float, float]) -> tuple[float, float]:
        if not all(0 <= beta < 1 for beta in value):
            raise ValueError(f"each must be at least 0 and below 1, not {list(value)}")
        return value

    @model_validator(mode="after")
    def _one_warmup(self) -> Self:
        if self.warmup_steps and self.warmup_ratio:
            raise fault_at("warmup_ratio", "says the same as warmup_steps: keep one of them")
        if self.schedule == "constant" and (self.warmup_steps or self.warmup_ratio):
            key = "warmup_steps" if self.warmup_steps else "warmup_ratio"
            raise fault_at(key, 'has no meaning with schedule = "constant": set "constant_with_warmup", or remove it')
        if self.min_lr_ratio and self.schedule != "cosine_with_min_lr":
            raise fault_at("min_lr_ratio", f'has no meaning with schedule = "{self.schedule}": remove it')
        if self.momentum and self.kind != "sgd":
            raise fault_at("momentum", f'has no meaning with kind = "{self.kind}": remove it')
        return self


class BudgetSection(Section):
    max_steps: int | None = Field(default=None, ge=1, le=10**9, description="Total optimiser steps.")
    epochs: float | None = Field(default=None, gt=0, le=10**6, description="Passes over the data.")

    @model_validator(mode="after")
    def _one(self) -> Self:
        if (self.max_steps is None) == (self.epochs is None):
            raise ValueError("give max_steps or epochs, one of them")
        return self


class LoraSection(Section):
    r: int = Field(default=16, ge=1, le=4096, description="Rank.")
    alpha: float = Field(default=32, gt=0, description="Scale of the update: alpha / r.")
    dropout: float = Field(default=0.0, ge=0, lt=1, description="Dropout of the adapter's input.")
    target_modules: str | list[str] = Field(default="all-linear", description="Layers to adapt.")


class EvalSection(Section):
    every_steps: int = Field(default=0, ge=0, description="Steps between evaluations; 0: at the end of each segment.")
    patience: int = Field(
        default=0, ge=0, description="Stop after this many evaluations without a lower loss; 0: never."
    )
    min_delta: float = Field(default=0.0, ge=0, description="Smallest decrease of the loss that counts.")


class RowsSection(Section):
    """How rows with a fault are treated.

    error: all are reported and training does not start; drop: left out and counted; keep: used as they are and counted.
    """

    no_supervised_token: Policy = Field(default="error", description="No token would be learnt.")
    stop_token_outside: Policy = Field(default="error", description="The turn's end would not be learnt.")
    merged_at_seam: Policy = Field(default="error", description="The tokenizer merges tokens of prompt and completion.")
    two_bos: Policy = Field(default="error", description="The row starts with two beginning-of-sequence tokens.")
    too_long: Policy = Field(
        default="error",
        description="The row exceeds max_length or the model's positions; keep: truncate.",
    )
    empty_completion: Policy = Field(default="error", description="The completion has no token.")
    message_ignored: Policy = Field(default="error", description="The chat template drops a message or its tool calls.")
    tools_ignored: Policy = Field(default="error", description="The chat template drops the row's tools.")
    identical_pair: Policy = Field(default="error", description="Chosen and rejected have the same tokens.")


Reference = Field(
    default="base",
    description="Reference of the policy; base: the initial model; free: none; or a model's uri.",
)


class TrainingSection(Section):
    """The keys that all algorithms share."""

    base_model: Annotated[ModelSection, BeforeValidator(as_uri)] = Field(description="The model to begin with.")
    dataset: Annotated[DatasetSection, BeforeValidator(as_path)] = Field(description="The rows that are trained on.")
    eval_dataset: Annotated[DatasetSection | None, BeforeValidator(as_path)] = Field(
        default=None, description="Rows that are not trained on."
    )
    eval: EvalSection = EvalSection()
    rows: RowsSection = RowsSection()
    optimizer: OptimizerSection
    budget: BudgetSection
    minibatch_size: int = Field(default=8, ge=1, le=1 << 20, description="Rows or pairs per device and pass.")
    gradient_accumulation: int = Field(default=1, ge=1, le=1 << 20, description="Minibatches per step and device.")
    max_length: int = Field(default=1024, ge=2, le=1 << 24, description="Maximum tokens of a row.")
    lora: LoraSection | None = Field(default=None, description="Train an adapter instead of the model.")
    precision: Literal["fp32", "bf16"] = Field(
        default="fp32", description="Precision of products; weights stay in fp32."
    )
    gradient_checkpointing: bool = Field(default=False, description="Trade time for memory.")
    attention: Literal["sdpa", "eager", "flash_attention_2"] = Field(
        default="sdpa", description="Implementation of attention."
    )
    compile: bool = Field(default=False, description="Use torch.compile.")
    device: Literal["cpu", "cuda"] | None = Field(
        default=None, description="Unset: cuda if the worker has it, else cpu."
    )
    devices: int = Field(default=1, ge=1, le=64, description="Number of GPUs on one host, or of CPU processes.")
    strategy: Literal["single", "ddp", "fsdp"] = Field(
        default="single",
        description="ddp: each device holds the whole model; fsdp: a share of weights, gradients and moments.",
    )
    threads: int = Field(default=1, ge=1, le=1024, description="CPU threads per process; affects results.")
    disable_dropout: bool = Field(default=False, description="Train without dropout.")
    seed: int = Field(default=0, ge=0, lt=1 << 63, description="Seed of row order, new weights and dropout.")

    @model_validator(mode="after")
    def _fits(self) -> Self:
        raise_faults(self.rules())
        return self

    def rules(self) -> Iterator[tuple[str, str]]:
        """Yield (key, fault) for keys that contradict each other."""
        if (self.devices > 1) != (self.strategy != "single"):
            yield (
                "strategy" if "strategy" in self.model_fields_set else "devices",
                f'devices = {self.devices} and strategy = "{self.strategy}" do not fit: "single" is for one device, '
                '"ddp" and "fsdp" for several',
            )
        if self.eval_dataset is None and self.eval != EvalSection():
            yield "eval", "has no meaning without eval_dataset: name the rows that evaluations take"
        if self.budget.max_steps is not None and self.optimizer.warmup_steps > self.budget.max_steps:
            yield (
                "optimizer.warmup_steps",
                f"is {self.optimizer.warmup_steps}, more than all {self.budget.max_steps} steps of the run: the rate "
                "would never reach lr",
            )
        if self.compile and self.strategy == "fsdp":
            yield (
                "compile",
                'does not go together with strategy = "fsdp", which gathers weights between the layers: set it to '
                'false, or strategy = "ddp"',
            )

    @property
    def step_rows(self) -> int:
        """Rows of one optimiser step over all devices."""
        return self.minibatch_size * self.gradient_accumulation * self.devices

    @property
    def compared(self) -> str:
        """The model that the policy is compared with, as `reference` names it; `free` if there is none."""
        return "free"
