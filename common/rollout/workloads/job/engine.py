"""`engine` of job.yaml: a model that engines of the cluster serve. Its generations are items of executor `infer`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Self, cast

from pydantic import Field, field_validator, model_validator

from rollout.config.adapters import find_adapter
from rollout.config.declared import KEPT, on_resume
from rollout.config.section import Section
from rollout.model.errors import ConfigError
from rollout.model.problems import problems
from rollout.workloads.infer.config import (
    BackendSection,
    ModelSection,
    SamplingSection,
    check_together,
    load_schema,
)
from rollout.workloads.infer.engine_checks import check_options, check_package
from rollout.workloads.infer.model import model_json, resolve_model
from rollout.workloads.infer.request import sampling_json
from rollout.workloads.json_form import JsonObject
from rollout.workloads.local_model import Bring, names_snapshot, no_bucket, refuse_unless_whole_model, taken_for_hub
from rollout.workloads.port import FoundSnapshot, Tree

SECTION = "executors.infer"
"""Section of a run's configuration for executor `infer`."""
ANSWER_TOKENS = 4096
_KEYS = ("model.", "backend.", "sampling.")


def _with_room(values: Any) -> Any:
    """Raise the default length, because an agent's answer is longer than a batch row's."""
    if isinstance(values, dict) and "max_tokens" not in values:
        return {"max_tokens": ANSWER_TOKENS, **cast("dict[str, Any]", values)}
    return values  # pyright: ignore[reportUnknownVariableType]


class EngineSection(Section):
    model: ModelSection
    backend: Annotated[BackendSection, KEPT] = BackendSection()
    sampling: SamplingSection = Field(
        default=SamplingSection(max_tokens=ANSWER_TOKENS), description="Of every answer, where its agent says nothing."
    )

    @field_validator("sampling", mode="before")
    @classmethod
    def _sampling(cls, value: Any) -> Any:
        return _with_room(value)

    @model_validator(mode="after")
    def _together(self) -> Self:
        check_together(self.model, self.backend, self.sampling)
        if self.sampling.n != 1:
            raise ValueError(f"sampling.n must be 1, not {self.sampling.n}: an agent asks for one answer at a time")
        return self

    def identity(self) -> JsonObject:
        """Return the part that affects answers."""
        values = self.model_dump(mode="json", exclude_defaults=True)
        kept = on_resume(EngineSection, "keep")
        backend = values.get("backend", {})
        values["backend"] = {key: value for key, value in backend.items() if f"backend.{key}" not in kept}
        return values


@dataclass(frozen=True, slots=True)
class ResolvedEngine:
    """`config` is the section `section` of the run's configuration. `trees` and `snapshots` are those of `Checked`.
    `content_id` changes with the model's files; for a snapshot it is empty until a cluster has resolved it. `notes` are
    for the user."""

    config: JsonObject
    content_id: str
    trees: tuple[Tree, ...]
    snapshots: tuple[str, ...]
    notes: tuple[str, ...] = ()


def resolve_engine(engine: EngineSection, bring: Bring = no_bucket, section: str = SECTION) -> ResolvedEngine:
    """Resolve the engine. `bring` fetches files from buckets. `section` is that of the run's configuration for its
    executor.

    Raises ConfigError with all faults: no such backend, model directory or schema.
    """
    faults: list[str] = []
    try:
        find_adapter("rollout.backends", engine.backend.kind, "engine.backend.kind")
    except ConfigError as error:
        faults.append(error.message)
    try:
        model = resolve_model(engine, bring)
        schema = load_schema(engine.sampling.json_schema)
    except ConfigError as error:
        raise ConfigError(problems([*faults, _below(error.message)])) from error
    if faults:
        raise ConfigError(problems(faults))
    sampling = engine.sampling if schema is None else engine.sampling.model_copy(update={"json_schema": schema})
    return ResolvedEngine(
        config={
            "model": model_json(engine.model, model),
            "sampling": sampling_json(sampling),
            "backend": engine.backend.model_dump(mode="json"),
        },
        content_id=model.content_id,
        trees=model.trees(f"{section}.model"),
        snapshots=(f"{section}.model",) if names_snapshot(engine.model.uri) else (),
        notes=(f"engine.model.uri: {hint}",) if (hint := taken_for_hub(model)) else (),
    )


def check_engine_host(engine: EngineSection, workload: str) -> None:
    """Raise ConfigError if this host, where workers will start, lacks the engine's package or some of its arguments."""
    check_package(engine.backend.kind, "engine.backend.kind", workload)
    check_options(engine.backend, "engine.backend.engine")


def check_engine_snapshot(snapshot: FoundSnapshot) -> None:
    """Raise ConfigError if the snapshot that `engine.model.uri` names does not hold a complete language model."""
    refuse_unless_whole_model(snapshot.config, "engine.model.uri")


def _below(message: str) -> str:
    return f"engine.{message}" if message.startswith(_KEYS) else message
