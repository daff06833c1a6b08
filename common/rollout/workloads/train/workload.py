"""The workload `train`: a chain of segments, each from one snapshot to the next."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rollout.model.errors import ConfigError, InputError
from rollout.model.item import NewItem
from rollout.model.run import Policy, RunSpec
from rollout.workloads.json_form import JsonObject
from rollout.workloads.local_model import LocalModel, files_json, find_model, model_changes, names_snapshot
from rollout.workloads.port import Checked, Fetch, Reading, Tree, Workload, input_section
from rollout.workloads.source import InputReport, Line, fail, json_of
from rollout.workloads.train.config import DatasetSection, Kind, PreferenceSection, TrainConfig
from rollout.workloads.train.lines import ERRORS, EVALUATIONS, METRICS, REPORT, SUMMARY, TrainWriter, how_to_go_on
from rollout.workloads.train.model_output import draw_curves, write_model
from rollout.workloads.train.plan import items, segments, steps_at_most
from rollout.workloads.train.rows import parse_row
from rollout.workloads.train.segment import Result, Segment


@dataclass(kw_only=True)
class TrainChecked(Checked):
    steps: int
    rows: int
    model: LocalModel


class Train(Workload[TrainConfig, TrainChecked]):
    name = "train"
    help = "Train a model: SFT, reward models, DPO, IPO and KTO, with snapshots that resume to the byte."
    settings = TrainConfig
    sections = frozenset({"algorithm"})
    commands = "rollout.cli.commands.train:app"
    unit = "segments"
    measure = "tokens"
    result_files = (METRICS, SUMMARY, REPORT, EVALUATIONS, ERRORS)
    free = frozenset({"output", "workers"})
    recorded = frozenset({"run.name", "run.priority", "run.max_worker_lost", "snapshots.keep_last", "snapshots.label"})

    def directory(self, settings: TrainConfig) -> Path:
        return Path(settings.output.dir)

    def workers(self, settings: TrainConfig) -> int:
        return settings.workers.count

    def check_host(self, settings: TrainConfig) -> None:
        missing = [name for name in ("torch", "transformers", "accelerate") if find_spec(name) is None]
        if missing:
            raise ConfigError(
                f"training needs the Python packages {', '.join(missing)} on this host: pip install "
                '"rollout-engine[train]", or send the run to a cluster that has them: --coordinator HOST:PORT'
            )

    def check(self, settings: TrainConfig, reading: Reading) -> TrainChecked:
        faults: list[str] = []
        kind, section = settings.algorithm.kind, settings.algorithm.settings
        model = reference = None
        where = f"algorithm.{kind}"
        try:
            model = find_model(section.base_model.uri, f"{where}.base_model.uri", section.base_model.revision)
            if isinstance(section, PreferenceSection) and section.reference not in ("base", "free"):
                reference = find_model(section.reference, f"{where}.reference", None)
        except ConfigError as error:
            faults.append(error.message)
        found: list[tuple[Data, InputReport]] = []
        for dataset in (section.dataset, section.eval_dataset):
            if dataset is not None:
                try:
                    found.append(read_data(kind, dataset, reading))
                except (ConfigError, InputError) as error:
                    faults.append(error.message)
        if faults or model is None:
            raise ConfigError("\n".join(faults))
        (data, report), evaluation = found[0], found[1] if len(found) > 1 else None
        rows = report.rows * (2 if kind == "kto" and data.pairs else 1)
        steps = steps_at_most(settings, rows)
        config: JsonObject = {
            "schema": 1,
            "algorithm": {"kind": kind, "settings": section.model_dump(mode="json")},
            "model": files_json(model),
            "reference_model": files_json(reference) if reference is not None else None,
            "dataset": data.config(),
            "eval_dataset": evaluation[0].config() if evaluation else None,
            "evaluation": evaluation[1].digest if evaluation else "",
            "steps": steps,
            "snapshots": settings.snapshots.model_dump(mode="json"),
            "input": input_section(section.dataset.patterns, report),
            "output": settings.output.model_dump(mode="json"),
            "workers": settings.workers.model_dump(mode="json"),
            "run": settings.run.model_dump(mode="json"),
        }
        trees = [Tree("dataset.manifest", data.root, always=True, files=data.files)]
        if evaluation:
            trees.append(Tree("eval_dataset.manifest", evaluation[0].root, always=True, files=evaluation[0].files))
        if model.path is not None:
            trees.append(Tree("model.manifest", model.path))
        if reference is not None and reference.path is not None:
            trees.append(Tree("reference_model.manifest", reference.path))
        total = sum(1 for _ in segments(steps, settings.snapshots.every_steps))
        uris = {"model": section.base_model.uri, "reference_model": reference.uri if reference is not None else ""}
        return TrainChecked(
            config=config,
            total=total,
            trees=tuple(trees),
            snapshots=tuple(key for key, uri in uris.items() if names_snapshot(uri)),
            steps=steps,
            rows=rows,
            model=model,
        )

    def plan(self, checked: TrainChecked, config: JsonObject, start: int) -> Iterator[NewItem]:
        return items(config, start)

    def spec(self, run_id: str, config: JsonObject) -> RunSpec:
        """A segment that failed ends the run: nothing can come after it. The first item's objects are the data."""
        keep = (("last", str(config["snapshots"]["keep_last"])), ("from", "1"))
        policies = (Policy("end_run", (("on", "failed"),)), Policy("keep_objects", keep))
        return replace(super().spec(run_id, config), policies=policies)

    def writer(self, config: JsonObject) -> TrainWriter:
        return TrainWriter(config)

    async def finished(self, fetch: Fetch, config: JsonObject, directory: Path, summary: JsonObject) -> list[str]:
        made = await asyncio.to_thread(draw_curves, directory)
        if config["output"]["model"] and summary["final_snapshot"]:
            made.append(await write_model(fetch, bytes.fromhex(summary["final_snapshot"]), directory / "model"))
        return made

    def over(self, failed: int) -> str:
        return "a segment that failed is final, and nothing of its run can come after it" if failed else ""

    def when_mended(self, summary: JsonObject) -> str:
        return how_to_go_on(summary) if summary[self.unit]["failed"] else super().when_mended(summary)

    def describe_change(self, section: str, old: JsonObject, new: JsonObject) -> list[str] | None:
        return model_changes(old, new, section) if section in ("model", "reference_model") else None

    def describe(self, settings: TrainConfig, checked: TrainChecked) -> list[str]:
        section = settings.algorithm.settings
        return [
            f"{settings.algorithm.kind} of {section.base_model.uri}",
            f"{checked.rows} rows; {checked.steps} steps of {section.step_rows} rows, a snapshot every "
            f"{settings.snapshots.every_steps}",
            f"writes {METRICS}, {REPORT} and {SUMMARY} to {settings.output.dir}",
            f"workers when no coordinator is named: {settings.workers.count}",
        ]

    def dry_run(self, settings: TrainConfig, checked: TrainChecked) -> JsonObject:
        return {"algorithm": settings.algorithm.kind, "rows": checked.rows, "steps": checked.steps}

    def item_input(self, payload: bytes) -> tuple[Any, str]:
        Segment.decode(payload)
        return json.loads(payload), ""

    def item_output(self, data: bytes) -> Any:
        Result.decode(data)
        return json.loads(data)


@dataclass(frozen=True, slots=True)
class Data:
    """Files of a dataset, named so that their order is that of their names. `pairs`: of the first row."""

    kind: str
    root: Path
    files: tuple[tuple[str, Path], ...]
    pairs: bool

    def config(self) -> JsonObject:
        return {"kind": self.kind, "files": [name for name, _ in self.files], "manifest": ""}


def read_data(kind: Kind, dataset: DatasetSection, reading: Reading) -> tuple[Data, InputReport]:
    """Every row once. ConfigError, InputError with all that is wrong."""
    if dataset.kind != "jsonl_path":
        raise ConfigError(f'dataset.kind = "{dataset.kind}" is not read yet')
    pairs = False

    def read(line: Line) -> None:
        nonlocal pairs
        try:
            found = parse_row(kind, json_of(line))
        except InputError as error:
            fail(line.file, line.line, error.message)
        pairs = pairs or len(found) > 1

    source, report = reading.rows(dataset.patterns, read)
    try:
        paths = [Path(file.path) for file in report.files]
    finally:
        source.close()
    files = tuple((f"{i:05}-{path.name}", path) for i, path in enumerate(paths))
    return Data(dataset.kind, Path.cwd(), files, pairs), report
