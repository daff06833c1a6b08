"""The workload `job`: agents on tasks; an item is a trial."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shlex
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rollout.model.counts import counted
from rollout.model.errors import ConfigError
from rollout.model.item import NewItem
from rollout.model.problems import faults_of, problems
from rollout.model.run import RunSpec
from rollout.workloads.commit import CommitEntry
from rollout.workloads.digest import Part
from rollout.workloads.job.config import JobConfig, asks_engine, environments
from rollout.workloads.job.datasets import Dataset, Loaded, load_datasets
from rollout.workloads.job.digest import TrialsDigest, trial_parts
from rollout.workloads.job.engine import SECTION, check_engine_host, check_engine_snapshot, resolve_engine
from rollout.workloads.job.first_look import beside_datasets, whole_list
from rollout.workloads.job.follow import carry_over, following
from rollout.workloads.job.kept import read_kept
from rollout.workloads.job.mending import mend
from rollout.workloads.job.plan import Trial, plan
from rollout.workloads.job.providers_here import engine_faults, network_faults, openness
from rollout.workloads.job.record import TrialRecord
from rollout.workloads.job.remarks import Remarks
from rollout.workloads.job.result_files import CONFIG, ERRORS, RESULT, STATISTICS, SUMMARY, TRIALS
from rollout.workloads.job.run_config import (
    NO_FAULT,
    PAUSE_TIMEOUT_MS,
    digest_of,
    item_of,
    job_json,
    lanes,
    policies,
    run_config,
    set_trials,
)
from rollout.workloads.job.trial import TrialSpec
from rollout.workloads.job.try_agents import try_agents
from rollout.workloads.job.writer import JobWriter
from rollout.workloads.json_form import JsonObject, lookup
from rollout.workloads.output import claimed, saved_state, saved_summary
from rollout.workloads.port import NO_OVERRIDES, Checked, Fetch, FoundSnapshot, InputReader, Tree, Workload
from rollout.workloads.spool import Tell, quiet

_OF_NO_RUN = frozenset({"name", "jobs_dir", "log_level", "metrics"})
"""Keys of job.yaml that affect neither trials nor how they run, but only files that are computed anew."""
_OF_NO_AGENT = frozenset({"description"})


@dataclass(kw_only=True)
class JobChecked(Checked):
    """`trials` are all of the job, `left` those of the run."""

    job: JobConfig
    loaded: Loaded
    trials: tuple[Trial, ...]
    left: tuple[Trial, ...]

    def plan(self, model: str) -> None:
        """Plan all trials of the job. `model` is the content id of its engine's model, "" if not known yet."""
        self.trials = tuple(plan(self.job, self.loaded.datasets, model))
        planned = [(trial.id.hex(), trial.label) for trial in self.trials]
        self.config["output"] = {"planned": planned, "job": job_json(self.job)}
        self.keep |= {"plan": digest_of(trial.id for trial in self.trials), "model": model, "uri": _uri(self.job)}
        self.take(self.trials, "", {})

    def take(self, left: tuple[Trial, ...], kept: str, used: JsonObject) -> None:
        """Set the trials of the run. `kept` is the file with the others. `used` is what they used of the budget."""
        self.left, self.total = left, len(left)
        set_trials(self.config, left)
        self.config["used"] = used
        self.config["output"]["kept"] = kept
        self.keep |= {"trials": self.total, "kept": kept, "used": used}
        needed = self.config["trees"]
        self.trees = tuple(
            tree for tree in self.trees if not tree.key.startswith(_TREES) or tree.key.removeprefix(_TREES) in needed
        )


