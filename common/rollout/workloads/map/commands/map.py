"""`rollout map PKG.MODULE:FUNCTION`, configured by options, a file, or a file with options that override it."""

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
        Path | None, typer.Option("--config", metavar="FILE", help="Configuration file; options override it.")
    ] = None,
    extend: ExtendOption = False,
    show_output: Annotated[
        bool, typer.Option("--show-output", help="Show what the function prints, with row numbers.")
    ] = False,
) -> None:
    """Call a Python function with each row of the input, on this machine or on a cluster.

    Rows and results are JSON. OUTPUT/results.jsonl has {"row", "result", "seconds", "attempts"} in input order. A row
    whose function raises, hangs, crashes or returns no JSON is retried where useful, then recorded in
    OUTPUT/errors.jsonl.

    Without a cluster, or with --local, it starts a coordinator and workers on this machine while it runs; the output
    names the cluster. The same command resumes after an interrupt or kill.

    Exit codes: 0 every row has a result or an error; 1 the function cannot load, all rows failed, or the run was
    killed; 2 configuration or input; 130 interrupted.
    """
    if config is None:
        typed.require()
    settings = load_settings(MapConfig, config, typed.given)
    words = (*typed.words("map", config=config), *(["--show-output"] if show_output else []))
    typed.run(load("map"), settings, words, config, show_output=show_output, extend=extend)
