"""The `rollout` command: submits work, watches it and controls it."""

from __future__ import annotations

# isort: off
import rollout.cli.at_start  # noqa: F401  # pyright: ignore[reportUnusedImport] - before what takes long

# isort: on
from typing import NoReturn

import typer

from rollout.cli.lazy import LazyGroup
from rollout.cli.program import new_app, run_program
from rollout.cli.version import version_line

app = new_app(
    name="rollout",
    cls=LazyGroup,
    completion=True,
    help="Runs large, failure-prone LLM work on many unreliable machines and can say what happened to each unit.\n\n"
    "Exit codes: 0 success; 1 the work itself failed; 2 configuration or usage error; 130 interrupted. "
    "ROLLOUT_DEBUG=1 shows tracebacks.",
)


@app.callback()
def _main() -> None: ...  # pyright: ignore[reportUnusedFunction]


@app.command()
def version() -> None:
    """Print the version."""
    typer.echo(version_line())


def main() -> NoReturn:
    """Run the console script."""
    run_program(app, "rollout")


if __name__ == "__main__":
    main()
