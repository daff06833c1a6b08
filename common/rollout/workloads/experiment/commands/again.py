"""`rollout experiment fork|replay`: runs parts of an existing run again."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from rollout.cli.boundary import FAILED, OK
from rollout.cli.options import chosen
from rollout.cli.work_command import Typed, work_command
from rollout.cli.work_options import Options
from rollout.client.target import find_target
from rollout.config.load import located
from rollout.model.errors import ConfigError
from rollout.workloads.experiment.commands.controls import RunArgument, tell
from rollout.workloads.experiment.commands.find_run import RUNS_DIR, directory_for, find_run
from rollout.workloads.experiment.config import ExperimentConfig, with_assignments
from rollout.workloads.experiment.contracts import sha256_of
from rollout.workloads.experiment.inheriting import inherit
from rollout.workloads.experiment.layout import EVIDENCE, RESULT, trial_directory
from rollout.workloads.experiment.resolve import Resolved, config_of, digest_of
from rollout.workloads.experiment.schedule import schedule, slot_of, trial_id
from rollout.workloads.json_form import JsonObject, canonical

if TYPE_CHECKING:
    from rollout.workloads.experiment.workload import ExperimentChecked

FromOption = Annotated[
    str, typer.Option("--from", metavar="SLOT", help="First slot to run again: a trial's id, or an index.")
]
SetOption = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Override a key; repeatable."),
]
NameOption = Annotated[str, typer.Option("--name", help="Name of the new run; default: the experiment's id, numbered.")]
_COMPARED = ("workspace_pre_ref", "workspace_post_ref", "diff_incremental_ref", "patch_incremental_ref", "grade_ref")
REPLAYS = "replays"


@work_command(ExperimentConfig, without=["resume", "dry_run", "detach", "provider", "concurrent"])
def fork(
    typed: Typed, run: RunArgument, first: FromOption, assignments: SetOption = None, name: NameOption = ""
) -> None:
    """Start another run that keeps this run's committed slots before SLOT and runs the others again.

    Kept slots retain facts, evidence and commit ids; manifest.json names their run. Chains of trials
    (policy.state_policy) continue with the earlier workspaces.
    """
    runs_dir = Path(typed.given.get("runs_dir") or RUNS_DIR)
    found = find_run(run, runs_dir)
    before = config_of(found.resolved)
    settings = with_assignments(before, assignments or ())
    kept = before.policy.state_policy
    if settings.policy.state_policy != kept:
        raise ConfigError(f"--set: policy.state_policy must stay {kept}, by which the slots before --from ran")
    resolved, slot = checked_here(settings).resolved, slot_of(first)
    if not 0 < slot < len(resolved.slots):
        raise ConfigError(f"--from: must be a slot from 1 to {len(resolved.slots) - 1}, not {first}")
    if _names(resolved, slot) != _names_of(found.resolved, slot):
        raise ConfigError(
            "--from: the slots before it are others in this experiment: its order, tasks or variants changed"
        )
    directory = _free(resolved, runs_dir, name)
    inherited = inherit(found.directory, found.run_id, slot, directory)
    _run(typed, settings, directory, range(slot, len(resolved.slots)), inherited.to_json())


@work_command(ExperimentConfig, without=["resume", "dry_run", "detach", "provider", "concurrent", "name"])
def replay(
    typed: Typed,
    run: RunArgument,
    trial: Annotated[str, typer.Argument(metavar="TRIAL", help="The trial, such as trial_000001.")],
) -> None:
    """Run one trial again, and compare result and workspace with the evidence by SHA-256.

    The new trial goes to replays/ in the run's directory. Exit code 1: they differ.
    """
    from rollout.cli.progress import NotesOnly
    from rollout.cli.session import run_workload
    from rollout.workloads.experiment.workload import Experiment

    found = find_run(run, Path(typed.given.get("runs_dir") or RUNS_DIR))
    settings, slot = config_of(found.resolved), slot_of(trial)
    if digest_of(checked_here(settings).resolved.json) != digest_of(found.resolved):
        raise ConfigError(f"{found.directory}: the tasks, the agent or the grader are others by now than they were")
    if not 0 <= slot < found.resolved["total_slots"]:
        raise ConfigError(f"{found.directory} has no trial {trial}")
    trial = trial_id(slot)
    directory, number = found.directory / REPLAYS / trial, 2
    while directory.exists():
        directory, number = directory.with_name(f"{trial}-{number}"), number + 1
    options = Options(words=typed.words("experiment", "replay", str(found.directory), trial), **typed.shared)
    workload = Experiment(directory, part=range(slot, slot + 1), after=found.directory)
    code = run_workload(workload, settings, options, NotesOnly(tell))
    if code != OK:
        raise typer.Exit(code)
    same = {name: one == other for name, one, other in _compared(found.directory, directory, trial)}
    for name, is_same in same.items():
        typer.echo(f"{name}: {'the same' if is_same else 'differs'}")
    typer.echo(f"the trial is in {directory / trial_directory(trial)}")
    raise typer.Exit(OK if same["result"] and same["workspace_post_ref"] else FAILED)


def _compared(run: Path, other: Path, trial: str) -> Iterator[tuple[str, str | None, str | None]]:
    """Yield (what, hash before, hash now)."""
    yield "result", _result(run, trial), _result(other, trial)
    before, now = _evidence(run, trial), _evidence(other, trial)
    for name in _COMPARED:
        yield name, before.get(name), now.get(name)


def _result(run: Path, trial: str) -> str | None:
    """Return a hash of the agent's result without the id of the run."""
    try:
        value: JsonObject = json.loads((run / trial_directory(trial) / RESULT).read_bytes())
        return sha256_of(canonical({**value, "ids": {**value["ids"], "run_id": ""}}))
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _evidence(run: Path, trial: str) -> JsonObject:
    with (run / EVIDENCE).open("rb") as file:
        records: list[JsonObject] = [json.loads(line) for line in file]
    return next((one["evidence"] for one in records if one["ids"]["trial_id"] == trial), JsonObject())


