"""The workload `experiment`: variants of an agent on tasks. Each trial is one of a job (`rollout.workloads.job`)."""

from __future__ import annotations

import json
import os
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rollout.config.scratch import Scratch
from rollout.model.counts import counted
from rollout.model.errors import ConfigError, InputError
from rollout.model.item import NewItem
from rollout.model.problems import faults_of, problems
from rollout.model.run import Order, RunSpec
from rollout.workloads.commit import CommitEntry
from rollout.workloads.digest import Part
from rollout.workloads.experiment.chains import freeze_states
from rollout.workloads.experiment.compile import (
    EXECUTOR,
    Items,
    job_of,
    needs_programs_of_the_host,
    policies_of,
    write_trees,
)
from rollout.workloads.experiment.config import ExperimentConfig, load_experiment
from rollout.workloads.experiment.engines import NO_ENGINES, Engines, engines_of, resolve_engines
from rollout.workloads.experiment.freezing import freeze, freeze_function
from rollout.workloads.experiment.inheriting import Inherited, inherited_lines, rows_of
from rollout.workloads.experiment.layout import (
    CHAINS,
    DIGEST,
    EVENTS,
    EVIDENCE,
    MANIFEST,
    METRICS,
    PREDICTIONS,
    PRUNED,
    RESOLVED,
    RUN_MANIFEST,
    SCORES,
    SNAPSHOTS,
    SUMMARY,
    TRIALS,
)
from rollout.workloads.experiment.power import ALPHA, POWER, detectable, tasks_for
from rollout.workloads.experiment.resolve import Resolved, config_of
from rollout.workloads.experiment.schedule import slot_of
from rollout.workloads.experiment.tasks import Task, read_tasks
from rollout.workloads.experiment.writer import ExperimentWriter
from rollout.workloads.job.config import JobConfig
from rollout.workloads.job.digest import TrialsDigest, trial_parts
from rollout.workloads.job.engine import check_engine_host, check_engine_snapshot
from rollout.workloads.job.first_look import beside_datasets
from rollout.workloads.job.providers_here import network_faults, openness, refusals
from rollout.workloads.job.record import TrialRecord
from rollout.workloads.job.remarks import Remarks
from rollout.workloads.job.run_config import job_json, lanes
from rollout.workloads.job.trial import TrialSpec
from rollout.workloads.json_form import JsonObject, lookup
from rollout.workloads.port import NO_OVERRIDES, Checked, FoundSnapshot, InputReader, Tree, Workload

_TREES = f"executors.{EXECUTOR}.trees"
_ARTIFACT, _ASSETS = "runtime.agent.artifact", "grading.assets"
_KEYS = {
    "environment.type": "runtime.policy.sandbox.mode",
    "environment.provider_config": "runtime.policy.sandbox.provider_config",
    "verifier.env": "grading.env",
    "environment: {type: ": "sandbox: {mode: ",
}
_JOB_KEY = re.compile(rf"\bagents\.(?P<agent>\d+)\.env\b|{'|'.join(map(re.escape, _KEYS))}")
_UNGRADED = "Without a grader, scores are in the files of the trials: `rollout experiment describe` shows them."
_NETWORKS = {"none": "no-network", "full": "public", "allowlist_enforced": "allowlist"}


@dataclass(kw_only=True)
class ExperimentChecked(Checked):
    """`scratch` has the task directories until the check is closed."""

    resolved: Resolved
    job: JobConfig
    items: Items
    engines: Engines
    part: range
    scratch: Scratch

    def close(self) -> None:
        super().close()
        self.scratch.cleanup()