class Job(Workload[JobConfig, JobChecked]):
    """`retry_errors` are types of errors; trials that ended with one of them run again."""

    name = "job"
    settings = JobConfig
    sections = frozenset(JobConfig.model_fields)
    unit = "trials"
    finishes_running = True
    directory_key = "jobs_dir"
    result_files = (RESULT, TRIALS, ERRORS, STATISTICS, CONFIG, SUMMARY)

    def __init__(self, retry_errors: Sequence[str] = ()) -> None:
        self._retry_errors = frozenset(retry_errors)
        self._environ: Mapping[str, str] | None = None  # of the workers, where they are started here
        self._is_here = False  # workers are started here
        self._remarks = Remarks()

    def load(self, path: Path | None, overrides: Mapping[str, Any] = NO_OVERRIDES) -> JobConfig:
        if path is None:
            return super().load(path, overrides)
        with whole_list(path, self._environ):
            return super().load(path, overrides)

    def directory(self, settings: JobConfig) -> Path:
        return Path(settings.jobs_dir).expanduser() / (settings.name or "job")

    def works_here(self) -> None:
        self._environ = os.environ

    def check_host(self, settings: JobConfig) -> None:
        if settings.engine is not None:
            check_engine_host(settings.engine, self.name)

    def host_notes(self, settings: JobConfig) -> list[str]:
        self._is_here = True  # so that `check` does not say the same of other machines
        return list(openness(settings.environment, here=True))

    def _of_elsewhere(self, settings: JobConfig) -> Iterator[str]:
        if not self._is_here:
            yield from openness(settings.environment, here=False)

    def faults_beside(self, settings: JobConfig, reading: InputReader) -> list[str]:
        """Return all faults except those of datasets and the model; a finished job needs no engine."""
        faults = list(beside_datasets(settings, self._environ))
        if self._environ is not None and _ended(reading.exclude) is None:
            faults += engine_faults(settings.environment)
        return faults

    def check(self, settings: JobConfig, reading: InputReader) -> JobChecked:
        faults, engine = self.faults_beside(settings, reading), None
        tried, doubted = try_agents(settings, reading.tell) if self._environ is not None else ([], [])
        faults += tried
        try:
            if settings.engine is not None and any(asks_engine(agent, settings) for agent in settings.agents):
                engine = resolve_engine(settings.engine, reading.directory)
        except ConfigError as error:
            faults += faults_of(error.message)
        try:
            loaded = load_datasets(
                settings, environ=self._environ, progress=lambda what: reading.tell(f"reading tasks: {what}")
            )
        except ConfigError as error:
            raise ConfigError(problems([*faults, *faults_of(error.message)])) from error
        if self._environ is not None and _ended(reading.exclude) is None:
            tasks = (task for dataset in loaded.datasets for task in dataset.tasks)
            faults += network_faults(settings.environment, {step.agent.network.mode for t in tasks for step in t.steps})
        if faults:
            raise ConfigError(problems(faults))
        asked = engine.content_id if engine is not None else ""
        directories = {task.checksum: task.directory for dataset in loaded.datasets for task in dataset.tasks}
        checked = JobChecked(
            config=run_config(settings, (), engine),
            total=0,
            trees=(*_trees(directories), *(engine.trees if engine is not None else ())),
            keep={"job": _of_runs(settings)},
            notes=(
                *loaded.notes,
                *(engine.notes if engine is not None else ()),
                *_written_secrets(settings),
                *self._of_elsewhere(settings),
                *doubted,
            ),
            snapshots=engine.snapshots if engine is not None else (),
            job=settings,
            loaded=loaded,
            trials=(),
            left=(),
        )
        checked.plan(asked or _model_before(settings, reading))
        if reading.resumed and reading.kept:
            self._compare(checked, reading)
        return checked

    def _compare(self, checked: JobChecked, reading: InputReader) -> None:
        """Compare with the run of the directory."""
        before, now, directory = reading.kept, checked.keep, reading.exclude
        over = _ended(directory)
        skipped = over[self.unit]["skipped"] if over is not None else 0
        if self._retry_errors:
            checked.follows = f"trials that ended with {' or '.join(sorted(self._retry_errors))} run once more"
        elif before["plan"] != now["plan"]:
            checked.follows = "the job plans other trials than before"
        elif before["job"] != now["job"] and over is None:
            checked.follows = f"the job is to be run otherwise: {_differences(before['job'], now['job'])}"
        elif skipped:
            checked.follows = f"{counted(skipped, 'trial')} {'was' if skipped == 1 else 'were'} skipped"
        if checked.follows:
            checked.total = before["trials"]  # until it is known what is left
            return
        kept = read_kept(directory, before["kept"])
        left = tuple(trial for trial in checked.trials if trial.id.hex() not in kept)
        checked.take(left, before["kept"], before["used"])

    def found(self, checked: JobChecked, key: str, snapshot: FoundSnapshot) -> None:
        check_engine_snapshot(snapshot)
        super().found(checked, key, snapshot)

    def finalize(self, checked: JobChecked) -> None:
        model = lookup(checked.config, f"{SECTION}.model.content_id") or ""
        if model != checked.keep.get("model", ""):
            recorded = checked.total
            checked.plan(model)
            checked.total = recorded if checked.follows else checked.total

    def plan(self, checked: JobChecked, config: JsonObject, start: int) -> Iterator[NewItem]:
        return (item_of(trial, checked.job) for trial in checked.left[start:])

    def spec(self, run_id: str, config: JsonObject) -> RunSpec:
        job = JobConfig.model_validate(config["job"], strict=False)
        return replace(
            super().spec(run_id, config),
            lanes=lanes(job),
            policies=policies(job, config["used"]),
            pause_timeout_ms=PAUSE_TIMEOUT_MS,
        )

    def plan_followup(self, checked: JobChecked, config: JsonObject, directory: Path, tell: Tell = quiet) -> str:
        found = following(checked.trials, checked.job, config, directory, self._retry_errors)
        if found.same_plan and not found.left:
            checked.follows = ""  # the run that is over is all there is to be had
        else:
            checked.take(found.left, carry_over(found, directory), found.used)
        return found.told

    def idles(self, note: str) -> bool:
        return note.startswith("waiting")  # for room, an image, its service

    def writer(self, config: JsonObject) -> JobWriter:
        return JobWriter(config)

    async def finished(
        self, fetch: Fetch, config: JsonObject, directory: Path, summary: JsonObject, tell: Callable[[str], None]
    ) -> list[str]:
        if summary["state"] != "completed":
            return []
        writer = JobWriter(config)
        await asyncio.to_thread(writer.open, directory)
        await asyncio.to_thread(writer.take_up)
        made = await mend(fetch, directory, tell)
        await asyncio.to_thread(writer.refresh, summary["state"])
        return made

    def describe_change(self, section: str, old: JsonObject, new: JsonObject) -> list[str] | None:
        """Describe which trials exist; `check` compares them, and everything else that another run is needed for."""
        return None if section in ("input", "trees") else []

    # ---- for people

    def exit_code(self, summary: JsonObject) -> int:
        """Return the exit code. Failed trials are reported as results; a job that stopped because too many failed
        through no fault of an agent did not do its work."""
        return 1 if summary[self.unit]["skipped"] and NO_FAULT in summary.get("reason", "") else 0

    def outcome(self, summary: JsonObject) -> str:
        job = summary["job"]
        errors = ", ".join(f"{count} {name}" for name, count in job["errors"].items())
        infrastructure = f" ({job['infrastructure']} of infrastructure)" if job["infrastructure"] else ""
        skipped = f", {job['skipped']} skipped" if job["skipped"] else ""
        cost = f", ${job['cost_usd']:.2f}" if job["cost_usd"] else ""
        ended = f"{job['completed']} of {counted(job['trials'], 'trial')} completed, {job['failed']} failed"
        return (
            f"{ended}{infrastructure}{skipped}{cost}"
            + "".join(f"\n{name}: {_came_to(counts)}" for name, counts in job.get("agents", {}).items())
            + (f"\nerrors: {errors}" if errors else "")
            + "".join(f"\nmetric {name} has no value: {why}" for name, why in job.get("metric_errors", {}).items())
            + (f"\n{_STOPPED}" if self.exit_code(summary) else "")
        )

    def failed_for_good(self, summary: JsonObject) -> int:
        return summary["job"]["failed"]

    def see_also(self, directory: Path) -> str:
        return f"rollout job show {shlex.quote(str(directory))}"

    def remarks(self, entry: CommitEntry) -> Iterator[tuple[str, str, JsonObject]]:
        return self._remarks.of(entry)

    def describe(self, settings: JobConfig, checked: JobChecked) -> list[str]:
        tasks = sum(len(dataset.tasks) for dataset in checked.loaded.datasets)
        lines = [
            f"{counted(len(settings.agents), 'agent')} x {counted(tasks, 'task')} x "
            f"{counted(settings.n_attempts, 'attempt')} = "
            f"{counted(len(checked.trials), 'trial')}, {settings.n_concurrent_trials} at once",
            f"agents: {', '.join(agent.id for agent in settings.agents)}",
        ]
        lines += [f"dataset {one.name}: {len(one.tasks)} tasks, {_formats(one)}" for one in checked.loaded.datasets]
        lines += [
            f"sandboxes: {settings.environment.type}{_ISOLATION.get(settings.environment.type, '')}",
            *self._preview(settings, checked),
            f"writes {RESULT}, {STATISTICS}, {TRIALS} and a directory for each trial to {self.directory(settings)}",
        ]
        return lines

    def _preview(self, settings: JobConfig, checked: JobChecked) -> list[str]:
        """Describe what the command would do with the job that is already in its directory."""
        directory = self.directory(settings)
        stored = claimed(directory)
        if stored is None:
            return []
        found = following(checked.trials, settings, stored["config"], directory, self._retry_errors)
        return [f"{directory} is there already; {found.told}"]

    def dry_run(self, settings: JobConfig, checked: JobChecked) -> JsonObject:
        return {
            "trials": len(checked.trials),
            "agents": len(settings.agents),
            "tasks": sum(len(dataset.tasks) for dataset in checked.loaded.datasets),
            "attempts": settings.n_attempts,
            "provider": settings.environment.type,
        }

    def item_input(self, payload: bytes) -> tuple[Any, str]:
        return json.loads(TrialSpec.decode(payload).encode()), ""

    def digest(self, config: JsonObject) -> TrialsDigest:
        return TrialsDigest(JobConfig.model_validate(config["job"], strict=False).override_error_policy)

    def item_parts(self, config: JsonObject, payload: bytes | None, result: bytes | None) -> Sequence[Part]:
        return trial_parts(TrialRecord.decode(result)) if result is not None else ()

    def item_output(self, data: bytes) -> Any:
        return json.loads(TrialRecord.decode(data).encode())


