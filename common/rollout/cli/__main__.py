"""`rollout`: submits work, watches it, commands it."""

from __future__ import annotations

from typing import Annotated, NoReturn

import typer

from rollout.cli.boundary import run_app
from rollout.cli.commands import item, join, model, plan, run, run_items, run_results, workers
from rollout.cli.version import version_line
from rollout.cli.workloads import WorkloadGroup

app = typer.Typer(
    name="rollout",
    cls=WorkloadGroup,
    help="Runs large, failure-prone LLM work on many unreliable machines and can say what happened to each unit.\n\n"
    "Exit codes: 0 success; 1 the work itself failed; 2 configuration or usage error; 130 interrupted. "
    "ROLLOUT_DEBUG=1 shows tracebacks.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(version_line())
        raise typer.Exit


@app.callback()
def _main(  # pyright: ignore[reportUnusedFunction]
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", is_eager=True, callback=_print_version)
    ] = False,
) -> None: ...


@app.command()
def version() -> None:
    """Print the version."""
    typer.echo(version_line())


run.app.command("items")(run_items.items)
run.app.command("results")(run_results.results)
app.add_typer(run.app, name="run")
app.add_typer(item.app, name="item")
app.add_typer(model.app, name="model")
app.add_typer(workers.app, name="workers")
app.command(name="plan")(plan.plan)
app.command(name="join")(join.join)


def main() -> NoReturn:
    """Entry point of the console script."""
    run_app(app)


if __name__ == "__main__":
    main()
