"""Writes the files of a job from its commit log: lines, trial directories, and statistics over all trials."""

from __future__ import annotations

import json
import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path

from rollout.model.item import Outcome
from rollout.workloads.commit import CommitEntry
from rollout.workloads.job.aggregate import PlannedTrial, job_result, job_statistics
from rollout.workloads.job.board import Tally
from rollout.workloads.job.config import JobConfig
from rollout.workloads.job.kept import FILES, Kept, forget_others, read_kept, read_lines
from rollout.workloads.job.outcome import decoded, record_of, try_record
from rollout.workloads.job.placing import Part, Placed, clear, place
from rollout.workloads.job.record import TrialRecord, record_from, record_json
from rollout.workloads.job.result_files import CONFIG, ERRORS, PLACED, RESULT, STATISTICS, TRIALS, TRIES
from rollout.workloads.job.results import rfc3339
from rollout.workloads.job.spending import Spent, spent_by, spent_in
from rollout.workloads.job.statistics_file import statistics_json
from rollout.workloads.job.trial import TrialSpec
from rollout.workloads.json_form import JsonObject, dump_line, timestamp
from rollout.workloads.output import write_atomically
from rollout.workloads.port import FailedTry, Ledger, Running, StatusTable, Totals

_EVERY_S = 5.0
_SHARE = 20
"""Statistics over all trials take at most a twentieth of the time, however many there are."""
_CANCELLED = ("killed", "interrupted")


