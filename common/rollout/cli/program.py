"""Common parts of the three programs: `-h` and `--version` for every command, and help in plain text.

rich's markup would take `[transport]` for a style and omit it.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NoReturn, cast

import typer
import typer.main

from rollout.cli.boundary import run_app
from rollout.cli.groups import CommandGroup, parameters_of
from rollout.cli.usage import describe_usage
from rollout.cli.version import version_line
from rollout.model.errors import UsageError


def new_app(*, help: str = "", completion: bool = False, **options: Any) -> typer.Typer:
    """Return the typer app of a program or a group of commands."""
    return typer.Typer(
        help=help,
        cls=options.pop("cls", CommandGroup),
        no_args_is_help=True,
        add_completion=completion,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
        context_settings={"help_option_names": ["-h", "--help"]},
        **options,
    )


def command_of(app: typer.Typer, program: str) -> Any:
    """Return the click command of `app`, with everything that every command has."""
    command = typer.main.get_command(app)
    complete(command, program)
    return command


def complete(command: Any, program: str) -> None:
    """Add `--version`, plain help and, for commands that talk to a cluster, its options, to `command` and all below
    it."""
    command.rich_markup_mode = None
    options = {name: parameter for parameter in command.params for name in parameter.opts}
    if (
        "--tls-dir" in options
        and getattr(options.get("--coordinator"), "multiple", False)
        and "--context" not in options
    ):
        from rollout.cli.options import cluster_options  # brings pydantic

        place = command.params.index(options["--tls-dir"]) + 1
        command.params[place:place] = cluster_options(workload="--detach" in options or "--dry-run" in options)
    if not any("--version" in parameter.opts for parameter in command.params):
        command.params.append(_version_option(program))
    for child in getattr(command, "commands", {}).values():
        complete(child, program)


def run_program(app: typer.Typer, program: str) -> NoReturn:
    """Run the console script to its end."""
    command = command_of(app, program)
    run_app(lambda: _called(command, program))


def _called(command: Any, program: str) -> object:
    """Call the command and return its exit code, if any. Raises UsageError for unknown words."""
    try:
        return command(prog_name=program, standalone_mode=False)
    except Exception as error:
        # Which class it is depends on the version of typer, which brings click or has its own.
        if not hasattr(error, "format_message"):
            raise
        if not hasattr(error, "ctx") or type(error).__name__ == "NoArgsIsHelpError":
            cast(Any, error).show()
            return cast(Any, error).exit_code
        raise UsageError(describe_usage(error)) from None


@cache
def _version_option(program: str) -> Any:
    def show(wanted: bool) -> None:
        if wanted:
            typer.echo(version_line(program))
            raise typer.Exit

    option: Any = typer.Option(
        False, "--version", is_eager=True, expose_value=False, callback=show, help="Print the version and exit."
    )

    def carry(version: bool = option) -> None: ...

    (found,) = parameters_of(carry)
    return found