class Experiment(Workload[ExperimentConfig, ExperimentChecked]):
    """`directory` is that of the run, if it is not the first of its experiment. `effect` is the one to compute a size
    for. `part` are the slots to run, None for all. `inherited` is what the run takes over from another for the slots
    before (`inheriting.Inherited`). `after` is the run with the trials before `part` in chains, if it is another one.
    """

    name = "experiment"
    settings = ExperimentConfig
    sections = frozenset(ExperimentConfig.model_fields)
    unit = "trials"
    finishes_running = True
    directory_key = "runs_dir"
    result_files = (
        *(TRIALS, METRICS, EVENTS, SNAPSHOTS, RUN_MANIFEST, EVIDENCE, PRUNED, CHAINS, PREDICTIONS, SCORES),
        *(MANIFEST, RESOLVED, DIGEST, SUMMARY),
    )

    def __init__(
        self,
        directory: Path | None = None,
        *,
        effect: float | None = None,
        part: range | None = None,
        inherited: JsonObject | None = None,
        after: Path | None = None,
    ) -> None:
        self._directory = directory
        self._after = after
        self._effect = effect
        self._part = part
        self._inherited = inherited
        self._environ: Mapping[str, str] | None = None  # of the workers, where they are started here
        self._remarks = Remarks()

    def load(self, path: Path | None, overrides: Mapping[str, Any] = NO_OVERRIDES) -> ExperimentConfig:
        if path is None:
            return super().load(path, overrides)
        return load_experiment(path, typed=overrides)

    def directory(self, settings: ExperimentConfig) -> Path:
        return self._directory or Path(settings.runs_dir).expanduser() / settings.experiment.id

    def works_here(self) -> None:
        self._environ = os.environ

    def host_notes(self, settings: ExperimentConfig) -> list[str]:
        return [_in_experiment(note) for note in openness(_unresolved_job(settings).environment, here=True)]

    def check(self, settings: ExperimentConfig, reading: InputReader) -> ExperimentChecked:
        scratch = Scratch("rollout-experiment-")
        try:
            return self._check(settings, reading, scratch)
        except BaseException:
            scratch.cleanup()
            raise

    def _check(self, settings: ExperimentConfig, reading: InputReader, scratch: Scratch) -> ExperimentChecked:
        resolved, files, engines = resolve(settings, reading, Path(scratch.name), self._preflight(settings))
        job = job_of(resolved)
        reading.tell("writing task directories")
        tasks = write_trees(resolved, Path(scratch.name) / "tasks", files.get(_ASSETS))
        trees = dict(tasks.values())
        if _ARTIFACT in files:
            trees[resolved.artifact] = files[_ARTIFACT]
        part = self._part or range(len(resolved.slots))
        states = self._states(settings, resolved, part, Path(scratch.name))
        trees |= dict(states.values())
        checksums = {key: checksum for key, (checksum, _) in tasks.items()}
        items = Items(resolved, job, checksums, engines, {chain: tree for chain, (tree, _) in states.items()})
        return ExperimentChecked(
            config={
                "run": {
                    "name": self.directory(settings).name,
                    "order": str(Order.SCHEDULE),
                    "max_in_flight": settings.design.max_concurrency,
                },
                "input": {"digest": resolved.digest, "trials": len(part)},
                "experiment": resolved.json,
                **({} if self._part is None else {"part": [part.start, part.stop]}),
                **({} if self._inherited is None else {"inherited": self._inherited}),
                "executors": {
                    EXECUTOR: {"job": job_json(job), "trees": {name: name for name in trees}},
                    **engines.config(),
                },
            },
            total=len(part),
            trees=(
                *(Tree(f"{_TREES}.{name}", path, always=True) for name, path in trees.items()),
                *engines.trees(),
            ),
            notes=(*self._notes(settings), *map(_in_experiment, engines.notes())),
            snapshots=engines.snapshots(),
            resolved=resolved,
            job=job,
            items=items,
            engines=engines,
            part=part,
            scratch=scratch,
        )

    def _states(
        self, settings: ExperimentConfig, resolved: Resolved, part: range, scratch: Path
    ) -> dict[str, tuple[str, Path]]:
        """Return `freeze_states` of the trials before `part`."""
        rows, run = iter(tuple[JsonObject]()), self.directory(settings)
        if self._after is not None:
            rows, run = rows_of(self._after, CHAINS), self._after
        elif self._inherited is not None:
            lines = inherited_lines(run, Inherited(**self._inherited), "")
            rows = (row for name, row in lines if name == CHAINS)
        before = (row for row in rows if slot_of(row["trial_id"]) < part.start)
        return freeze_states(run, before, {resolved.chains[index] for index in part}, scratch)

    def _preflight(self, settings: ExperimentConfig) -> list[str]:
        """Return faults besides those of files: unset variables, a provider that does not work here."""
        job = _unresolved_job(settings)
        faults = list(beside_datasets(job, self._environ))
        if self._environ is not None:
            mode: Any = _NETWORKS[settings.runtime.policy.network.mode]
            faults += [*refusals(job.environment), *network_faults(job.environment, {mode})]
        return [_in_experiment(fault) for fault in faults]

    def _notes(self, settings: ExperimentConfig) -> Iterator[str]:
        if needs_programs_of_the_host(settings) and settings.provider != "process":
            yield "sandboxes have no image: they see the programs of the worker's machine"

    def check_host(self, settings: ExperimentConfig) -> None:
        for _, _, engine in engines_of(settings):
            check_engine_host(engine, self.name)

    def found(self, checked: ExperimentChecked, key: str, snapshot: FoundSnapshot) -> None:
        check_engine_snapshot(snapshot)
        super().found(checked, key, snapshot)

    def finalize(self, checked: ExperimentChecked) -> None:
        for name in checked.engines.models:
            checked.engines.models[name] = lookup(checked.config, f"executors.{name}.model.content_id") or ""

    def plan(self, checked: ExperimentChecked, config: JsonObject, start: int) -> Iterator[NewItem]:
        return map(checked.items.item, checked.part[start:])

    def spec(self, run_id: str, config: JsonObject) -> RunSpec:
        experiment = config_of(config["experiment"])
        return replace(
            super().spec(run_id, config),
            lanes=lanes(JobConfig.model_validate(config["executors"][EXECUTOR]["job"], strict=False)),
            policies=policies_of(experiment),
            pause_timeout_ms=experiment.policy.pause_timeout_ms,
        )

    def describe_change(self, section: str, old: JsonObject, new: JsonObject) -> list[str] | None:
        """Return nothing: all that matters is in `experiment`."""
        return [] if section in ("executors", "input") else None

    def writer(self, config: JsonObject) -> ExperimentWriter:
        return ExperimentWriter(config)

    # ---- for people

    def idles(self, note: str) -> bool:
        return note.startswith("waiting")

    def another_run(self, run: str, changes: Sequence[str]) -> str:
        return "with: rollout experiment run FILE"

    def exit_code(self, summary: JsonObject) -> int:
        """Trials that failed are results."""
        return 0

    def failed_for_good(self, summary: JsonObject) -> int:
        return 0  # `outcome` says it

    def outcome(self, summary: JsonObject) -> str:
        units = summary[self.unit]
        first = f"{units['completed']:,} of {counted(units['total'], 'trial')} completed, {units['failed']:,} failed"
        first += f", {units['skipped']:,} pruned" if units["skipped"] else ""
        found = summary["experiment"]
        variants = [_came_to(name, one) for name, one in found["variants"].items()]
        warnings = [f"warning: {one}" for one in found.get("warnings", ())]
        return "\n".join([first, *variants, *warnings])

    def see_also(self, directory: Path) -> str:
        return f"rollout experiment describe {shlex.quote(str(directory))}"

    def remarks(self, entry: CommitEntry) -> Iterator[tuple[str, str, JsonObject]]:
        return self._remarks.of(entry)

    def describe(self, settings: ExperimentConfig, checked: ExperimentChecked) -> list[str]:
        resolved, design = checked.resolved, settings.design
        return [
            f"{counted(len(resolved.variants), 'variant')} x {counted(len(resolved.tasks), 'task')} x "
            f"{counted(design.replications, 'replication')} = {counted(len(resolved.slots), 'trial')}, "
            f"{design.max_concurrency} at once, {design.order}",
            f"variants: {', '.join(variant.variant_id for variant in resolved.variants)} (the first is the baseline)",
            *self._sizes(settings, len(resolved.tasks)),
            f"sandboxes: {settings.provider}",
            f"digest: {resolved.digest}",
            f"writes facts, evidence and a directory for each trial to {self.directory(settings)}",
        ]

    def _sizes(self, settings: ExperimentConfig, tasks: int) -> Iterator[str]:
        """Yield notes about what a comparison of this size can detect."""
        design = settings.design
        if design.comparison == "none" or not settings.variant_plan:
            return
        paired, reps = design.comparison == "paired", design.replications
        effect = detectable(tasks, paired=paired, replications=reps)
        rate = f"with {POWER:.0%} power at level {ALPHA:g}, two-sided"
        yield f"finds a difference in pass rates of {100 * effect:.1f} points or more {rate}"
        if self._effect is not None:
            needed = tasks_for(self._effect, paired=paired, replications=reps)
            yield f"a difference of {100 * self._effect:.1f} points needs {counted(needed, 'task')} {rate}"

    def dry_run(self, settings: ExperimentConfig, checked: ExperimentChecked) -> JsonObject:
        resolved = checked.resolved
        return {
            "trials": len(resolved.slots),
            "variants": len(resolved.variants),
            "tasks": len(resolved.tasks),
            "replications": settings.design.replications,
            "provider": settings.provider,
            "digest": resolved.digest,
        }

    def item_input(self, payload: bytes) -> tuple[Any, str]:
        return json.loads(TrialSpec.decode(payload).encode()), ""

    def digest(self, config: JsonObject) -> TrialsDigest:
        job = JobConfig.model_validate(config["executors"][EXECUTOR]["job"], strict=False)
        graded = config["experiment"]["grading"] is not None
        return TrialsDigest(job.override_error_policy, of="variant", note="" if graded else _UNGRADED)

    def item_parts(self, config: JsonObject, payload: bytes | None, result: bytes | None) -> Sequence[Part]:
        return trial_parts(TrialRecord.decode(result)) if result is not None else ()

    def item_output(self, data: bytes) -> Any:
        return json.loads(TrialRecord.decode(data).encode())


