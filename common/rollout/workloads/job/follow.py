"""A job that goes on as another run: which trials stay as they are, and which are left to run."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import fsum
from pathlib import Path

from rollout.workloads.job.config import JobConfig
from rollout.workloads.job.kept import read_kept, read_lines, write_kept
from rollout.workloads.job.placing import aside
from rollout.workloads.job.plan import Trial
from rollout.workloads.job.record import record_from
from rollout.workloads.job.result_files import TRIALS
from rollout.workloads.job.run_config import MICRO, digest_of
from rollout.workloads.json_form import JsonObject

_SHOWN = 3


@dataclass(frozen=True, slots=True)
class Left:
    """`trials`: those that are to run. `kept`: name of the file of the others. `used`: of the budget. `nothing_new`:
    the run that is over is all there is to be had, and stays the directory's."""

    trials: tuple[Trial, ...]
    kept: str
    used: JsonObject
    told: str
    nothing_new: bool


def followed(
    trials: Sequence[Trial], job: JobConfig, config: JsonObject, directory: Path, retry: frozenset[str]
) -> Left:
    """`config`: that of the run that is over, whose lines are in `directory`. Blocking."""
    output: JsonObject = config["output"]
    before: dict[str, str] = {label: trial for trial, label in output["planned"]}
    now = {trial.label: trial for trial in trials}
    final = {**read_kept(directory, output["kept"]), **read_lines(directory)}
    final = {trial: lines for trial, lines in final.items() if TRIALS in lines}
    again = {trial for trial, lines in final.items() if _error_of(lines) in retry}
    changed = [label for label, trial in now.items() if label in before and before[label] != trial.id.hex()]
    known = set(before.values()) | set(final)
    added = [label for label, trial in now.items() if trial.id.hex() not in known and label not in changed]
    gone = [label for label in before if label not in now]
    kept = {trial: lines for trial, lines in final.items() if trial not in again}
    used = _used(final.values())
    left = tuple(trial for trial in trials if trial.id.hex() not in kept)
    said = [_counted(len(trials) - len(left), "stay as they are")]
    said += [_counted(len(added), "are new", added)] if added else []
    if changed:
        said.append(_counted(len(changed), "changed and run anew", changed) + "; what they were is kept beside them")
    retried = [label for label, trial in now.items() if trial.id.hex() in again]
    said += [_counted(len(retried), "run once more", retried)] if retried else []
    if retry and not retried:
        said.append(f"none ended with {' or '.join(sorted(retry))}")
    waiting = len(left) - len(added) - len(changed) - len(retried)
    said += [_counted(waiting, "had no result yet")] if waiting else []
    said += [_counted(len(gone), "are gone, and their directories stay", gone)] if gone else []
    if left and (over := _used_up(job, used)):
        said.append(f"nothing more starts: {over}")
        left = ()
    unchanged = digest_of(trial.id for trial in trials) == digest_of(bytes.fromhex(one) for one, _ in output["planned"])
    if unchanged and not left:
        return Left((), output["kept"], used, "; ".join(said), nothing_new=True)
    for label in changed:
        kept.pop(before[label], None)
        aside(directory, label, before[label])
    for label in retried:
        aside(directory, label, now[label].id.hex())
    return Left(left, write_kept(directory, kept), used, "; ".join(said), nothing_new=False)


def _error_of(lines: dict[str, JsonObject]) -> str:
    error = lines[TRIALS]["record"]["result"].get("error")
    return error["type"] if error else ""


def _used(final: Iterable[dict[str, JsonObject]]) -> JsonObject:
    records = [record_from(lines[TRIALS]["record"]) for lines in final]
    tokens = sum(record.usage.n_input_tokens + record.usage.n_output_tokens for record in records)
    return {"tokens": tokens, "micro_dollars": round(fsum(record.result.cost for record in records) * MICRO)}


def _used_up(job: JobConfig, used: JsonObject) -> str:
    budget = job.budget
    if budget.max_tokens is not None and used["tokens"] >= budget.max_tokens:
        return f"budget.max_tokens is {budget.max_tokens:,}, and {used['tokens']:,} tokens are used up: raise it"
    if budget.max_cost_usd is not None and used["micro_dollars"] >= budget.max_cost_usd * MICRO:
        spent = used["micro_dollars"] / MICRO
        return f"budget.max_cost_usd is {budget.max_cost_usd:g}, and ${spent:.2f} are spent: raise it"
    return ""


def _counted(count: int, what: str, labels: Sequence[str] = ()) -> str:
    shown = ", ".join(labels[:_SHOWN]) + (", ..." if len(labels) > _SHOWN else "")
    return f"{count:,} trials {what}" + (f" ({shown})" if shown else "")
