"""Options that several commands share."""

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
