"""`rollout`: submits work, watches it, commands it."""

from __future__ import annotations

# isort: off
import rollout.cli.at_start  # noqa: F401  # pyright: ignore[reportUnusedImport] - before what takes long

# isort: on
from typing import NoReturn

import typer

from rollout.cli.commands import (
    cloud,
    context,
    doctor,
    events,
    item,
    join,
    logs,
    model,
    plan,
    run,
    run_items,
    run_results,
    workers,
)
from rollout.cli.program import new_app, run_program
from rollout.cli.version import version_line
from rollout.cli.workloads import WorkloadGroup

app = new_app(
    name="rollout",
    cls=WorkloadGroup,
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


run.app.command("items")(run_items.items)
run.app.command("results")(run_results.results)
app.add_typer(run.app, name="run")
app.add_typer(item.app, name="item")
app.add_typer(model.app, name="model")
app.add_typer(cloud.app, name="cloud")
app.add_typer(context.app, name="context")
app.add_typer(workers.app, name="workers")
app.command(name="plan")(plan.plan)
app.command(name="join")(join.join)
app.command(name="doctor")(doctor.doctor)
app.command(name="events")(events.events)
app.command(name="logs")(logs.logs)


def main() -> NoReturn:
    """Entry point of the console script."""
    run_program(app, "rollout")


if __name__ == "__main__":
    main()
