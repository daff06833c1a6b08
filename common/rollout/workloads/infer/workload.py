"""The workload `infer`: rows of JSONL through a model."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from rollout.model.counts import counted
from rollout.model.errors import ConfigError, RolloutError
from rollout.model.item import ItemLimits, NewItem, limits_of
from rollout.model.run import RunSpec
from rollout.workloads.arriving_rows import describe_followed, describe_queue
from rollout.workloads.digest import Part
from rollout.workloads.infer.config import SERVER, InferConfig
from rollout.workloads.infer.engine_checks import Gathered, check_backend, check_host
from rollout.workloads.infer.lines import (
    COMPLETIONS,
    EMBEDDINGS,
    ERRORS,
    OPENAI,
    EmbeddingsWriter,
    InferWriter,
    cost_of,
)
from rollout.workloads.infer.model import ResolvedModel, resolve_model
from rollout.workloads.infer.payload import decode_payload
from rollout.workloads.infer.plan import item_factory, plan, resolve_config
from rollout.workloads.infer.rendered import prompt_detail
from rollout.workloads.infer.rows import Asked, check_input, engine_check
from rollout.workloads.input_lines import Line
from rollout.workloads.invalid import invalid_of
from rollout.workloads.json_form import JsonObject
from rollout.workloads.local_model import model_changes, names_snapshot, refuse_unless_whole_model
from rollout.workloads.parquet_output import parquet_name, require_pyarrow, write_parquet
from rollout.workloads.port import (
    Checked,
    FoundSnapshot,
    InputReader,
    Rows,
    Totals,
    Workload,
)
from rollout.workloads.sections import RunSection
from rollout.workloads.source import InputReport

_TABLES = (COMPLETIONS, EMBEDDINGS)
"""Result files that are also written as parquet."""
_GATED = ("meta-llama/", "mistralai/", "google/gemma")


@dataclass(kw_only=True)
class InferChecked(Checked):
    settings: InferConfig
    model: ResolvedModel
    report: InputReport
    asked: Asked


class Infer(Workload[InferConfig, InferChecked]):
    name = "infer"
    details = "Run every row of the input through a model, exactly once, and write completions in input order."
    settings = InferConfig
    carries = ("input",)
    makes_way = True
    output_of_rows = MappingProxyType({"body": {"openai": True}})  # lines of an OpenAI batch want answers as such
    sections = frozenset(InferConfig.model_fields)
    measure = "tokens"
    result_files = (
        COMPLETIONS,
        *map(parquet_name, (COMPLETIONS, EMBEDDINGS)),
        ERRORS,
        "summary.json",
        OPENAI,
        EMBEDDINGS,
    )

    def __init__(self) -> None:
        self._here = False  # workers are started here, or would be

    def works_here(self) -> None:
        self._here = True

    def check_host(self, settings: InferConfig) -> None:
        check_host(settings.backend, "batch")

    def check(self, settings: InferConfig, reading: InputReader) -> InferChecked:
        gathered = Gathered()
        model: ResolvedModel | None = None
        rows, asked = Rows(), Asked()
        check_backend(settings.backend, gathered, here=self._here)
        with gathered.checking():
            if settings.output.format == "parquet":
                require_pyarrow()
        with gathered.checking():
            model = resolve_model(settings, reading.directory)
        with gathered.checking():
            rows = check_input(settings, reading, asked)
        try:
            gathered.raise_all()
        except RolloutError:
            rows.close()
            raise
        assert model is not None
        return InferChecked(
            config=resolve_config(settings, rows.report, model, rows.queue, embeds=bool(asked.embeddings)),
            total=rows.report.rows,
            invalid=rows.report.invalid,
            source=rows.source,
            queue=rows.queue,
            trees=model.trees("model"),
            snapshots=("model",) if settings.backend.kind != SERVER and names_snapshot(settings.model.uri) else (),
            settings=settings,
            model=model,
            report=rows.report,
            asked=asked,
            apart={EMBEDDINGS: asked.embeddings} if asked.completions and asked.embeddings else {},
        )

    def found(self, checked: InferChecked, key: str, snapshot: FoundSnapshot) -> None:
        refuse_unless_whole_model(snapshot.config, f"{key}.uri")
        super().found(checked, key, snapshot)

    def limits(self, config: JsonObject) -> ItemLimits:
        return limits_of(RunSection.model_validate(config["run"]).item_spec())

    def spec(self, run_id: str, config: JsonObject) -> RunSpec:
        """Return the run's spec. The limits of a server hold across the whole cluster (ADR 0038)."""
        return replace(super().spec(run_id, config), one_worker=config["backend"]["kind"] == SERVER)

    def plan(self, checked: InferChecked, config: JsonObject, start: int) -> Iterator[NewItem]:
        run = RunSection.model_validate(config["run"])
        return plan(checked.settings, config["model"]["content_id"], checked.lines(start), run)

    def item_factory(self, checked: InferChecked, config: JsonObject) -> Callable[[Line], NewItem]:
        run = RunSection.model_validate(config["run"])
        return item_factory(checked.settings, config["model"]["content_id"], run, engine_check(checked.settings))

    def writer(self, config: JsonObject) -> InferWriter:
        return EmbeddingsWriter(config) if _may_embed(config) else InferWriter(config)

    def derive(self, config: JsonObject, directory: Path) -> list[str]:
        wanted = config["output"].get("format") == "parquet"
        return [made for name in _TABLES for made in write_parquet(directory, name)] if wanted else []

    def row_input(self, payload: bytes) -> tuple[Any, str]:
        row = decode_payload(payload)
        return row.row, f"{row.file}:{row.line}"

    def cost(self, config: JsonObject, totals: Totals) -> str:
        found = cost_of(config, totals)
        if found is None:
            return ""
        return f"not known: {found['unknown']}" if found["total"] is None else f"{found['total']:,.6g}"

    def item_parts(self, config: JsonObject, payload: bytes | None, result: bytes | None) -> Sequence[Part]:
        if payload is None or invalid_of(payload) is not None:
            return ()
        return [prompt_detail(config, decode_payload(payload).row)]

    def describe(self, settings: InferConfig, checked: InferChecked) -> list[str]:
        report = checked.report
        rows = counted(report.rows - report.invalid, "row")
        answers = [COMPLETIONS, EMBEDDINGS] if _may_embed(checked.config) else [COMPLETIONS]
        if settings.output.format == "parquet":
            answers = [*answers, *map(parquet_name, answers)]
        return [
            f"model {settings.model.uri} on backend {settings.backend.kind}",
            *(
                describe_queue(checked.queue)
                if checked.queue
                else [f"{rows} in {counted(len(report.files), 'file')} ({report.bytes} bytes)"]
            ),
            *describe_followed(settings.input),
            f"writes {', '.join(answers)}, errors.jsonl and summary.json to {settings.output.dir}",
            self.describe_workers(settings),
        ]

    def dry_run(self, settings: InferConfig, checked: InferChecked) -> JsonObject:
        return {"model": settings.model.uri, **super().dry_run(settings, checked)}

    def warnings(self, settings: InferConfig) -> list[str]:
        uri = settings.model.uri
        gated = settings.backend.kind != SERVER and uri.startswith(_GATED) and not Path(uri).exists()
        found = [f"{uri} is gated and HF_TOKEN is not set"] if gated and not _has_token() else []
        try:
            self.check_host(settings)
        except ConfigError as error:
            found.append(error.message)
        return found

    def describe_change(self, section: str, old: JsonObject, new: JsonObject) -> list[str] | None:
        return model_changes(old, new) if section == "model" else None


def _has_token() -> bool:
    return any(os.environ.get(name) for name in ("HF_TOKEN", "ROLLOUT_SECRET_HF_TOKEN"))


def _may_embed(config: JsonObject) -> bool:
    """Return whether rows may ask for embeddings. Rows from a queue may, because they are not known yet."""
    return bool(config["input"].get("embeddings") or config["input"].get("queue"))
