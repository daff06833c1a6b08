"""The resolved experiment: everything that determines its results, as one JSON object with a canonical digest."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from rollout.workloads.experiment.config import ExperimentConfig, VariantKeys
from rollout.workloads.experiment.contracts import Slot, sha256_of
from rollout.workloads.experiment.schedule import schedule
from rollout.workloads.experiment.tasks import Task
from rollout.workloads.json_form import JsonObject, canonical

_OF_COMMANDS = {"workers", "runs_dir"}
"""Keys of the file that do not affect results."""


@dataclass(frozen=True)
class Resolved:
    """`tasks_digest` is that of the data set's rows. `artifact` and `assets` are content ids, in hex, of the agent's
    and the grader's files, "" if there are none. `models` are those of `Engines`."""

    config: ExperimentConfig
    tasks: tuple[Task, ...]
    tasks_digest: str
    artifact: str = ""
    assets: str = ""
    models: Mapping[str, str] = field(default_factory=dict[str, str])

    @cached_property
    def variants(self) -> tuple[VariantKeys, ...]:
        return tuple(self.config.variants)

    @cached_property
    def slots(self) -> tuple[Slot, ...]:
        design = self.config.design
        return tuple(schedule(design.order, len(self.variants), len(self.tasks), design.replications, design.seed))

    @cached_property
    def chains(self) -> tuple[str | None, ...]:
        """The chain of each slot, as `chain_of` returns it."""
        names = [(self.variants[one.variant_idx].variant_id, self.tasks[one.task_idx].task_id) for one in self.slots]
        return tuple(chain_of(self.config, *name) for name in names)

    @cached_property
    def json(self) -> JsonObject:
        """resolved_experiment.json, with defaults explicit and files by content."""
        values = self.config.model_dump(mode="json", exclude=_OF_COMMANDS)
        dataset = {**values["dataset"], "digest": self.tasks_digest, "task_ids": [task.task_id for task in self.tasks]}
        frozen: JsonObject = {"artifact": self.artifact or None, "assets": self.assets or None}
        if self.models:
            frozen["models"] = dict(self.models)
        return {**values, "dataset": dataset, "frozen": frozen, "total_slots": len(self.slots)}

    @cached_property
    def digest(self) -> str:
        return digest_of(self.json)

    def image_of(self, variant: VariantKeys, task: Task) -> str | None:
        """Return the image: the task's if each has its own, else the variant's, else the runtime's."""
        return task.image if self.config.is_per_task else variant.image or self.config.image


def digest_of(resolved: JsonObject) -> str:
    """Return resolved_experiment.digest: SHA-256 of the canonical JSON, in hex."""
    return sha256_of(canonical(resolved))


def chain_of(config: ExperimentConfig, variant_id: str, task_id: str) -> str | None:
    """Return the id of a trial's chain, or None if it starts with a workspace of its own."""
    match config.policy.state_policy:
        case "isolate_per_trial":
            return None
        case "persist_per_task":
            return f"{variant_id}/{task_id}"
        case "accumulate":
            return variant_id


def positions(chains: Sequence[str | None]) -> list[int]:
    """Return the position of each trial in its chain, in the order of the schedule."""
    seen: dict[str, int] = {}
    found: list[int] = []
    for chain in chains:
        number = seen.get(chain, 0) if chain is not None else 0
        found.append(number)
        if chain is not None:
            seen[chain] = number + 1
    return found


def config_of(resolved: JsonObject) -> ExperimentConfig:
    """Return the configuration from which `Resolved.json` was made."""
    values = {key: value for key, value in resolved.items() if key not in ("frozen", "total_slots")}
    dataset = {key: value for key, value in values["dataset"].items() if key not in ("digest", "task_ids")}
    return ExperimentConfig.model_validate({**values, "dataset": dataset}, strict=False)
