"""The workload `map`: rows of JSON through a Python function."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from rollout.model.counts import counted
from rollout.model.errors import ConfigError, InputError, OtherRunError
from rollout.model.item import ItemLimits, NewItem, limits_of
from rollout.model.problems import problems
from rollout.model.run import RunSpec
from rollout.objects.tree import Tree as ObjectTree
from rollout.workloads.arriving_rows import describe_followed, describe_queue
from rollout.workloads.code import Code, differences, find_code, listed, shadowed
from rollout.workloads.following import NoRowsYetError
from rollout.workloads.input_lines import Line, fail, json_of
from rollout.workloads.invalid import invalid_item
from rollout.workloads.json_form import JsonObject
from rollout.workloads.map.call import Call
from rollout.workloads.map.config import MapConfig
from rollout.workloads.map.lines import ERRORS, PARQUET, RESULTS, SUMMARY, MapWriter
from rollout.workloads.map.plan import LANES_MAX, Planner, lane_of, map_spec, run_config
from rollout.workloads.parquet_output import require_pyarrow, write_parquet
from rollout.workloads.port import (
    Checked,
    FailedRun,
    InputReader,
    Rows,
    Tree,
    Workload,
)

_TREE = "code_tree"
"""Key under which a run keeps the manifest of its code."""


@dataclass(kw_only=True)
class MapChecked(Checked):
    code: Code | None


class Map(Workload[MapConfig, MapChecked]):
    name = "map"
    settings = MapConfig
    carries = ("input", "lanes")
    sections = frozenset({"function", "input", "output", "run", "workers"})
    result_files = (RESULTS, PARQUET, ERRORS, SUMMARY)

    def check(self, settings: MapConfig, reading: InputReader) -> MapChecked:
        faults: list[str] = []
        code: Code | None = None
        began: ObjectTree | None = None
        lanes = Lanes(settings.run.lane_key)
        function = settings.function
        per_process = settings.run.concurrency_per_process
        call = Call(function.name, (), function.args, function.kwargs, per_process)
        rows, nothing = Rows(), None
        if settings.input.queue and settings.run.lane_key:
            faults.append(
                "run.lane_key: the lanes of a run are known when it begins, and those of a queue's rows are not"
            )
        try:
            if settings.output.format == "parquet":
                require_pyarrow()
        except ConfigError as error:
            faults.append(error.message)
        try:
            rows = reading.input(settings.input, lanes.read)
        except NoRowsYetError as error:
            nothing = error
        except (ConfigError, InputError) as error:
            faults.append(error.message)
        try:
            inputs = rows.source.paths if rows.source else ()
            directory = Path(function.code).expanduser() if function.code else None
            call.arguments()
            kept = reading.kept.get(_TREE)
            began = ObjectTree.from_bytes(kept.encode()) if kept else None
            must_be = None if reading.without_results else began
            code = find_code(function.name, directory, [*inputs, self.directory(settings)], must_be, call.check)
        except ConfigError as error:
            faults.append(error.message)
        if faults:
            rows.close()
            raise ConfigError(problems(faults))
        if nothing is not None:
            raise nothing
        if began is not None and code is not None and code.tree != began:
            rows.close()
            changes = "; ".join(differences(began, code.tree))
            raise OtherRunError(f"the code has changed since the run began ({changes})", changes=changes)
        config = run_config(call, code.manifest if code else None, settings.run)
        if lanes.found:
            config["lanes"] = sorted(lanes.found)
        notes: list[str] = []
        if code and code.new:
            notes.append(f"new in the code directory, no part of this run: {listed(code.new, 3)}")
        if code and (names := shadowed(code)):
            notes.append(f"not imported, since Python's own library has modules of these names: {listed(names, 3)}")
        return MapChecked(
            config={
                **config,
                "input": rows.section(settings.input.patterns),
                "output": settings.output.model_dump(mode="json"),
            },
            total=rows.report.rows,
            invalid=rows.report.invalid,
            source=rows.source,
            queue=rows.queue,
            trees=(Tree("code.manifest", code.directory, always=True, files=code.files),) if code else (),
            keep={_TREE: code.tree.to_bytes().decode()} if code else {},
            notes=tuple(notes),
            code=code,
        )

    def spec(self, run_id: str, config: JsonObject) -> RunSpec:
        return map_spec(run_id, config, self.free)

    def plan(self, checked: MapChecked, config: JsonObject, start: int) -> Iterator[NewItem]:
        planner, key = Planner(config), config["run"]["lane_key"]
        for line in checked.lines(start):
            if line.fault:
                yield invalid_item(line)
                continue
            yield planner.item(line.index, line.raw, lane_of(json_of(line), key) if key else "")

    def limits(self, config: JsonObject) -> ItemLimits:
        return limits_of(Planner(config).spec(""))

    def item_factory(self, checked: MapChecked, config: JsonObject) -> Callable[[Line], NewItem]:
        planner = Planner(config)

        def take(line: Line) -> NewItem:
            json_of(line)
            return planner.item(0, line.raw)

        return take

    def writer(self, config: JsonObject) -> MapWriter:
        return MapWriter(config)

    def failed(self, summary: JsonObject) -> FailedRun:
        begun = summary[self.unit]["committed"] > 0
        other = "it is another run, in another output directory" if begun else "the same command starts another run"
        return FailedRun(f"{FailedRun().recovery_hint}. Where it is the code that is mended, {other}")

    def describe(self, settings: MapConfig, checked: MapChecked) -> list[str]:
        code, run = checked.code, settings.run
        travels = (
            f"{code.directory} travels: {counted(len(code.files), 'file')}, {code.tree.size} bytes"
            if code
            else "it is installed on the workers; no code travels"
        )
        limits = [
            f"at most {run.max_attempts} {'try' if run.max_attempts == 1 else 'tries'} a row",
            f"{run.timeout:g} s a try" if run.timeout else "no time limit",
        ]
        if run.concurrency:
            each = f" for each {run.lane_key}" if run.lane_key else ""
            limits.append(f"at most {counted(run.concurrency, 'row')} at once{each}")
        parquet = f"{PARQUET}, " if settings.output.format == "parquet" else ""
        rows = [] if checked.queue else [counted(checked.total - checked.invalid, "row")]
        return [
            f"function {settings.function.name}; {travels}",
            *(describe_queue(checked.queue) if checked.queue else describe_followed(settings.input)),
            "; ".join([*rows, ", ".join(limits)]),
            f"writes {parquet}{RESULTS}, {ERRORS} and {SUMMARY} to {settings.output.dir}",
            self.describe_workers(settings),
        ]

    def derive(self, config: JsonObject, directory: Path) -> list[str]:
        wanted = config.get("output", {}).get("format") == "parquet"
        return write_parquet(directory, RESULTS) if wanted else []

    def dry_run(self, settings: MapConfig, checked: MapChecked) -> JsonObject:
        size = {"code_files": len(checked.code.files), "code_bytes": checked.code.tree.size} if checked.code else {}
        return {"function": settings.function.name, **size, **super().dry_run(settings, checked)}

    def describe_change(self, section: str, old: JsonObject, new: JsonObject) -> list[str] | None:
        if section == "code" and old != new:
            return [
                "code: a file of the code directory was changed, added or removed since (which one is not known here); "
                "what the function does not need can be listed in its .rolloutignore (or else .gitignore)"
            ]
        return None


class Lanes:
    """Checks rows and collects the values of their lane key."""

    def __init__(self, key: str) -> None:
        self.found: set[str] = set()
        self._key = key

    def read(self, line: Line) -> None:
        row = json_of(line)
        if not self._key:
            return
        try:
            self.found.add(lane_of(row, self._key))
        except InputError as error:
            fail(line.file, line.line, error.message)
        if len(self.found) > LANES_MAX:
            fail(
                line.file,
                line.line,
                f"{self._key!r} has more than {LANES_MAX} values, one a lane: choose a coarser field",
            )