def _came_to(counts: JsonObject) -> str:
    """Describe the results of one agent, without rates if nothing is scored."""
    trials = counted(counts["trials"], "trial")
    if not counts["scored"]:
        return f"{trials}, none scored"
    return f"{trials}, {counts['passed']:,} of {counts['scored']:,} passed, mean reward {counts['mean_reward']:.4g}"


_STOPPED = (
    "the job was stopped. When what made them fail is mended, the same command runs the trials that were skipped, and "
    "--retry-errors TYPE those that failed"
)
_TREES = "trees."


def _uri(settings: JobConfig) -> str:
    return settings.engine.model.uri if settings.engine is not None else ""


def _model_before(settings: JobConfig, reading: InputReader) -> str:
    """Return the model that a resumed run keeps: with a snapshot, the one that it started with."""
    return reading.kept.get("model", "") if reading.kept.get("uri") == _uri(settings) else ""


def _formats(dataset: Dataset) -> str:
    """Describe the formats of its tasks: "format harbor", or the number of each."""
    counts = Counter(task.dialect_name for task in dataset.tasks)
    if len(counts) == 1:
        return f"format {next(iter(counts))}"
    return ", ".join(f"{count} of format {name}" for name, count in sorted(counts.items()))


_ISOLATION = {"process": ": agents and tests can read and write the files of the worker's machine"}
_SECRET = re.compile(r"(?i)(KEY|TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIALS?)$")


