"""A job that continues as another run: which trials stay as they are, and which run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rollout.workloads.job.config import JobConfig
from rollout.workloads.job.kept import Kept, read_kept, read_lines, write_kept
from rollout.workloads.job.placing import aside
from rollout.workloads.job.plan import Trial
from rollout.workloads.job.record import record_from
from rollout.workloads.job.result_files import PLACED, TRIALS
from rollout.workloads.job.run_config import digest_of
from rollout.workloads.job.spending import MICRO, Spent, spent_in
from rollout.workloads.json_form import JsonObject

_SHOWN = 3


@dataclass(frozen=True, slots=True)
class Following:
    """The plan of another run of a job. `left` are trials to run. `final` are lines of trials that have ended, of this
    job and earlier ones. `moved` is (label, id) of trials whose directory is moved aside. `used` is the used part of
    the budget. `same_plan` means that the job's trials are the same as before. `told` is for the user."""

    left: tuple[Trial, ...]
    final: Kept
    moved: tuple[tuple[str, str], ...]
    used: JsonObject
    same_plan: bool
    told: str


def following(
    trials: Sequence[Trial], job: JobConfig, config: JsonObject, directory: Path, retry: frozenset[str]
) -> Following:
    """Return the plan. `config` is that of the previous run, whose lines are in `directory`. Writes nothing.
    Blocking."""
    output: JsonObject = config["output"]
    before: dict[str, str] = {label: trial for trial, label in output["planned"]}
    now = {trial.label: trial for trial in trials}
    kept = read_kept(directory, output["kept"])
    of_run = {trial: lines for trial, lines in read_lines(directory).items() if trial not in kept}
    final = {trial: lines for trial, lines in (kept | of_run).items() if TRIALS in lines}
    used = _used(of_run, config)
    changed = [label for label, trial in now.items() if before.get(label, trial.id.hex()) != trial.id.hex()]
    known = set(before.values()) | set(final)
    added = [label for label, trial in now.items() if trial.id.hex() not in known and label not in changed]
    again = [label for label, trial in now.items() if _error_of(final.get(trial.id.hex())) in retry]
    # Of trials that came to no result, what their tries left.
    tried = [
        lines[PLACED]["directory"]
        for trial, lines in of_run.items()
        if trial not in final and lines[PLACED]["directory"] not in changed
    ]
    moved = (
        *((label, before[label]) for label in changed),
        *((label, now[label].id.hex()) for label in again),
        *((label, before[label]) for label in tried),
    )
    for _, trial in moved:
        final.pop(trial, None)
    left = tuple(trial for trial in trials if trial.id.hex() not in final)
    waiting = len(left) - len(added) - len(changed) - len(again)
    gone = [label for label in before if label not in now]
    said = [
        _counted(len(trials) - len(left), "as they are"),
        _counted(len(added), "new", added),
        _counted(len(changed), "changed, what they were is kept beside them", changed),
        _counted(len(again), "once more", again),
        _counted(waiting, "without a result yet"),
        _counted(len(gone), "gone, their directories stay", gone),
    ]
    if retry and not again:
        said.append(f"none ended with {' or '.join(sorted(retry))}")
    if left and (over := _used_up(job, used)):
        said.append(f"nothing more starts: {over}")
        left = ()
    same = digest_of(trial.id for trial in trials) == digest_of(bytes.fromhex(trial) for trial, _ in output["planned"])
    return Following(left, final, moved, used, same, "trials: " + "; ".join(text for text in said if text))


def carry_over(following: Following, directory: Path) -> str:
    """Prepare `directory` for the run, and return the name of the file with trials that stay. Blocking."""
    for label, trial in following.moved:
        aside(directory, label, trial)
    return write_kept(directory, following.final)


def _error_of(lines: dict[str, JsonObject] | None) -> str:
    error = lines[TRIALS]["record"]["result"].get("error") if lines else None
    return error["type"] if error else ""


def _used(of_run: Kept, config: JsonObject) -> JsonObject:
    """Return what the run of `config`, whose lines are `of_run`, and all runs before it used. What was spent counts
    even if the trial has no result, runs anew, or no longer belongs to the job."""
    spent = sum(map(spent_in, of_run.values()), Spent.before(config["used"]))
    records = [record_from(lines[TRIALS]["record"]) for lines in of_run.values() if TRIALS in lines]
    times = [record.result.timestamps for record in records]
    seconds = 0.0
    if times:
        seconds = (max(one.ended_at for one in times) - min(one.started_at for one in times)).total_seconds()
    limit = config["job"]["budget"]["max_wall_time_sec"]
    if limit is not None:  # trials that ran when it was reached were finished
        seconds = min(seconds, max(0.0, limit - config["used"].get("seconds", 0)))
    return {
        "tokens": spent.tokens,
        "micro_dollars": spent.micro_dollars,
        "seconds": round(config["used"].get("seconds", 0) + seconds, 3),
    }


def _used_up(job: JobConfig, used: JsonObject) -> str:
    budget = job.budget
    if budget.max_tokens is not None and used["tokens"] >= budget.max_tokens:
        return f"budget.max_tokens is {budget.max_tokens:,}, and {used['tokens']:,} tokens are used up: raise it"
    if budget.max_cost_usd is not None and used["micro_dollars"] >= budget.max_cost_usd * MICRO:
        spent = used["micro_dollars"] / MICRO
        return f"budget.max_cost_usd is {budget.max_cost_usd:g}, and ${spent:.2f} are spent: raise it"
    if budget.max_wall_time_sec is not None and used["seconds"] > budget.max_wall_time_sec - 1:
        return f"budget.max_wall_time_sec is {budget.max_wall_time_sec:g}, and the job has run as long: raise it"
    return ""


def _counted(count: int, what: str, labels: Sequence[str] = ()) -> str:
    shown = ", ".join(labels[:_SHOWN]) + (", ..." if len(labels) > _SHOWN else "")
    return f"{count:,} {what}" + (f" ({shown})" if shown else "") if count else ""
