"""Batch inference over JSONL. Three functions around the engine: plan, executor (worker side), collect."""

from rollout.workloads.infer.collect import Collector
from rollout.workloads.infer.config import InferConfig
from rollout.workloads.infer.model import ResolvedModel, resolve_model
from rollout.workloads.infer.output import OutputDirectory
from rollout.workloads.infer.plan import (
    WORKLOAD,
    describe_change,
    describe_ignored,
    plan,
    resolve_config,
    resumed_config,
    run_spec,
)
from rollout.workloads.infer.rows import InputReport, check_input, first_changed_row

__all__ = [
    "WORKLOAD",
    "Collector",
    "InferConfig",
    "InputReport",
    "OutputDirectory",
    "ResolvedModel",
    "check_input",
    "describe_change",
    "describe_ignored",
    "first_changed_row",
    "plan",
    "resolve_config",
    "resolve_model",
    "resumed_config",
    "run_spec",
]