def _written_secrets(settings: JobConfig) -> Iterator[str]:
    """Warn of secrets in files, which are stored with the job: they belong in the workers' environment."""
    for place, env in environments(settings):
        for name, value in env.items():
            if _SECRET.search(name) and value and "${" not in value:
                where = ".".join(map(str, (*place, "env")))
                yield f"warning: {where}: the value of {name} is stored with the job: write ${{{name}}} in its place"


def _trees(directories: dict[str, Path]) -> Iterator[Tree]:
    """Yield task directories by their checksum, which is the id of their tree."""
    for checksum, directory in directories.items():
        yield Tree(f"{_TREES}{checksum}", directory, always=True)


def _of_runs(job: JobConfig) -> JsonObject:
    """Return the part of a job whose changes need another run while trials are left to run."""
    values = {key: value for key, value in job_json(job).items() if key not in _OF_NO_RUN}
    values["agents"] = [{k: v for k, v in agent.items() if k not in _OF_NO_AGENT} for agent in values["agents"]]
    # Which trials there are, the plan says.
    return {key: value for key, value in values.items() if key not in ("n_attempts", "datasets", "tasks")}


def _differences(old: JsonObject, new: JsonObject) -> str:
    changed = [key for key in dict.fromkeys([*new, *old]) if old.get(key) != new.get(key)]
    return ", ".join(changed)


def _ended(directory: Path) -> JsonObject | None:
    """Return the summary of the job in `directory` if it is completed."""
    state = saved_state(directory)
    summary = saved_summary(directory, state) if state is not None else None
    return summary if summary is not None and summary.get("state") == "completed" else None
