"""The workload `infer`: rows of JSONL through a model."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rollout.cloud.url import BucketUrl
from rollout.config.adapters import find_adapter
from rollout.model.counts import counted
from rollout.model.errors import ConfigError, InputError, RolloutError
from rollout.model.item import ItemLimits, NewItem, limits_of
from rollout.model.problems import problems
from rollout.workloads.infer.config import InferConfig
from rollout.workloads.infer.lines import COMPLETIONS, ERRORS, OPENAI, InferWriter
from rollout.workloads.infer.model import ResolvedModel, resolve_model
from rollout.workloads.infer.payload import Payload, decode_payload
from rollout.workloads.infer.plan import plan, resolve_config, taker
from rollout.workloads.infer.rows import check_input, effective_sampling, model_check
from rollout.workloads.invalid import invalid_of
from rollout.workloads.json_form import JsonObject
from rollout.workloads.local_model import model_changes, names_snapshot, refuse_unless_whole_model
from rollout.workloads.port import (
    Checked,
    FoundSnapshot,
    QueueInput,
    Reading,
    Tree,
    Workload,
    describe_queue,
    queue_input,
)
from rollout.workloads.sections import CHANGEABLE, RECORDED, RunSection
from rollout.workloads.source import NO_ROWS, InputReport, Line, Source

_PACKAGE = {"vllm": "vllm", "transformers": "transformers"}
_GATED = ("meta-llama/", "mistralai/", "google/gemma")


@dataclass(kw_only=True)
class InferChecked(Checked):
    settings: InferConfig
    model: ResolvedModel
    report: InputReport


def check_package(kind: str, key: str, what: str) -> None:
    """ConfigError: this host lacks the engine of that kind. `key`: where it was named; `what`: is sent elsewhere."""
    package = _PACKAGE.get(kind)
    if package and find_spec(package) is None:
        raise ConfigError(
            f'{key}: "{kind}" needs the Python package {package}, which this host lacks: pip install '
            f'"rollout-engine[{kind}]", or send the {what} to a cluster that has it: --coordinator HOST:PORT'
        )


class Infer(Workload[InferConfig, InferChecked]):
    name = "infer"
    details = "Run every row of the input through a model, exactly once, and write completions in input order."
    settings = InferConfig
    sections = frozenset(InferConfig.model_fields)
    verb = "batch"
    measure = "tokens"
    result_files = (COMPLETIONS, ERRORS, "summary.json", OPENAI)
    changeable = CHANGEABLE
    # What changes how, not what.
    recorded = RECORDED | {
        f"backend.{key}"
        for key in (
            "concurrency", "delay_ms", "jitter_ms", "max_num_seqs", "fail_rate", "fail_match",
            "gpu_memory_utilization", "tensor_parallel_size", "device", "enforce_eager", "cpu_kvcache_gib", "engine",
        )
    }  # fmt: skip

    def directory(self, settings: InferConfig) -> Path:
        return settings.output.directory

    def bucket(self, settings: InferConfig) -> BucketUrl | None:
        return settings.output.bucket

    def workers(self, settings: InferConfig) -> int:
        return settings.workers.count

    def check_host(self, settings: InferConfig) -> None:
        check_package(settings.backend.kind, "backend.kind", "batch")

    def check(self, settings: InferConfig, reading: Reading) -> InferChecked:
        """Of the backend only its name: a batch may be sent to workers that have what this host lacks."""
        faults: list[RolloutError] = []
        model: ResolvedModel | None = None
        found: tuple[Source, InputReport] | None = None
        queue: QueueInput | None = None
        try:
            find_adapter("rollout.backends", settings.backend.kind, "backend.kind")
        except ConfigError as error:
            faults.append(error)
        try:
            model = resolve_model(settings, reading.directory)
        except ConfigError as error:
            faults.append(error)
        try:
            if settings.input.queue:
                effective_sampling(settings)
                queue = queue_input(settings.input, settings.cloud)
            else:
                found = check_input(settings, reading)
        except (ConfigError, InputError) as error:
            faults.append(error)
        if faults or model is None:
            if found is not None:
                found[0].close()
            raise faults[0] if len(faults) == 1 else ConfigError(problems(fault.message for fault in faults))
        source, report = found or (None, NO_ROWS)
        directories = (("model.manifest", model.path), ("model.tokenizer_manifest", model.tokenizer_path))
        return InferChecked(
            config=resolve_config(settings, report, model, queue),
            total=report.rows,
            source=source,
            queue=queue,
            trees=tuple(Tree(key, path) for key, path in directories if path is not None),
            snapshots=("model",) if names_snapshot(settings.model.uri) else (),
            settings=settings,
            model=model,
            report=report,
        )

    def found(self, checked: InferChecked, key: str, snapshot: FoundSnapshot) -> None:
        refuse_unless_whole_model(snapshot.config, f"{key}.uri")
        super().found(checked, key, snapshot)

    def limits(self, config: JsonObject) -> ItemLimits:
        return limits_of(RunSection.model_validate(config["run"]).item_spec())

    def plan(self, checked: InferChecked, config: JsonObject, start: int) -> Iterator[NewItem]:
        run = RunSection.model_validate(config["run"])
        return plan(checked.settings, config["model"]["content_id"], checked.lines(start), run)

    def taker(self, checked: InferChecked, config: JsonObject) -> Callable[[Line], NewItem]:
        run = RunSection.model_validate(config["run"])
        return taker(checked.settings, config["model"]["content_id"], run, model_check(checked.settings))

    def writer(self, config: JsonObject) -> InferWriter:
        return InferWriter(config)

    def item_input(self, payload: bytes) -> tuple[Any, str]:
        bad = invalid_of(payload)
        row = decode_payload(payload) if bad is None else bad
        return row.row if isinstance(row, Payload) else row.input, f"{row.file}:{row.line}"

    def output_for(self, first: Any) -> JsonObject:
        """Lines of an OpenAI batch want answers in the same format."""
        return {"openai": True} if isinstance(first, dict) and "body" in first else {}

    def describe(self, settings: InferConfig, checked: InferChecked) -> list[str]:
        report = checked.report
        rows = counted(report.rows - report.invalid, "row")
        return [
            f"model {settings.model.uri} on backend {settings.backend.kind}",
            *(
                describe_queue(checked.queue)
                if checked.queue
                else [f"{rows} in {counted(len(report.files), 'file')} ({report.bytes} bytes)"]
            ),
            f"writes completions.jsonl, errors.jsonl and summary.json to {settings.output.dir}",
            f"workers when no coordinator is named: {settings.workers.count}",
        ]

    def dry_run(self, settings: InferConfig, checked: InferChecked) -> JsonObject:
        fields = {"model": settings.model.uri, **super().dry_run(settings, checked)}
        return {**fields, "invalid": checked.report.invalid} if checked.report.invalid else fields

    def warnings(self, settings: InferConfig) -> list[str]:
        uri = settings.model.uri
        gated = uri.startswith(_GATED) and not Path(uri).exists()
        if gated and not os.environ.get("ROLLOUT_SECRET_HF_TOKEN"):
            return [f"{uri} is gated and ROLLOUT_SECRET_HF_TOKEN is not set"]
        return []

    def describe_change(self, section: str, old: JsonObject, new: JsonObject) -> list[str] | None:
        return model_changes(old, new) if section == "model" else None
