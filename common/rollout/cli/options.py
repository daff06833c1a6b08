"""Options that several commands share, those of workloads too."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rollout.client.target import DEFAULT_TLS_DIR

CoordinatorOption = Annotated[
    list[str] | None,
    typer.Option(
        "--coordinator",
        metavar="HOST:PORT",
        help="Coordinator to speak to; repeat it for each one. Default: ROLLOUT_COORDINATOR, then ./rollout.toml, "
        "then what `rollout join` wrote into the TLS directory.",
    ),
]
TlsDirOption = Annotated[
    Path | None,
    typer.Option(
        "--tls-dir",
        metavar="DIR",
        help=f"Directory of the certificates. Default: ROLLOUT_TLS_DIR, then ./rollout.toml, then {DEFAULT_TLS_DIR}.",
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Machine-readable output on standard output.")]

NameOption = Annotated[
    str,
    typer.Option("--name", help="Name of the run, by which commands know it. Default: the output directory's."),
]
ResumeOption = Annotated[
    str | None,
    typer.Option("--resume", metavar="RUN_ID", help="Go on with this run. Default: the one in <output.dir>/run-id."),
]
WorkersOption = Annotated[
    int | None,
    typer.Option("--workers", min=1, max=1024, help="Workers to start on this machine when no coordinator is named."),
]
DryRunOption = Annotated[
    bool, typer.Option("--dry-run", help="Check configuration and every unit of the input, then stop.")
]
DetachOption = Annotated[
    bool, typer.Option("--detach", help="Submit everything and leave; the same command collects later.")
]
JsonLinesOption = Annotated[bool, typer.Option("--json", help="Progress and summary as JSON lines on standard output.")]