class JobWriter:
    """An `ArtifactWriter` that is `Showing`. `config` is that of the run, with `output`: `planned`, all trials of the
    job as [id, label], `kept`, the file of those of earlier runs, and `job`, its current settings."""

    files: tuple[str, ...] = FILES

    def __init__(self, config: JsonObject) -> None:
        output: JsonObject = config.get("output", {})
        # The settings as they are now, if they are known: metrics may be others than when the run was made.
        self.job = JobConfig.model_validate(output.get("job") or config["job"], strict=False)
        self.records: dict[str, TrialRecord] = {}
        """Records, by id in hex, of the trials that have ended, of this run and earlier ones."""
        self._planned: list[tuple[str, str]] = [(trial, label) for trial, label in output.get("planned", ())]
        self._kept_name: str = output.get("kept", "")
        self._kept: Kept = {}
        self._directory = Path()
        self._before = Spent.before(config.get("used", {}))
        self._spent = self._before
        self._seen: dict[str, str] = {}  # of entries, where no plan is known
        self._placed: dict[int, Placed] = {}
        self._lock = threading.Lock()
        self._tally = Tally((), self.job.override_error_policy)
        self._of_run: list[str] = []
        self._next = 0.0

    # ---- as the collector goes on

    def open(self, directory: Path) -> None:
        self._directory = directory
        clear(directory)
        kept = read_kept(directory, self._kept_name)
        self._kept = {trial: kept[trial] for trial, _ in self._planned if trial in kept}
        self._of_run = [label for trial, label in self._planned if trial not in self._kept]
        self._remember(self._kept)

    def begin(self) -> Iterator[tuple[str, bytes]]:
        forget_others(self._directory, self._kept_name)
        self._remember(self._kept)
        for lines in self._kept.values():
            for name, line in lines.items():
                yield name, dump_line(line)

    def take_up(self) -> None:
        self._remember(read_lines(self._directory))

    async def place(self, entry: CommitEntry, ledger: Ledger) -> str:
        spec = TrialSpec.decode(entry.payload)
        record = record_of(entry, spec)
        before: list[FailedTry] = []
        if entry.tries > (record is not None):
            before = await ledger.failed_tries(entry.seq)
        parts = [Part(f"{TRIES}/{number}", try_record(one, spec)) for number, one in enumerate(before, 1)]
        if record is not None:
            parts.append(Part("", record))
        if not parts:
            return ""
        placed, told = await place(self._directory, spec.label, parts, ledger.fetch)
        self._placed[entry.seq] = placed
        return told

    def lines(self, entry: CommitEntry) -> Iterator[tuple[str, bytes]]:
        spec = TrialSpec.decode(entry.payload)
        if entry.outcome is Outcome.DONE:
            decoded(entry.data, spec)  # else it counts as failed
        record = record_of(entry, spec)
        placed = self._placed.pop(entry.seq, None)
        tries = [part.record for part in placed.parts] if placed is not None else [record] if record is not None else []
        with self._lock:
            self._seen[spec.id] = spec.label
            self._spent += spent_by(tries)
            if record is not None:
                self.records[spec.id] = record
                self._tally.add(record)
        if record is not None:
            yield TRIALS, dump_line(_trial_line(spec, record, entry))
            if entry.outcome is Outcome.FAILED:
                yield ERRORS, dump_line(_error_line(spec, record, entry))
        if placed is not None:
            yield PLACED, dump_line({"trial": spec.id, **placed.to_json()})

    def refresh(self, state: str = "") -> None:
        now = time.monotonic()
        if not state and now < self._next:
            return
        for name, data in self.reckoned(cancelled=state in _CANCELLED, ended=bool(state)):
            path = self._directory / name
            # What is there and right stays: its time says when something changed last.
            if not path.exists() or path.read_bytes() != data:
                write_atomically(path, data)
        ended = time.monotonic()
        self._next = ended + max(_EVERY_S, _SHARE * (ended - now))

    def summary(self, summary: JsonObject, totals: Totals) -> JsonObject:
        trials = self.planned_trials()
        began, ended = self._times(trials)
        result = job_result(
            "", trials, started_at=began, ended_at=ended, cancelled=False, overrides=self.job.override_error_policy
        )
        statistics = job_statistics(trials, self.job.override_error_policy, self.job.metrics).values()
        errors = Counter[str]()
        for found in statistics:
            errors.update(found.errors)
        tally = Tally((trial for _, trial in self._planned), self.job.override_error_policy)
        for record in self.records.values():
            tally.add(record)
        return {
            **summary,
            "job": {
                "trials": result.total_trials,
                "completed": result.completed_trials,
                "failed": result.failed_trials,
                "infrastructure": sum(found.counts.infrastructure for found in statistics),
                "skipped": result.skipped_trials,
                "pass_rate": result.pass_rate,
                "mean_reward": result.mean_reward,
                **self._spent.to_json(),
                "agents": tally.agents(),
                "errors": dict(errors.most_common()),
                "metric_errors": {name: why for found in statistics for name, why in found.metric_errors.items()},
            },
        }

    # ---- for people, as it goes on

    def board(self, running: Sequence[Running], n_running: int) -> StatusTable:
        with self._lock:
            return self._tally.board(self._of_run, running, n_running, self._spent)

    # ---- over all trials

    def planned_trials(self) -> list[PlannedTrial]:
        """Return all trials of the job in order, with their results so far."""
        with self._lock:
            records = dict(self.records)
            planned = self._planned or list(self._seen.items())
        found: list[PlannedTrial] = []
        for trial, label in planned:
            dataset, task, agent, attempt = label.split("/")
            record = records.get(trial)
            found.append(
                PlannedTrial(
                    task_name=task,
                    dataset_name=dataset,
                    agent_name=agent,
                    attempt=int(attempt),
                    result=None if record is None else record.result,
                    rewards=None if record is None else record.rewards,
                )
            )
        return found

    def reckoned(self, *, cancelled: bool = False, ended: bool = True) -> Iterator[tuple[str, bytes]]:
        """Yield (name, content) of result.json, stats.json and config.json."""
        trials, overrides, name = self.planned_trials(), self.job.override_error_policy, self.job.name or ""
        began, last = self._times(trials)
        until = last if ended else datetime.now(UTC)
        result = job_result(
            name, trials, started_at=began, ended_at=max(until, began), cancelled=cancelled, overrides=overrides
        )
        yield CONFIG, json.dumps(self.job.model_dump(mode="json"), indent=2, ensure_ascii=False).encode() + b"\n"
        yield STATISTICS, statistics_json(name, job_statistics(trials, overrides, self.job.metrics), self._spent)
        yield RESULT, result.to_json()

    def _times(self, trials: Iterable[PlannedTrial]) -> tuple[datetime, datetime]:
        """Return when the first trial began and the last ended."""
        times = [trial.result.timestamps for trial in trials if trial.result is not None]
        if not times:
            now = datetime.now(UTC)
            return now, now
        return min(one.started_at for one in times), max(one.ended_at for one in times)

    def _remember(self, kept: Kept) -> None:
        of_run = (lines for trial, lines in kept.items() if trial not in self._kept)
        with self._lock:
            self._spent = sum(map(spent_in, of_run), self._before)
            self.records = {
                trial: record_from(lines[TRIALS]["record"]) for trial, lines in kept.items() if TRIALS in lines
            }
            self._seen = {trial: lines[TRIALS]["label"] for trial, lines in kept.items() if TRIALS in lines}
            self._tally = Tally((label for _, label in self._planned), self.job.override_error_policy)
            planned = {trial for trial, _ in self._planned}
            for trial, record in self.records.items():
                if trial in planned:
                    self._tally.add(record)


def _trial_line(spec: TrialSpec, record: TrialRecord, entry: CommitEntry) -> JsonObject:
    return {
        "trial": spec.id,
        "label": spec.label,
        "outcome": entry.outcome.name.lower(),
        "tries": entry.tries,
        "worker": entry.worker,
        "ended_at": timestamp(entry.accepted_ms),
        "record": record_json(record),
    }


def _error_line(spec: TrialSpec, record: TrialRecord, entry: CommitEntry) -> JsonObject:
    error = record.result.error
    return {
        "trial": spec.id,
        "label": spec.label,
        "type": error.type if error is not None else "",
        "message": error.message if error is not None else "",
        "tries": entry.tries,
        "began_at": rfc3339(record.result.timestamps.started_at),
    }
