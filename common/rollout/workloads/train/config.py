"""The configuration of `rollout train`: models and the rules that concern several keys."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self, get_args

from pydantic import BeforeValidator, Field, field_validator, model_validator

from rollout.config.cloud import WithCloud
from rollout.config.declared import KEPT, Setting
from rollout.config.renamed import Renamed
from rollout.config.section import Section, fault_at
from rollout.workloads.sections import OutputPlace, QueuedRun, WorkersSection
from rollout.workloads.train.aliases import renamed
from rollout.workloads.train.base_config import Reference, TrainingSection, as_kind
from rollout.workloads.train.policy_config import GenerationSection, GrpoSection, PolicySection, PpoSection

Kind = Literal["sft", "rm", "dpo", "ipo", "kto", "grpo", "ppo"]
KINDS: tuple[Kind, ...] = get_args(Kind)


class PackingSection(Section):
    kind: Literal["off", "best_fit"] = Field(
        default="off", description="best_fit: pack several isolated rows into one sequence."
    )
    max_seq_len: int | None = Field(
        default=None, ge=2, le=1 << 24, description="Maximum tokens of a packed sequence; default: max_length."
    )


class LossOnSection(Section):
    kind: Literal["all", "completion_only", "assistant_only"] = Field(
        default="completion_only",
        description=(
            "Tokens to learn: all, or those of the completion or last message, or of every assistant message (by "
            "the template's generation markers)."
        ),
    )

    @field_validator("kind", mode="before")
    @classmethod
    def _full(cls, value: Any) -> Any:
        return "all" if value == "full" else value


class SftSection(TrainingSection):
    loss_on: LossOnSection = LossOnSection()
    packing: Annotated[PackingSection | None, BeforeValidator(as_kind)] = None

    @property
    def length(self) -> int:
        """Maximum tokens of a row."""
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
    kind: Literal["bradley_terry", "pairwise_logistic"] = Field(default="bradley_terry", description="Loss of a pair.")
    scale: float = Field(default=1.0, gt=0, description="pairwise_logistic: scale of the score difference.")


class RmSection(TrainingSection):
    head: Annotated[HeadSection, BeforeValidator(as_kind)] = HeadSection()
    centre: float = Field(default=0.0, ge=0, description="Weight of the squared sum of a pair's scores.")
    disable_dropout: bool = Field(default=True, description="Train without dropout.")


class PreferenceSection(TrainingSection):
    beta: float = Field(default=0.1, gt=0, le=1e3, description="Strength of the penalty for leaving the reference.")
    reference: str = Reference
    disable_dropout: bool = Field(default=True, description="Train without dropout.")

    @property
    def compared(self) -> str:
        return self.reference


class DpoSection(PreferenceSection):
    loss_type: Literal["sigmoid", "hinge"] = Field(default="sigmoid", description="Loss of the margin.")
    label_smoothing: float = Field(default=0.0, ge=0, lt=0.5, description="Assumed share of swapped pairs.")

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
    desirable_weight: float = Field(default=1.0, gt=0, description="Weight of rows with label true.")
    undesirable_weight: float = Field(default=1.0, gt=0, description="Weight of rows with label false.")

    @model_validator(mode="after")
    def _partner(self) -> Self:
        if self.step_rows < 2:
            raise fault_at("minibatch_size", "makes steps of one row, which has no other to compare with: raise it")
        return self


class AlgorithmSection(Section):
    kind: Kind = Field(description="Training algorithm.")
    sft: SftSection | None = None
    rm: RmSection | None = None
    dpo: DpoSection | None = None
    ipo: IpoSection | None = None
    kto: KtoSection | None = None
    grpo: GrpoSection | None = None
    ppo: PpoSection | None = None

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
    """Parse an age, a number and a unit as in `MAX_AGE`, to seconds: 90s, 15m, 12h, 30d, 2w."""
    return int(text[:-1]) * _SECONDS[text[-1]]


class StartSection(Section):
    """The state of another run that this one starts from. `rollout train fork` and `--resume snapshot:ID` set it."""

    uri: str = Field(description="snapshot:ID or run:RUN.")
    step: int | None = Field(
        default=None, ge=1, description="run:RUN: step at which a segment ended; default: the last."
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
    every_steps: int = Field(
        default=100, ge=1, description="Steps between snapshots (a segment), which a crash can lose."
    )
    keep_last: Annotated[int, KEPT] = Field(
        default=3,
        ge=0,
        description="Number of newest snapshots to keep; 0: all.",
    )
    keep_labeled: Annotated[bool, KEPT] = Field(
        default=True, description="Keep snapshots with a label, whatever keep_last and max_age say."
    )
    max_age: Annotated[str | None, KEPT] = Field(
        default=None,
        pattern=MAX_AGE,
        description="Age, such as 12h or 30d, beyond which a new snapshot deletes old ones.",
    )
    label: Annotated[str, KEPT] = Field(default="", max_length=200, description="Label of the run's last snapshot.")

    @property
    def max_age_s(self) -> int | None:
        return None if self.max_age is None else age_s(self.max_age)


class OutputSection(OutputPlace):
    dir: str = Field(
        min_length=1,
        description="Directory or s3:// or gs:// URL for run-id, metrics.jsonl, curves.png and summary.json.",
    )
    model: bool = Field(default=False, description="Also write the trained model or adapter to DIR/model.")


class RunSection(QueuedRun):
    max_worker_lost: Annotated[int, KEPT] = Field(
        default=20, ge=1, le=1000, description="Workers that one segment can lose before it fails."
    )
    allow_different_hardware: Annotated[bool, Setting("--allow-different-hardware", on_resume="keep")] = Field(
        default=False,
        description="Continue on hardware that would give other bytes; summary.json names the step.",
    )


class TrainConfig(WithCloud):
    algorithm: AlgorithmSection
    generation: GenerationSection | None = Field(
        default=None, description="grpo, ppo: what draws the samples, and where."
    )
    start: StartSection | None = Field(default=None, description="Go on from the state of another run.")
    snapshots: SnapshotsSection = SnapshotsSection()
    output: OutputSection
    workers: WorkersSection = WorkersSection()
    run: RunSection = RunSection()

    @model_validator(mode="after")
    def _generates(self) -> Self:
        if self.generation is not None and not isinstance(self.algorithm.settings, PolicySection):
            raise fault_at("generation", f"{self.algorithm.kind} draws no samples: remove this section")
        return self

    @classmethod
    def renamed(cls, values: dict[str, Any]) -> Renamed:
        """Translate TRL's names of keys."""
        return renamed(values, {kind: section.model_fields for kind, section in SECTIONS.items()})


SECTIONS: dict[Kind, type[TrainingSection]] = {
    "sft": SftSection,
    "rm": RmSection,
    "dpo": DpoSection,
    "ipo": IpoSection,
    "kto": KtoSection,
    "grpo": GrpoSection,
    "ppo": PpoSection,
}
