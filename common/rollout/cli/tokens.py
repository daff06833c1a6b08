"""Join token of a command, from a file, standard input, the environment, or the command line."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from rollout.model.errors import ConfigError

VARIABLE = "ROLLOUT_JOIN_TOKEN"
_READ_MOST = 4096

TokenOption = Annotated[
    str,
    typer.Option(
        "--token",
        metavar="TOKEN",
        help=(
            "Token of `rollout-coordinator token create`; --token-file or ROLLOUT_JOIN_TOKEN keep it out of "
            "process lists."
        ),
    ),
]
TokenFileOption = Annotated[
    Path | None, typer.Option("--token-file", metavar="FILE", help="File with the token; - reads standard input.")
]


def find_token(token: str, token_file: Path | None) -> str:
    """Return the token from --token or --token-file, else from the environment. Raises ConfigError for none or both."""
    if token and token_file is not None:
        raise ConfigError("--token and --token-file are both given: leave one out")
    found = token or (_from_file(token_file) if token_file is not None else os.environ.get(VARIABLE, ""))
    if not found.strip():
        raise ConfigError(
            f"no token: put what `rollout-coordinator token create` printed into a file and give --token-file FILE "
            f"(- reads standard input), or set {VARIABLE}"
        )
    return found


def _from_file(path: Path) -> str:
    if str(path) == "-":
        if sys.stdin.isatty():
            sys.stderr.write("paste the join token, then press Enter:\n")
        return sys.stdin.readline(_READ_MOST)
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            text = file.read(_READ_MOST)
    except OSError as error:
        raise ConfigError(f"--token-file {path}: cannot be read: {error.strerror or error}") from error
    if not text.strip():
        raise ConfigError(f"--token-file {path}: the file is empty")
    return text
