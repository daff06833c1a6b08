"""The commands of workloads: found among what is installed, imported when they are called or listed."""

from __future__ import annotations

import importlib
from functools import cache
from typing import Any

import typer
import typer.main

from rollout.cli.commands.standard import standard_commands
from rollout.cli.groups import CommandGroup
from rollout.cli.program import complete
from rollout.model.errors import PluginError
from rollout.workloads.registered import Command, entries, load, own_commands

_ORDER = (
    "plan", "run", "item", "logs", "events", "workers", "doctor", "join", "context", "cloud", "model", "version",
)  # fmt: skip
"""As a person comes to need them."""


class WorkloadGroup(CommandGroup):
    """A command for each workload, before those of this program, whose names it cannot take."""

    def list_commands(self, ctx: Any) -> list[str]:
        own = sorted(super().list_commands(ctx), key=_ORDER.index)
        return [*(name for name in _found() if name not in own), *own]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name in self.commands or cmd_name not in _found():
            return super().get_command(ctx, cmd_name)
        try:
            found = _found()[cmd_name]
            if isinstance(found, Command):
                module, name = found.app.split(":")
                app, help_text = getattr(importlib.import_module(module), name), found.help
            else:
                workload = load(found)
                app, help_text = standard_commands(workload), workload.help
            command = typer.main.get_command(app)
        except PluginError as error:
            return _broken(cmd_name, error)
        # Of the whole program, not of each workload.
        command.params = [one for one in command.params if one.name not in ("install_completion", "show_completion")]
        complete(command, "rollout")
        command.name = cmd_name
        command.short_help = help_text
        return command


@cache
def _found() -> dict[str, Command | str]:
    """The commands of all workloads by name; those of a workload that has the standard one: the workload's name."""
    found: dict[str, Command | str] = {}
    for workload in entries():
        try:
            found.update(own_commands(workload) or {workload: workload})
        except PluginError:
            found[workload] = workload
    return found


def _broken(name: str, error: PluginError) -> Any:
    """What stands in the place of a workload that cannot be loaded: the list of commands says so, a call fails."""
    app = typer.Typer(add_completion=False, rich_markup_mode=None)

    def fail() -> None:
        raise error

    app.command(name, help=error.message, context_settings={"ignore_unknown_options": True, "allow_extra_args": True})(
        fail
    )
    return typer.main.get_command(app)
