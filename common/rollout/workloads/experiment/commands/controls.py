"""`rollout experiment pause|resume|kill|recover`: what `rollout run` does, for a run named by its directory."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from contextlib import aclosing, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

from rollout.cli.anywhere import cluster_of
from rollout.cli.asking import PATIENCE_S, OwnerEndedError, reached
from rollout.cli.commands.run import refuse_idle
from rollout.model.errors import ConfigError, StateError
from rollout.model.ids import short
from rollout.model.run import RunState
from rollout.workloads.experiment.commands.condition import Condition, condition_of, going_on
from rollout.workloads.experiment.commands.find_run import RUNS_DIR, Found, find_run
from rollout.workloads.experiment.control import read_control
from rollout.workloads.experiment.layout import CONTROL, trial_directory
from rollout.workloads.json_form import JsonObject
from rollout.workloads.output import OutputDirectory, write_atomically

if TYPE_CHECKING:
    from rollout.client import Runs
    from rollout.wire.v1 import runs_pb2 as pb

RunArgument = Annotated[str, typer.Argument(metavar="RUN|DIR", help="The run's directory, name or id, or @last.")]
RunsDirOption = Annotated[str, typer.Option("--runs-dir", metavar="DIR", help="Directory of all runs.")]
LabelOption = Annotated[str, typer.Option("--label", metavar="TEXT", help="Label to record with the pause.")]
Answer = TypeVar("Answer")


def pause(run: RunArgument, label: LabelOption = "", runs_dir: RunsDirOption = RUNS_DIR) -> None:
    """Pause a run: running trials finish, or are interrupted after policy.pause_timeout_ms."""
    found = find_run(run, Path(runs_dir))
    _say(found, _ask(found, lambda runs: runs.command(found.run_id, "pause", reason=label), "pause"))


def resume(run: RunArgument, runs_dir: RunsDirOption = RUNS_DIR) -> None:
    """Resume a paused run whose command waits; else use `rollout experiment continue`."""
    found = find_run(run, Path(runs_dir))
    _say(found, _ask(found, lambda runs: runs.command(found.run_id, "resume"), "resume"))


def kill(
    run: RunArgument,
    reason: Annotated[str, typer.Option("--reason", help="Reason to record with the run.")] = "",
    runs_dir: RunsDirOption = RUNS_DIR,
) -> None:
    """Cancel unfinished trials; committed facts and evidence stay."""
    found = find_run(run, Path(runs_dir))
    status = _ask(found, lambda runs: runs.command(found.run_id, "kill", reason=reason))
    if status.state == RunState.KILLED:
        _write_killed(found.directory)
    _say(found, status)


def _write_killed(directory: Path) -> None:
    """Record the kill, unless a command uses the run and writes the control file itself."""
    with suppress(StateError), OutputDirectory.open(directory, "rollout experiment kill"):
        control = read_control(directory)
        if control is not None:
            ended = control.model_copy(update={"status": "killed", "active_trials": {}, "pause": None})
            write_atomically(directory / CONTROL, ended.encode())


def recover(
    run: RunArgument,
    runs_dir: RunsDirOption = RUNS_DIR,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON on standard output.")] = False,
) -> None:
    """Report files, ledger and active trials of an interrupted run. Changes nothing."""
    found = find_run(run, Path(runs_dir))
    condition = condition_of(found)
    report = _ask(found, lambda runs: _report(runs, found, condition))
    if as_json:
        typer.echo(json.dumps(report, ensure_ascii=False))
        return
    typer.echo(
        f"{found.directory}: {report['state']} in the ledger, {report['control']} in its control file; "
        f"{report['collected']} of {report['committed']} committed slots are in its files, of {report['total_slots']}"
    )
    for name, orphan in report["active_trials"].items():
        typer.echo(f"  {name}: {orphan['variant_id']}, {orphan['in_ledger']}; its directory is {orphan['directory']}")
    for fault in report["damaged"]:
        typer.echo(f"  {fault}")
    if report["held_by"]:
        typer.echo(f"a command works at it: {report['held_by']}")
    if report["next"]:
        typer.echo(f"go on with: {report['next']}")


async def _report(runs: Runs, found: Found, condition: Condition) -> JsonObject:
    status = await runs.get(found.run_id)
    states: dict[int, str] = {}
    pages = runs.items(found.run_id, "running", limit=10_000)
    async with aclosing(pages):
        async for page in pages:
            states |= {item.seq: item.state for item in page.items}
    control = condition.control
    active = {} if control is None else control.active_trials
    whole = status.state == RunState.COMPLETED and not condition.damaged and condition.collected == status.cursor
    return {
        "run_id": found.run_id,
        "state": status.state,
        "control": None if control is None else control.status,
        "committed": status.cursor,
        "collected": condition.collected,
        "total_slots": found.resolved["total_slots"],
        "active_trials": {
            name: {
                "variant_id": one.variant_id,
                "worker_id": one.worker_id,
                "in_ledger": _in_ledger(one.schedule_idx, states, status),
                "directory": "there" if (found.directory / trial_directory(name)).is_dir() else "missing",
            }
            for name, one in active.items()
        },
        "damaged": condition.damaged,
        "held_by": condition.held_by,
        "next": "" if whole or condition.held_by else condition.going_on,
    }


def _in_ledger(seq: int, states: dict[int, str], status: pb.RunStatus) -> str:
    """Describe a slot's state in the ledger. An orphan is dispatched again, or counts as worker_lost, when the run
    resumes."""
    if seq < status.cursor:
        return "committed"
    return states.get(seq, "not running: it begins again")


def _ask(found: Found, question: Callable[[Runs], Awaitable[Answer]], verb: str = "") -> Answer:
    """Ask the run's cluster. `verb` is given if the question makes sense only while a command is running. Raises
    ConfigError."""
    target = cluster_of(found.directory, found.run_id)
    if target is None:
        raise ConfigError(f"{found.directory}: the cluster of run {short(found.run_id)} is not known here")

    async def refuse(runs: Runs, state: Path) -> None:
        refuse_idle(await runs.get(found.run_id), verb, state, going_on(found.directory))

    async def asking() -> Answer:
        unless_idle = refuse if verb else None
        async with reached(target, tell, patience_s=PATIENCE_S, unless_idle=unless_idle) as (runs, _):
            return await question(runs)

    while True:
        try:
            return asyncio.run(asking())
        except OwnerEndedError:  # the command that worked there: what it left in its ledger is asked instead
            continue


def tell(text: str) -> None:
    typer.echo(text, err=True)


def _say(found: Found, status: pb.RunStatus) -> None:
    reason = f" ({status.reason})" if status.reason else ""
    typer.echo(f"{found.directory}: run {short(found.run_id)} is {status.state}{reason}, {status.cursor} committed")


def add_to(app: typer.Typer) -> None:
    for command in (pause, resume, kill, recover):
        app.command(command.__name__)(command)