def resolve(
    settings: ExperimentConfig, reading: InputReader, scratch: Path, faults: list[str]
) -> tuple[Resolved, dict[str, Path], Engines]:
    """Resolve the experiment: with its tasks, the directories of its files by key, and its models. Raises ConfigError
    with every fault, including `faults`. Blocking."""
    ids, directories = dict[str, str](), dict[str, Path]()
    assets = settings.grading.assets if settings.grading is not None else None
    for key, name in ((_ARTIFACT, settings.runtime.agent.artifact), (_ASSETS, assets)):
        if name is None:
            continue
        reading.tell(f"hashing {name}")
        try:
            ids[key], directories[key] = freeze(key, Path(name).expanduser(), scratch)
        except ConfigError as error:
            faults += faults_of(error.message)
    if (function := settings.runtime.function) is not None:
        try:
            beside = [reading.exclude, Path(settings.runs_dir).expanduser(), Path(settings.dataset.path).expanduser()]
            ids[_ARTIFACT], directories[_ARTIFACT] = freeze_function(function, settings.variants, beside, scratch)
        except ConfigError as error:
            faults += faults_of(error.message)
    tasks, digest = list[Task](), ""
    try:
        tasks, digest = read_tasks(settings, reading)
    except (InputError, ConfigError) as error:
        faults += faults_of(error.message)
    engines = NO_ENGINES
    try:
        engines = resolve_engines(settings, reading.directory)
    except ConfigError as error:
        faults += faults_of(error.message)
    if faults:
        raise ConfigError(problems(faults))
    artifact, held = ids.get(_ARTIFACT, ""), ids.get(_ASSETS, "")
    return Resolved(settings, tuple(tasks), digest, artifact, held, dict(engines.models)), directories, engines


def _unresolved_job(settings: ExperimentConfig) -> JobConfig:
    """Return the job as far as the experiment's file determines it."""
    return job_of(Resolved(settings, (), ""))


def _in_experiment(text: str) -> str:
    """Replace the job's keys in a fault or note by those of the experiment."""

    def key(found: re.Match[str]) -> str:
        index = found["agent"]
        if index is not None:
            return "baseline.env" if index == "0" else f"variant_plan.{int(index) - 1}.env"
        return _KEYS[found[0]]

    return _JOB_KEY.sub(key, text)


def _came_to(name: str, counts: JsonObject) -> str:
    mean: float | None = counts["mean_score"]
    scored = "none scored" if mean is None else f"{counts['passed']:,} passed, mean score {mean:.4g}"
    types = [f"{count:,} {kind}" for kind, count in counts.get("failures", {}).items()]
    failed = f"; failed: {', '.join(types)}" if types else ""
    return f"{name}: {counted(counts['trials'], 'trial')}, {scored}{failed}"
