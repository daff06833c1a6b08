"""The configuration of `rollout train`: models and the rules that concern several keys."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self, cast

from pydantic import BeforeValidator, Field, field_validator, model_validator

from rollout.config.cloud import WithCloud
from rollout.config.declared import KEPT, Setting
from rollout.config.renamed import Renamed
from rollout.config.section import Section, fault_at
from rollout.workloads.sections import OutputPlace, WorkersSection
from rollout.workloads.train.aliases import renamed

Kind = Literal["sft", "rm", "dpo", "ipo", "kto"]
KINDS: tuple[Kind, ...] = ("sft", "rm", "dpo", "ipo", "kto")
Policy = Literal["error", "drop", "keep"]


def _uri(value: Any) -> Any:
    return {"uri": value} if isinstance(value, str) else value  # pyright: ignore[reportUnknownVariableType]


class ModelSection(Section):
    uri: str = Field(
        min_length=1,
        description="Local directory, Hugging Face name, snapshot:ID or run:RUN_ID (its last snapshot).",
    )
    revision: str | None = Field(default=None, description="Branch, tag or commit of a Hugging Face name.")
    tokenizer: str | None = Field(default=None, description="Another tokenizer than the model's: directory or name.")
    chat_template: str | None = Field(
        default=None, description="File of a chat template, or the name of one of ours; default: the tokenizer's."
    )


class DatasetSection(Section):
    kind: Literal["jsonl_path", "parquet_path", "dataset_path"] = Field(
        default="jsonl_path",
        description="jsonl_path: JSON Lines, plain, .gz or .zst; parquet_path; dataset_path: what Dataset.save_to_disk "
        "wrote. Default: parquet_path where the path ends so, else jsonl_path.",
    )
    path: str | list[str] = Field(description="File(s), pattern(s) or directory; or s3:// and gs:// URLs of such.")
    split: str | None = Field(
        default=None, description="dataset_path: of a DatasetDict; default: its only one, or train."
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


def _kind(value: Any) -> Any:
    return cast(Any, {"kind": value} if isinstance(value, str) else value)


def _path(value: Any) -> Any:
    return cast(Any, {"path": value} if isinstance(value, str | list) else value)


Schedule = Literal[
    "constant", "constant_with_warmup", "linear", "cosine", "cosine_with_min_lr", "polynomial", "inverse_sqrt"
]


class OptimizerSection(Section):
    kind: Literal["adamw", "adam", "sgd"] = Field(default="adamw", description="torch.optim's.")
    lr: float = Field(gt=0, le=1e3, description="Learning rate at its highest.")
    weight_decay: float = Field(default=0.0, ge=0, le=10, description="Not of biases and norms.")
    betas: tuple[float, float] = Field(default=(0.9, 0.999), description="adamw, adam.")
    momentum: float = Field(default=0.0, ge=0, lt=1, description="sgd.")
    eps: float = Field(default=1e-8, gt=0, le=1, description="adamw, adam.")
    schedule: Schedule = Field(default="linear", description="Of the learning rate, after the warm-up.")
    warmup_steps: int = Field(default=0, ge=0, description="Steps over which the rate grows from 0.")
    warmup_ratio: float = Field(default=0.0, ge=0, lt=1, description="The same as a share of all steps.")
    min_lr_ratio: float = Field(default=0.0, ge=0, le=1, description="cosine_with_min_lr: the end, as a share of lr.")
    max_grad_norm: float = Field(default=1.0, ge=0, description="Gradients are scaled down to this norm; 0: never.")

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
        if self.min_lr_ratio and self.schedule != "cosine_with_min_lr":
            raise fault_at("min_lr_ratio", f'has no meaning with schedule = "{self.schedule}": remove it')
        if self.momentum and self.kind != "sgd":
            raise fault_at("momentum", f'has no meaning with kind = "{self.kind}": remove it')
        return self


class BudgetSection(Section):
    max_steps: int | None = Field(default=None, ge=1, le=10**9, description="Optimiser steps in all.")
    epochs: float | None = Field(default=None, gt=0, le=10**6, description="Passes over the data.")

    @model_validator(mode="after")
    def _one(self) -> Self:
        if (self.max_steps is None) == (self.epochs is None):
            raise ValueError("give max_steps or epochs, one of them")
        return self


class PackingSection(Section):
    kind: Literal["off", "best_fit"] = Field(
        default="off", description="best_fit: several rows in one sequence, none of which sees another."
    )
    max_seq_len: int | None = Field(
        default=None, ge=2, le=1 << 24, description="Tokens of a sequence at most; default: max_length."
    )


class LossOnSection(Section):
    kind: Literal["all", "completion_only", "assistant_only"] = Field(
        default="completion_only",
        description="Tokens that are learnt. all: every one; completion_only: the completion, or the last message; "
        "assistant_only: every message of the assistant, by the template's generation markers.",
    )

    @field_validator("kind", mode="before")
    @classmethod
    def _full(cls, value: Any) -> Any:
        return "all" if value == "full" else value


class LoraSection(Section):
    r: int = Field(default=16, ge=1, le=4096, description="Rank.")
    alpha: float = Field(default=32, gt=0, description="The update counts alpha / r.")
    dropout: float = Field(default=0.0, ge=0, lt=1, description="Of the adapter's input.")
    target_modules: str | list[str] = Field(default="all-linear", description="Layers that get an adapter.")


class EvalSection(Section):
    every_steps: int = Field(default=0, ge=0, description="Steps between evaluations; 0: at the end of each segment.")
    patience: int = Field(default=0, ge=0, description="Stop after so many evaluations without a lower loss; 0: never.")
    min_delta: float = Field(default=0.0, ge=0, description="By how much a loss must be lower to count.")


class RowsSection(Section):
    """What becomes of rows with a fault.

    error: all are told and training does not start; drop: left out and counted; keep: used as they are and counted.
    """

    no_supervised_token: Policy = Field(default="error", description="Nothing in it would be learnt.")
    stop_token_outside: Policy = Field(default="error", description="The end of the turn would not be learnt.")
    merged_at_seam: Policy = Field(default="error", description="The tokenizer joins prompt and completion.")
    two_bos: Policy = Field(default="error", description="Two beginning-of-sequence tokens at the start.")
    too_long: Policy = Field(
        default="error",
        description="More tokens than max_length or than the model has learnt positions; keep: cut off at the end.",
    )
    empty_completion: Policy = Field(default="error", description="A completion without a token.")
    message_ignored: Policy = Field(
        default="error", description="The chat template leaves out a message, or its tool calls."
    )
    tools_ignored: Policy = Field(default="error", description="The chat template leaves out the tools of the row.")
    identical_pair: Policy = Field(default="error", description="Chosen and rejected are the same tokens.")


class TrainingSection(Section):
    """What every algorithm has."""

    base_model: Annotated[ModelSection, BeforeValidator(_uri)] = Field(description="The model to begin with.")
    dataset: Annotated[DatasetSection, BeforeValidator(_path)] = Field(description="The rows that are trained on.")
    eval_dataset: Annotated[DatasetSection | None, BeforeValidator(_path)] = Field(
        default=None, description="Rows that are not trained on."
    )
    eval: EvalSection = EvalSection()
    rows: RowsSection = RowsSection()
    optimizer: OptimizerSection
    budget: BudgetSection
    minibatch_size: int = Field(default=8, ge=1, le=1 << 20, description="Rows (pairs) at once on each device.")
    gradient_accumulation: int = Field(default=1, ge=1, le=1 << 20, description="Minibatches of a step on each device.")
    max_length: int = Field(default=1024, ge=2, le=1 << 24, description="Tokens of a row at most.")
    lora: LoraSection | None = Field(default=None, description="Train an adapter instead of the model.")
    precision: Literal["fp32", "bf16"] = Field(
        default="fp32", description="bf16: products are in bf16, weights stay in fp32."
    )
    gradient_checkpointing: bool = Field(default=False, description="Less memory, more time.")
    attention: Literal["sdpa", "eager", "flash_attention_2"] = Field(default="sdpa", description="Implementation.")
    compile: bool = Field(default=False, description="torch.compile the model.")
    device: Literal["cpu", "cuda"] | None = Field(
        default=None, description="Unset: cuda if torch.cuda.is_available() on the worker, else cpu."
    )
    devices: int = Field(default=1, ge=1, le=64, description="GPUs of one host, or processes on the CPU.")
    strategy: Literal["single", "ddp", "fsdp"] = Field(
        default="single",
        description="ddp: each device has the whole model; fsdp: each a share of every weight, gradient and moment.",
    )
    threads: int = Field(default=1, ge=1, le=1024, description="Threads of a process on the CPU: results depend on it.")
    disable_dropout: bool = Field(default=False, description="Train without dropout.")
    seed: int = Field(default=0, ge=0, lt=1 << 63, description="Of the order of rows, new weights and dropout.")

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if (self.devices > 1) != (self.strategy != "single"):
            raise fault_at(
                "strategy" if "strategy" in self.model_fields_set else "devices",
                f'devices = {self.devices} and strategy = "{self.strategy}" do not fit: "single" is for one device, '
                '"ddp" and "fsdp" for several',
            )
        if self.eval_dataset is None and self.eval != EvalSection():
            raise fault_at("eval", "has no meaning without eval_dataset: name the rows that evaluations take")
        if self.budget.max_steps is not None and self.optimizer.warmup_steps > self.budget.max_steps:
            raise fault_at(
                "optimizer.warmup_steps",
                f"is {self.optimizer.warmup_steps}, more than all {self.budget.max_steps} steps of the run: the rate "
                "would never reach lr",
            )
        if self.compile and self.strategy == "fsdp":
            raise fault_at(
                "compile",
                'does not go together with strategy = "fsdp", which gathers weights between the layers: set it to '
                'false, or strategy = "ddp"',
            )
        return self

    @property
    def compared(self) -> str:
        """What the policy is compared with, as `reference` names it; free: nothing."""
        return "free"

    @property
    def step_rows(self) -> int:
        """Rows of one optimiser step, over all devices."""
        return self.minibatch_size * self.gradient_accumulation * self.devices


class SftSection(TrainingSection):
    loss_on: LossOnSection = LossOnSection()
    packing: Annotated[PackingSection | None, BeforeValidator(_kind)] = None

    @property
    def length(self) -> int:
        """Tokens of a row at most."""
        return (self.packing.max_seq_len if self.packing is not None else None) or self.max_length

    @property
    def packed(self) -> bool:
        return self.packing is not None and self.packing.kind != "off"

    @model_validator(mode="after")
    def _one_length(self) -> Self:
        given = self.max_length != type(self).model_fields["max_length"].default  # a worker is told every key
        if self.packing is not None and given and self.packing.max_seq_len not in (None, self.max_length):
            raise fault_at(
                "packing.max_seq_len",
                f"is {self.packing.max_seq_len} and max_length is {self.max_length}, which is the same thing: keep one",
            )
        if self.packed and self.attention == "flash_attention_2":
            raise fault_at("attention", '"flash_attention_2" cannot keep packed rows apart: use "sdpa"')
        return self


class HeadSection(Section):
    kind: Literal["bradley_terry", "pairwise_logistic"] = Field(default="bradley_terry", description="Of the loss.")
    scale: float = Field(default=1.0, gt=0, description="pairwise_logistic: of the difference of scores.")


class RmSection(TrainingSection):
    head: Annotated[HeadSection, BeforeValidator(_kind)] = HeadSection()
    centre: float = Field(default=0.0, ge=0, description="Weight of the squared sum of a pair's scores.")
    disable_dropout: bool = Field(default=True, description="Train without dropout.")


Reference = Field(
    default="base",
    description="What a policy is compared with. base: the model it began as; free: nothing; or a model's uri.",
)


class PreferenceSection(TrainingSection):
    beta: float = Field(default=0.1, gt=0, le=1e3, description="How dear it is to leave the reference.")
    reference: str = Reference
    disable_dropout: bool = Field(default=True, description="Train without dropout.")

    @property
    def compared(self) -> str:
        return self.reference


class DpoSection(PreferenceSection):
    loss_type: Literal["sigmoid", "hinge"] = Field(default="sigmoid", description="Of the margin.")
    label_smoothing: float = Field(
        default=0.0, ge=0, lt=0.5, description="Share of pairs that are thought to be the wrong way round."
    )

    @field_validator("loss_type", mode="before")
    @classmethod
    def _list(cls, value: Any) -> Any:
        return value[0] if isinstance(value, list) and len(value) == 1 else value  # pyright: ignore

    @model_validator(mode="after")
    def _smoothing(self) -> Self:
        if self.label_smoothing and self.loss_type == "hinge":
            raise fault_at("label_smoothing", 'has no meaning with loss_type = "hinge": remove it')
        return self


class IpoSection(PreferenceSection):
    pass


class KtoSection(PreferenceSection):
    desirable_weight: float = Field(default=1.0, gt=0, description="Of rows whose label is true.")
    undesirable_weight: float = Field(default=1.0, gt=0, description="Of rows whose label is false.")

    @model_validator(mode="after")
    def _partner(self) -> Self:
        if self.step_rows < 2:
            raise fault_at("minibatch_size", "makes steps of one row, which has no other to compare with: raise it")
        return self


class AlgorithmSection(Section):
    kind: Kind = Field(description="sft, rm, dpo, ipo or kto.")
    sft: SftSection | None = None
    rm: RmSection | None = None
    dpo: DpoSection | None = None
    ipo: IpoSection | None = None
    kto: KtoSection | None = None

    @model_validator(mode="after")
    def _section(self) -> Self:
        if getattr(self, self.kind) is None:
            raise ValueError(f"[algorithm.{self.kind}] is missing: it holds the settings of {self.kind}")
        if others := [kind for kind in KINDS if kind != self.kind and getattr(self, kind) is not None]:
            raise fault_at(others[0], f'algorithm.kind is "{self.kind}": remove this section, or change kind')
        return self

    @property
    def settings(self) -> TrainingSection:
        return getattr(self, self.kind)


MAX_AGE = r"^[1-9][0-9]{0,8}[smhdw]$"
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}


def age_s(text: str) -> int:
    """Seconds of a number and a unit as `MAX_AGE` has them: 90s, 15m, 12h, 30d, 2w."""
    return int(text[:-1]) * _SECONDS[text[-1]]


class StartSection(Section):
    """Where the run begins: at the state that another one left. `rollout train fork` and `--resume snapshot:ID` set
    it."""

    uri: str = Field(description="snapshot:ID, or run:RUN.")
    step: int | None = Field(
        default=None, ge=1, description="Of run:RUN: after this step, at which a segment ended; default: its last."
    )

    @model_validator(mode="after")
    def _named(self) -> Self:
        kind, _, text = self.uri.partition(":")
        if kind not in ("snapshot", "run") or not text:
            raise ValueError(f"uri: {self.uri!r} is neither snapshot:ID nor run:RUN")
        if self.step is not None and kind == "snapshot":
            raise ValueError("step: a snapshot is of one step; remove it, or name the run: run:RUN")
        return self


class SnapshotsSection(Section):
    every_steps: int = Field(default=100, ge=1, description="Steps between snapshots: a segment, what a crash costs.")
    keep_last: Annotated[int, KEPT] = Field(
        default=3,
        ge=0,
        description="So many of a run's snapshots are kept, the newest; older ones go as newer ones come. 0: all.",
    )
    keep_labeled: Annotated[bool, KEPT] = Field(
        default=True, description="A snapshot with a label stays, whatever keep_last and max_age say."
    )
    max_age: Annotated[str | None, KEPT] = Field(
        default=None,
        pattern=MAX_AGE,
        description="Snapshots that are older than this when a newer one comes go too, such as 12h or 30d.",
    )
    label: Annotated[str, KEPT] = Field(default="", max_length=200, description="Of the run's last snapshot.")

    @property
    def max_age_s(self) -> int | None:
        return None if self.max_age is None else age_s(self.max_age)


class OutputSection(OutputPlace):
    dir: str = Field(
        min_length=1,
        description="Directory of run-id, metrics.jsonl, curves.png and summary.json: a path, s3:// or gs:// URL.",
    )
    model: bool = Field(default=False, description="Also write the trained model, or adapter, to DIR/model.")


class RunSection(Section):
    name: Annotated[str, KEPT] = Field(
        default="", description="By which commands know the run; default: the output directory's."
    )
    priority: Annotated[int, KEPT] = Field(
        default=0, ge=-1000, le=1000, description="Larger gets a larger share of the workers."
    )
    max_worker_lost: Annotated[int, KEPT] = Field(
        default=20, ge=1, le=1000, description="Workers that one segment may lose."
    )
    allow_different_hardware: Annotated[bool, Setting("--allow-different-hardware", on_resume="keep")] = Field(
        default=False,
        description="Go on where the same input would not give the same bytes; summary.json says from which step on.",
    )


class TrainConfig(WithCloud):
    algorithm: AlgorithmSection
    start: StartSection | None = Field(default=None, description="Go on from the state of another run.")
    snapshots: SnapshotsSection = SnapshotsSection()
    output: OutputSection
    workers: WorkersSection = WorkersSection()
    run: RunSection = RunSection()

    @classmethod
    def renamed(cls, values: dict[str, Any]) -> Renamed:
        """With TRL's names of keys."""
        return renamed(values, {kind: section.model_fields for kind, section in SECTIONS.items()})


SECTIONS: dict[Kind, type[TrainingSection]] = {
    "sft": SftSection,
    "rm": RmSection,
    "dpo": DpoSection,
    "ipo": IpoSection,
    "kto": KtoSection,
}
