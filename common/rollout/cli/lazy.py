"""Commands of `rollout`, its own and those of workloads: found by name and imported when they are called."""

from __future__ import annotations

import gc
from functools import cache
from importlib import import_module
from typing import Any

import typer
import typer.main

from rollout.cli.commands import COMMANDS
from rollout.cli.groups import CommandGroup
from rollout.cli.program import complete
from rollout.model.errors import PluginError
from rollout.workloads.registered import Command, entries, load, own_commands


class LazyGroup(CommandGroup):
    """Group in which commands of workloads precede those of this program, whose names they cannot take."""

    def list_commands(self, ctx: Any) -> list[str]:
        return [*_found(), *super().list_commands(ctx)]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        return _command(cmd_name) if cmd_name in _found() else super().get_command(ctx, cmd_name)

    def help_of(self, ctx: Any, name: str) -> str:
        """Return the help text without importing the command where possible."""
        found = _found().get(name)
        return found.help if isinstance(found, Command) else super().help_of(ctx, name)


@cache
def _found() -> dict[str, Command | PluginError | None]:
    """Return the commands by name; None stands for a workload that has the standard command."""
    found: dict[str, Command | PluginError | None] = {}
    for workload in entries():
        try:
            found.update(own_commands(workload) or {workload: None})
        except PluginError as error:
            found[workload] = error
    return {name: one for name, one in found.items() if name not in COMMANDS} | COMMANDS


@cache
def _command(name: str) -> Any:
    try:
        app, help_text = _app(name)
    except PluginError as error:
        return _broken(name, error)
    if not isinstance(app, typer.Typer):
        single = typer.Typer(add_completion=False, rich_markup_mode=None)
        single.command(name)(app)
        app = single
    command: Any = typer.main.get_command(app)
    # Of the whole program, not of each workload.
    command.params = [one for one in command.params if one.name not in ("install_completion", "show_completion")]
    complete(command, "rollout")
    command.name, command.short_help = name, help_text
    gc.freeze()  # what was imported stays: no collection looks through it
    return command


def _app(name: str) -> tuple[Any, str]:
    """Return (typer.Typer or function, help for the list of commands)."""
    found = _found()[name]
    if isinstance(found, PluginError):
        raise found
    if found is None:
        from rollout.cli.commands.standard import standard_commands  # brings pydantic, as the workload does

        workload = load(name)
        return standard_commands(workload, workload.help), workload.help
    module, _, attribute = found.app.partition(":")
    try:
        return getattr(import_module(module), attribute), found.help
    except Exception as error:  # whatever the module of a third party does wrong, the other commands must work
        if name in COMMANDS:
            raise
        raise PluginError(
            f"the command {name} cannot be loaded from {found.app}: {type(error).__name__}: {error}"
        ) from error


def _broken(name: str, error: PluginError) -> Any:
    """Return a command for a workload that cannot be loaded: the list of commands says so, and a call fails."""
    app = typer.Typer(add_completion=False, rich_markup_mode=None)

    def fail() -> None:
        raise error

    app.command(name, help=error.message, context_settings={"ignore_unknown_options": True, "allow_extra_args": True})(
        fail
    )
    return typer.main.get_command(app)
