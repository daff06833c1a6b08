"""Arguments and options that several commands of `rollout test` take."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rollout.workloads.test.project import FILE

ConfigOption = Annotated[
    Path | None,
    typer.Option("--config", metavar="FILE", help=f"The configuration; default: the project's {FILE}, if any."),
]
RunArgument = Annotated[
    str | None,
    typer.Argument(metavar="[RUN]", help="The run's id or a unique part of it; default: the last.", show_default=False),
]
