"""`rollout job tail`: what agents and verifiers print, as they print it."""

from __future__ import annotations

import json as json_module
import re
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Annotated

import typer

from rollout.cli.commands.events import follow_or_ask, rfc3339
from rollout.cli.commands.logs import Line, Reader, printed
from rollout.cli.commands.run import RunArgument
from rollout.cli.options import CoordinatorOption, JsonOption, TlsDirOption
from rollout.cli.references import resolve_run
from rollout.config.visible import visible

if TYPE_CHECKING:
    from rollout.client import Runs

_PREFIX = re.compile(r"\[(.+?/[0-9]+) ([a-z][^\]]*)\] ?(.*)", re.DOTALL)
_WILD = frozenset("*?[")


@dataclass(frozen=True, slots=True)
class TrialLine:
    """`text` is "" and `left_out` is (lines, bytes) where something is missing."""

    trial: str
    phase: str
    text: str
    line: Line


def tail(
    run: RunArgument,
    trial: Annotated[
        str,
        typer.Argument(
            metavar="[TRIAL]",
            help="Only trials whose label (dataset/task/agent/attempt) this glob fits, or of which it is a part: "
            "hello/*/mine/*, or mine.",
            show_default=False,
        ),
    ] = "",
    coordinator: CoordinatorOption = None,
    tls_dir: TlsDirOption = None,
    follow: Annotated[
        bool, typer.Option("--follow/--no-follow", help="Go on as more comes, until the run has ended.")
    ] = True,
    json: JsonOption = False,
) -> None:
    """What the trials of a run print while they run: install, agent and verifier, with the trial and its phase before
    each line.

    It shows what is kept of the run so far, and then what comes. Of each trial some lines a second come through, and a
    line says how many did not; all of it is in the directory of the trial once it has ended.

    --json: an object a line, `{time, run_id, trial, phase, text, worker_id, attempt}`, and where lines are missing
    `{..., left_out: {lines, bytes}}`. Keys are only ever added.
    """
    reader = Reader()

    async def show(client: Runs, *, follow: bool) -> None:
        run_id = await resolve_run(client, run)
        async for line in printed(client, run_id, reader, follow=follow):
            for told in of_trials([line], trial):
                sys.stdout.write((_json(told, run_id) if json else _text(told)) + "\n")
                sys.stdout.flush()

    follow_or_ask(coordinator, tls_dir, show, follow=follow)


def of_trials(lines: Iterable[Line], wanted: str) -> Iterable[TrialLine]:
    """Those of `lines` that trials printed whose label `wanted` fits; "": all, and where some are missing."""
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
    value = {
        "time": rfc3339(line.at_ms) if line.at_ms else None,
        "run_id": run_id,
        "trial": told.trial,
        "phase": told.phase,
        "text": told.text,
        "worker_id": line.worker or None,
        "attempt": line.attempt,
    }
    if line.left_out is not None:
        value["left_out"] = {"lines": line.left_out[0], "bytes": line.left_out[1]}
    return json_module.dumps(value, ensure_ascii=False)
