"""`rollout map PKG.MODULE:FUNCTION`: options for everything, or a file, or options over a file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rollout.cli.options import ExtendOption
from rollout.cli.work_command import Typed, work_command
from rollout.config.load import load_settings
from rollout.workloads.map.config import MapConfig
from rollout.workloads.registered import load

app = typer.Typer(add_completion=False)


@app.command()
@work_command(MapConfig)
def map(
    typed: Typed,
    config: Annotated[
        Path | None, typer.Option("--config", metavar="FILE", help="All of this as a TOML file; options win over it.")
    ] = None,
    extend: ExtendOption = False,
    show_output: Annotated[
        bool, typer.Option("--show-output", help="Show here what the function prints, with the number of its row.")
    ] = False,
) -> None:
    """Call a Python function with each row of the input, on this machine or on a cluster.

    A row is any JSON value, and so is what the function returns: OUTPUT/results.jsonl has
    {"row", "result", "seconds", "attempts"} for each, in input order. A row whose function raises, hangs, crashes or
    returns what is no JSON is tried again where that may help, and becomes a line of OUTPUT/errors.jsonl with type,
    message and traceback; the others go on.

    With no cluster named or joined, or with --local, it starts a coordinator and workers on this machine for as long as
    it runs; a line of output says which cluster it is. Interrupt or kill it at any time: the same command goes
    on where it was.

    Exit codes: 0 every row has its result, or its line of errors.jsonl; 1 no worker can load the function, all
    rows failed, or the run was killed; 2 configuration or input; 130 interrupted.
    """
    if config is None:
        typed.require()
    settings = load_settings(MapConfig, config, typed.given)
    words = (*typed.words("map", config=config), *(["--show-output"] if show_output else []))
    typed.run(load("map"), settings, words, config, show_output=show_output, extend=extend)
