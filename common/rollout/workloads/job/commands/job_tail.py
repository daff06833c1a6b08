"""`rollout job tail`: the live output of agents and verifiers."""

from __future__ import annotations

import asyncio
import re
import sys
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from difflib import get_close_matches
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rollout.cli.anywhere import Places, cluster_of, find_run, places
from rollout.cli.asking import OwnerEndedError, once, reached, tell
from rollout.cli.commands.events import FOLLOW_PATIENCE_S
from rollout.cli.options import CoordinatorOption, JsonOption, TlsDirOption
from rollout.cli.printed import Line, Reader, printed
from rollout.cli.streams import json_line
from rollout.client.target import Target
from rollout.config.visible import visible
from rollout.model.errors import ConfigError
from rollout.workloads.job.commands.find_job import directory_of
from rollout.workloads.job.commands.job_tools import JobArgument
from rollout.workloads.json_form import JsonObject, timestamp
from rollout.workloads.output import RUN_ID, claimed

if TYPE_CHECKING:
    from rollout.client import Runs

_PREFIX = re.compile(r"\[(.+?/[0-9]+) ([a-z][^\]]*)\] ?(.*)", re.DOTALL)
_WILD = frozenset("*?[")
_NEAR = 5
"""Number of labels to list if the user named an unknown one."""


@dataclass(frozen=True, slots=True)
class TrialLine:
    """A line. If output is missing, `text` is "" and `left_out` is (lines, bytes)."""

    trial: str
    phase: str
    text: str
    line: Line


def tail(
    run: JobArgument,
    trial: Annotated[
        str,
        typer.Argument(
            metavar="[TRIAL]",
            help="Only trials whose label dataset/task/agent/attempt contains or matches this, such as hello/*/mine/*.",
            show_default=False,
        ),
    ] = "",
    coordinator: CoordinatorOption = None,
    tls_dir: TlsDirOption = None,
    follow: Annotated[bool, typer.Option("--follow/--no-follow", help="Continue until the run ends.")] = True,
    json: JsonOption = False,
) -> None:
    """Print the output of running trials (install, agent, verifier), with trial and phase on each line.

    Kept output comes first. Lines per second are limited for each trial; the trial's directory later has all.

    --json: an object per line, `{time, run_id, trial, phase, text, worker_id, attempt}`, or for missing lines
    `{..., left_out: {lines, bytes}}`. Keys are only ever added.
    """
    reader = Reader()

    async def show(client: Runs, run_id: str, *, follow: bool) -> None:
        async for line in printed(client, run_id, reader, follow=follow):
            for told in of_trials([line], trial):
                sys.stdout.write((_json(told, run_id) if json else _text(told)) + "\n")
                sys.stdout.flush()

    async def working() -> None:
        check_wanted(run, trial)
        target, run_id = await _find(run, places(coordinator, tls_dir, tell))
        while True:
            with suppress(OwnerEndedError):
                async with reached(target, once(tell), patience_s=FOLLOW_PATIENCE_S) as (client, idle):
                    return await show(client, run_id, follow=follow and not idle)

    asyncio.run(working())


async def _find(text: str, where: Places) -> tuple[Target, str]:
    """Return the cluster and the id of the run that `text` names, by the job's directory or like other runs."""
    path = directory_of(text, lambda _: None)
    run_id = "" if path is None else _run_of(path)
    if path is not None and not where.only and (target := cluster_of(path, run_id)) is not None:
        return target, run_id
    return await find_run(where, run_id or text)


def _run_of(path: Path) -> str:
    """Return the run of a directory. Raises ConfigError if there is none, or none yet."""
    try:
        return (path / RUN_ID).read_text("ascii", "replace").strip()
    except (FileNotFoundError, NotADirectoryError):
        raise ConfigError(
            f"{path}: no run of a job has begun there yet (it has no {RUN_ID}). If one is just starting, give this "
            "command again in a few seconds; the directory of a job is <jobs_dir>/<name>"
        ) from None


def _planned_labels(path: Path) -> list[str]:
    """Return the labels of the planned trials of the job in `path`; empty if unknown."""
    stored = claimed(path) or {}
    planned: Any = stored.get("config", {}).get("output", {}).get("planned", [])
    return [label for _, label in planned]


def check_wanted(run: str, wanted: str) -> None:
    """Raise ConfigError if the job is on this machine, its plan is known, and no trial matches."""
    path = directory_of(run, lambda _: None) if wanted else None
    labels = [] if path is None else _planned_labels(path)
    if not labels or any(fits(label, wanted) for label in labels):
        return
    near = get_close_matches(wanted, labels, n=_NEAR, cutoff=0.3)
    listed = ", ".join(near or labels[:_NEAR])
    more = f" and {len(labels) - _NEAR:,} more" if not near and len(labels) > _NEAR else ""
    raise ConfigError(f'no trial of {run} is called "{wanted}"; {"near are" if near else "it has"} {listed}{more}')


def of_trials(lines: Iterable[Line], wanted: str) -> Iterable[TrialLine]:
    """Yield lines of trials whose label matches `wanted`, or of all if it is "", and marks where lines are missing."""
    for line in lines:
        if line.left_out is not None:
            if not wanted:
                yield TrialLine("", "", "", line)
        elif (found := _PREFIX.fullmatch(line.text)) and fits(found[1], wanted):
            yield TrialLine(found[1], found[2], found[3], line)


def fits(label: str, wanted: str) -> bool:
    return fnmatchcase(label, wanted) if _WILD & set(wanted) else wanted in label


def _text(told: TrialLine) -> str:
    if told.line.left_out is not None:
        return f"[{told.line.left_out[0]} lines, {told.line.left_out[1]} bytes left out here: too much was printed]"
    return visible(f"[{told.trial} {told.phase}] {told.text}")


def _json(told: TrialLine, run_id: str) -> str:
    line = told.line
    value: JsonObject = {
        "time": timestamp(line.at_ms) if line.at_ms else None,
        "run_id": run_id,
        "trial": told.trial,
        "phase": told.phase,
        "text": told.text,
        "worker_id": line.worker or None,
        "attempt": line.attempt,
    }
    if line.left_out is not None:
        value["left_out"] = {"lines": line.left_out[0], "bytes": line.left_out[1]}
    return json_line(value).rstrip("\n")
