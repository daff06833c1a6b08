"""Models that agents' commands query. Each is an engine of the cluster, an executor `infer:N` of the run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from rollout.model.errors import ConfigError
from rollout.model.problems import faults_of, problems
from rollout.workloads.experiment.config import ExperimentConfig
from rollout.workloads.job.engine import EngineSection, ResolvedEngine, resolve_engine
from rollout.workloads.json_form import JsonObject
from rollout.workloads.local_model import Bring
from rollout.workloads.port import Tree


@dataclass(frozen=True)
class Engines:
    """`executors` maps a variant to its model's executor. `models` maps an executor to the content id of its model, or
    "" if a cluster has yet to say which snapshot it is."""

    executors: Mapping[str, str] = field(default_factory=dict[str, str])
    sections: Mapping[str, EngineSection] = field(default_factory=dict[str, EngineSection])
    resolved: Mapping[str, ResolvedEngine] = field(default_factory=dict[str, ResolvedEngine])
    models: dict[str, str] = field(default_factory=dict[str, str])

    def config(self) -> JsonObject:
        """Return sections of `executors` of the run's configuration."""
        return {name: one.config for name, one in self.resolved.items()}

    def trees(self) -> tuple[Tree, ...]:
        return tuple(tree for one in self.resolved.values() for tree in one.trees)

    def snapshots(self) -> tuple[str, ...]:
        return tuple(key for one in self.resolved.values() for key in one.snapshots)

    def notes(self) -> Iterator[str]:
        for one in self.resolved.values():
            yield from one.notes

    def identity(self, variant: str) -> JsonObject:
        """Return the properties of a variant's model that affect its trials; empty if it has none."""
        name = self.executors.get(variant, "")
        return {"engine": self.sections[name].identity(), "model": self.models[name]} if name else {}


NO_ENGINES = Engines()


def engines_of(config: ExperimentConfig) -> Iterator[tuple[str, str, EngineSection]]:
    """Yield (variant, key in the file, engine) for each variant with an engine: its own, or the runtime's."""
    for index, variant in enumerate(config.variants):
        if variant.engine is not None:
            yield variant.variant_id, "baseline" if index == 0 else f"variant_plan.{index - 1}", variant.engine
        elif config.runtime.engine is not None:
            yield variant.variant_id, "runtime", config.runtime.engine


def model_of(variant: str, config: ExperimentConfig, executors: JsonObject) -> tuple[str | None, str | None]:
    """Return (uri, content id) of a variant's model. `executors` are those of the run's configuration."""
    found = {name: section for name, _, section in engines_of(config)}
    if variant not in found:
        return None, None
    sections = list[EngineSection]()
    for section in found.values():
        if section not in sections:
            sections.append(section)
    known: JsonObject = executors.get(_name(sections.index(found[variant])), {}).get("model", {})
    return found[variant].model.uri, known.get("content_id", "")


def _name(index: int) -> str:
    return f"infer:{index + 1}"


def resolve_engines(config: ExperimentConfig, bring: Bring) -> Engines:
    """Resolve the engines; variants with equal engines share one. Raises ConfigError with all faults."""
    executors, sections, resolved = dict[str, str](), dict[str, EngineSection](), dict[str, ResolvedEngine]()
    faults: list[str] = []
    for variant, key, section in engines_of(config):
        name = next((name for name, known in sections.items() if known == section), "")
        if not name:
            name = _name(len(sections))
            sections[name] = section
            try:
                resolved[name] = resolve_engine(section, bring, f"executors.{name}")
            except ConfigError as error:
                faults += [f"{key}.{fault}" for fault in faults_of(error.message)]
        executors[variant] = name
    if faults:
        raise ConfigError(problems(faults))
    return Engines(executors, sections, resolved, {name: one.content_id for name, one in resolved.items()})
