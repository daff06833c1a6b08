"""Writes the files of an experiment from its commit log: facts and evidence in the order of the schedule, a directory
for each trial, and control and progress while it runs."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, cast

from rollout.model.item import Outcome
from rollout.workloads.commit import CommitEntry
from rollout.workloads.experiment.config import VariantKeys
from rollout.workloads.experiment.contracts import (
    EvidencePaths,
    EvidenceRecord,
    ManifestDesign,
    ManifestVariant,
    PrimaryMetric,
    RunManifest,
    SlotStatus,
    TrialInput,
)
from rollout.workloads.experiment.control import Progress
from rollout.workloads.experiment.engines import model_of
from rollout.workloads.experiment.facts import VOLATILE, CommittedSlot, Setting, rows
from rollout.workloads.experiment.grade_watch import GradeWatch
from rollout.workloads.experiment.inheriting import Inherited, inherited_lines
from rollout.workloads.experiment.layout import (
    CHAINS,
    DIGEST,
    DIRECTORIES,
    EVIDENCE,
    FACTS,
    MANIFEST,
    METRICS,
    PREDICTIONS,
    PRUNED,
    RESOLVED,
    RUN_MANIFEST,
    SCORES,
    TRIALS,
    trial_directory,
)
from rollout.workloads.experiment.primary_watch import PrimaryWatch
from rollout.workloads.experiment.resolve import config_of, digest_of
from rollout.workloads.experiment.schedule import schedule
from rollout.workloads.experiment.trial_files import take
from rollout.workloads.job.outcome import decoded, record_left, record_of, try_record
from rollout.workloads.job.placing import Part, clear, place
from rollout.workloads.job.record import TrialRecord
from rollout.workloads.job.result_files import TRIES
from rollout.workloads.job.trial import TrialSpec
from rollout.workloads.json_form import JsonObject, dump_line, timestamp
from rollout.workloads.output import RUN_ID, disk_errors, write_atomically
from rollout.workloads.port import FailedTry, Ledger, Running, StatusTable, Totals

_EVERY_S = 0.5
_SHARE = 20
"""Control and progress take at most a twentieth of the time to write, however many slots there are."""
_UNKNOWN = "unknown"
HEADS = ("variant", "trials", "done", "passed", "failed", "pruned", "mean score")


class ExperimentWriter:
    """An `ArtifactWriter` that is `Showing` and `Watching`. `config` is that of the run."""

    def __init__(self, config: JsonObject) -> None:
        self._resolved: JsonObject = config["experiment"]
        self._config = config_of(self._resolved)
        self._digest = digest_of(self._resolved)
        self._executors: JsonObject = config.get("executors", {})
        self._directory = Path()
        graded = (PREDICTIONS, SCORES) if self._config.grading is not None else ()
        self.files: tuple[str, ...] = (*FACTS, EVIDENCE, PRUNED, CHAINS, *graded)
        self._setting = Setting.of(self._resolved, self._digest, _UNKNOWN)
        self._part: list[int] = config.get("part") or [0, self._resolved["total_slots"]]
        self._inherited = Inherited(**config["inherited"]) if "inherited" in config else None
        self._progress = self._new_progress(_UNKNOWN)
        self._tally = Tally([variant.variant_id for variant in self._config.variants])
        self._watch = self._new_watch()
        self._grades = GradeWatch()
        self._placed: dict[int, CommittedSlot] = {}
        self._lock = threading.Lock()
        self._next = 0.0

    # ---- as the collector goes on

    def open(self, directory: Path) -> None:
        self._directory = directory
        for name in DIRECTORIES:
            (directory / name).mkdir(parents=True, exist_ok=True)
        clear(directory)
        run_id = _run_id(directory)
        self._setting = Setting.of(self._resolved, self._digest, run_id)
        self._progress.run_id = run_id
        self._write_once(run_id)

    def begin(self) -> Iterator[tuple[str, bytes]]:
        with self._lock:
            self._progress.statuses.clear()
            self._progress.consecutive.clear()
            self._tally.clear()
            self._watch = self._new_watch()
            self._grades = GradeWatch()
        if self._inherited is not None:
            for name, row in inherited_lines(self._directory, self._inherited, self._setting.run_id):
                self._count(name, row)
                yield name, dump_line(row)

    def take_up(self) -> None:
        with self._lock, (self._directory / TRIALS).open("rb") as file:
            for line in file:
                self._count(TRIALS, json.loads(line))
            self._watch.take_up(self._directory)

    async def place(self, entry: CommitEntry, ledger: Ledger) -> str:
        spec = TrialSpec.decode(entry.payload)
        given = self._given(spec)
        pruned = entry.outcome is Outcome.SKIPPED
        record = record_left(entry, spec) if pruned else record_of(entry, spec)
        if record is None:
            self._placed[entry.seq] = CommittedSlot(given, entry.outcome)
            return ""
        before: list[FailedTry] = []
        if entry.tries > 1 or not entry.data:
            before = await ledger.failed_tries(entry.seq)
        tries = [try_record(one, spec) for one in before]
        parts = [*(Part(f"{TRIES}/{number}", one) for number, one in enumerate(tries, 1)), Part("", record)]
        name = trial_directory(given.ids.trial_id)
        _, told = await place(self._directory, name, parts, ledger.fetch)
        with disk_errors(self._directory / name):
            files = await asyncio.to_thread(take, self._directory, self._directory / name)
        faults = [f"{given.ids.trial_id}: {fault}" for fault in files.faults]
        if pruned:
            self._placed[entry.seq] = CommittedSlot(given, entry.outcome, evidence_only=files.evidence)
            return "; ".join(filter(None, [told, *faults]))
        retried = [_type(record) for one, record in zip(before, tries, strict=True) if not one.worker_lost]
        self._placed[entry.seq] = CommittedSlot(given, entry.outcome, record, files, retried, entry.worker)
        with self._lock:
            missing = [self._grades.warning_once(), self._watch.warning_once()]
        return "; ".join(filter(None, [told, *missing, *faults]))

    def lines(self, entry: CommitEntry) -> Iterator[tuple[str, bytes]]:
        spec = TrialSpec.decode(entry.payload)
        if entry.outcome is Outcome.DONE:
            decoded(entry.data, spec)  # else it counts as failed
        slot = self._placed.pop(entry.seq, None)
        if slot is None or slot.outcome is not entry.outcome:  # its result cannot be used
            slot = CommittedSlot(self._given(spec), entry.outcome, record_of(entry, spec), worker=entry.worker)
        trial: JsonObject = {}
        for name, row in rows(slot, self._setting):
            trial = row if name == TRIALS else trial
            yield name, dump_line(row)
            with self._lock:
                self._count(name, row)
        yield from self._beside(slot, trial)

    def _beside(self, slot: CommittedSlot, trial: JsonObject) -> Iterator[tuple[str, bytes]]:
        """Yield evidence, and the files that scoring programs of benchmarks read."""
        ids = slot.given.ids.to_json()
        evidence = slot.files.evidence
        for name, found in ((EVIDENCE, evidence), (PRUNED, slot.evidence_only)):
            if found is not None and found.ids == slot.given.ids:
                yield name, dump_line(_with_paths(found).to_json())
        if slot.given.chain is not None and slot.outcome is Outcome.DONE:
            workspace = None if evidence is None else evidence.evidence.workspace_post_ref
            yield CHAINS, dump_line({**ids, **slot.given.chain.to_json(), "workspace_ref": workspace})
        if self._config.grading is not None and slot.record is not None:
            output = None if evidence is None else evidence.evidence.trial_output_ref
            yield PREDICTIONS, dump_line({"ids": ids, "outcome": trial["outcome"], "trial_output_ref": output})
            grade = slot.record.rewards or {}
            yield SCORES, dump_line({"ids": ids, "score": trial["score"], "passed": trial["passed"], "grade": grade})

    def watch(self, state: str, reason: str) -> None:
        self._progress.watch(state, reason)

    def refresh(self, state: str = "") -> None:
        began = time.monotonic()
        if not state and began < self._next:
            return
        with self._lock:
            if state:
                self._progress.watch(state, "")
            self._progress.write(self._directory)
        ended = time.monotonic()
        self._next = ended + max(_EVERY_S, _SHARE * (ended - began))

    def summary(self, summary: JsonObject, totals: Totals) -> JsonObject:
        with self._lock:
            warnings = [watch.warning() for watch in (self._grades, self._watch) if watch.is_missing]
            found = {"digest": self._digest, "variants": self._tally.to_json(), "warnings": warnings}
            return {**summary, "experiment": found}

    def board(self, running: Sequence[Running], n_running: int) -> StatusTable:
        with self._lock:
            self._progress.running = tuple(running)
            shown = [(self._progress.slot_of(one.seq), one) for one in running]
            variants = self._tally.to_json()
            return StatusTable(
                heads=HEADS,
                rows=tuple(_row(name, counts) for name, counts in variants.items()),
                running=tuple((self._label(index), one.note, f"{one.seconds:.0f} s") for index, one in shown),
                n_running=n_running,
                line="",
                fields={"variants": variants},
            )

    # ----

    def _new_progress(self, run_id: str) -> Progress:
        config, design = self._config, self._config.design
        tasks: list[str] = self._resolved["dataset"]["task_ids"]
        slots = schedule(design.order, len(config.variants), len(tasks), design.replications, design.seed)
        return Progress(
            run_id=run_id,
            variants=[variant.variant_id for variant in config.variants],
            schedule=tuple(slots),
            use_container=config.provider != "process",
            first=0 if self._inherited is not None else self._part[0],
            seq_from=self._part[0],
        )

    def _label(self, index: int) -> str:
        slot = self._progress.schedule[index]
        task = self._resolved["dataset"]["task_ids"][slot.task_idx]
        return f"{self._progress.variants[slot.variant_idx]}/{task}/{slot.repl_idx}"

    def _given(self, spec: TrialSpec) -> TrialInput:
        return TrialInput.of_payload(spec.contract or {}, self._setting.run_id)

    def _count(self, name: str, row: JsonObject) -> None:
        """Count a row of the file `name`."""
        if name == METRICS:
            self._watch.add_metric(row["metric_name"])
        if name == TRIALS:
            self._progress.commit(row["status"])
            self._tally.add(row)
            self._watch.add_trial(row)
            self._grades.add_trial(row)

    def _new_watch(self) -> PrimaryWatch:
        return PrimaryWatch(self._config.primary_metric.name)

    def _write_once(self, run_id: str) -> None:
        """Write what does not change once the run has started."""
        directory = self._directory
        made = {
            RESOLVED: _pretty(self._resolved),
            DIGEST: f"{self._digest}\n".encode(),
        }
        created = timestamp(round(time.time() * 1000))
        known = _json_of(directory / MANIFEST)
        if known.get("run_id") == run_id:
            created = known["created_at"]
        made[MANIFEST] = _pretty(
            {
                "schema_version": "manifest_v1",
                "run_id": run_id,
                "experiment_id": self._config.experiment.id,
                "created_at": created,
                "resolved_digest": self._digest,
                "rollout_version": _version(),
                **({} if self._inherited is None else {"forked_from": self._inherited.to_json()}),
            }
        )
        made[RUN_MANIFEST] = self._manifest(run_id, created).encode()
        for name, data in made.items():
            path = directory / name
            if not path.exists() or path.read_bytes() != data:
                write_atomically(path, data)

    def _variant(self, variant: VariantKeys) -> JsonObject:
        model, model_id = model_of(variant.variant_id, self._config, self._executors)
        return ManifestVariant(
            variant_id=variant.variant_id,
            baseline=variant is self._config.baseline,
            image=variant.image or self._config.image,
            bindings=variant.bindings,
            model=model,
            model_id=model_id,
        ).model_dump(mode="json")

    def _manifest(self, run_id: str, created: str) -> RunManifest:
        config, design, metric = self._config, self._config.design, self._config.primary_metric
        fork = self._inherited
        return RunManifest.of(
            {
                "run_id": run_id,
                "experiment_id": config.experiment.id,
                "name": config.experiment.name or config.experiment.id,
                "created_at": created,
                "resolved_digest": self._digest,
                "rollout_version": _version(),
                "design": ManifestDesign(
                    comparison=design.comparison,
                    order=design.order,
                    replications=design.replications,
                    seed=design.seed,
                    max_concurrency=design.max_concurrency,
                ).to_json(),
                "baseline": config.baseline.variant_id,
                "variants": [self._variant(variant) for variant in config.variants],
                "tasks": len(self._resolved["dataset"]["task_ids"]),
                "total_slots": self._resolved["total_slots"],
                "state_policy": config.policy.state_policy,
                "primary_metric": PrimaryMetric(name=metric.name, direction=metric.direction).to_json(),
                "thresholds": {"pass": metric.passed_from, "non_inferiority_margin": metric.non_inferiority_margin},
                "volatile_fields": list(VOLATILE),
                "graded": config.grading is not None,
                "forked_from": None if fork is None else {"run_id": fork.run_id, "slots": fork.slots},
            }
        )


class Tally:
    """Counts of each variant over the rows of its trials so far."""

    def __init__(self, variants: Iterable[str]) -> None:
        self._counts = {name: Counter[str]() for name in variants}
        self._failures = {name: Counter[str]() for name in self._counts}
        self._scores = dict.fromkeys(self._counts, 0.0)

    def clear(self) -> None:
        for name in self._counts:
            self._counts[name].clear()
            self._failures[name].clear()
            self._scores[name] = 0.0

    def add(self, trial: JsonObject) -> None:
        counts = self._counts[trial["variant_id"]]
        counts[trial["status"]] += 1
        counts["passed"] += trial["passed"] is True
        if trial["classification"] is not None:
            self._failures[trial["variant_id"]][trial["classification"]] += 1
        if trial["score"] is not None:
            counts["scored"] += 1
            self._scores[trial["variant_id"]] += trial["score"]

    def to_json(self) -> JsonObject:
        return {
            name: {
                "trials": sum(counts[status] for status in _STATUSES),
                **{status: counts[status] for status in _STATUSES},
                "passed": counts["passed"],
                "failures": dict(self._failures[name].most_common()),
                "mean_score": self._scores[name] / counts["scored"] if counts["scored"] else None,
            }
            for name, counts in self._counts.items()
        }


_STATUSES: tuple[SlotStatus, ...] = ("completed", "failed", "skipped_pruned", "cancelled")


def _row(name: str, counts: JsonObject) -> tuple[str, ...]:
    keys = ("trials", "completed", "passed", "failed", "skipped_pruned")
    mean: float | None = counts["mean_score"]
    return (name, *(f"{counts[key]:,}" for key in keys), "" if mean is None else f"{mean:.4g}")


def _version() -> str:
    try:
        return version("rollout-engine")
    except PackageNotFoundError:
        return _UNKNOWN


def _run_id(directory: Path) -> str:
    try:
        return (directory / RUN_ID).read_text("ascii").strip() or _UNKNOWN
    except OSError:
        return _UNKNOWN


def _type(record: TrialRecord) -> str:
    error = record.result.error
    return error.type if error is not None else ""


def _with_paths(evidence: EvidenceRecord) -> EvidenceRecord:
    directory = trial_directory(evidence.ids.trial_id)
    refs = evidence.evidence
    paths = EvidencePaths(
        trial_dir=directory,
        trial_input=f"{directory}/trial_input.json",
        trial_output=f"{directory}/result.json" if refs.trial_output_ref else None,
        stdout=f"{directory}/stdout.log" if refs.stdout_ref else None,
        stderr=f"{directory}/stderr.log" if refs.stderr_ref else None,
    )
    return evidence.model_copy(update={"paths": paths})


def _pretty(value: JsonObject) -> bytes:
    return json.dumps(value, indent=2, ensure_ascii=False).encode() + b"\n"


def _json_of(path: Path) -> JsonObject:
    try:
        found: Any = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return cast("JsonObject", found) if isinstance(found, dict) else {}