def _names(resolved: Resolved, slots: int) -> list[tuple[str, str, int]]:
    return [
        (resolved.variants[one.variant_idx].variant_id, resolved.tasks[one.task_idx].task_id, one.repl_idx)
        for one in resolved.slots[:slots]
    ]


def _names_of(resolved: JsonObject, slots: int) -> list[tuple[str, str, int]]:

    config, tasks = config_of(resolved), resolved["dataset"]["task_ids"]
    design = config.design
    planned = list(schedule(design.order, len(config.variants), len(tasks), design.replications, design.seed))
    return [(config.variants[one.variant_idx].variant_id, tasks[one.task_idx], one.repl_idx) for one in planned[:slots]]


def _free(resolved: Resolved, runs_dir: Path, name: str) -> Path:
    """Return a new directory for a run."""
    if name:
        if (runs_dir / name).exists():
            raise ConfigError(f"--name: {runs_dir / name} is there already: choose another name")
        return runs_dir / name
    return directory_for(resolved.json, runs_dir, "", goes_on=False)[0]


def checked_here(settings: ExperimentConfig, file: Path | None = None) -> ExperimentChecked:
    """Check the settings as a run does. Raises ConfigError or InputError with all faults, with the lines of `file`."""
    from rollout.workloads.experiment.workload import Experiment
    from rollout.workloads.port import check_only

    workload = Experiment()
    if not find_target(None, None, chosen().selector).addresses:
        workload.works_here()
    with located(file, ExperimentConfig):
        return check_only(workload, settings)


def _run(typed: Typed, settings: ExperimentConfig, directory: Path, part: range, inherited: JsonObject) -> NoReturn:
    from rollout.workloads.experiment.workload import Experiment

    workload = Experiment(directory, part=part, inherited=inherited)
    typed.run(workload, settings, typed.words("experiment", "continue", str(directory)), None)


def add_to(app: typer.Typer) -> None:
    app.command("fork")(fork)
    app.command("replay")(replay)
