"""The commands of workloads: found among what is installed, imported when they are called or listed."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

import typer
import typer.main

from rollout.cli.commands.standard import standard_commands
from rollout.cli.groups import CommandGroup
from rollout.cli.program import complete
from rollout.model.errors import PluginError
from rollout.workloads.registered import entries, load

if TYPE_CHECKING:
    from rollout.workloads.port import Workload


_ORDER = (
    "plan", "run", "item", "logs", "events", "workers", "doctor", "join", "context", "cloud", "model", "snapshot",
    "task", "version",
)  # fmt: skip
"""As a person comes to need them."""


def commands_of(workload: Workload[Any, Any]) -> typer.Typer:
    """Its own, or the standard one."""
    if not workload.commands:
        return standard_commands(workload)
    module, name = workload.commands.split(":")
    return getattr(importlib.import_module(module), name)


class WorkloadGroup(CommandGroup):
    """A command for each workload, before those of this program, whose names it cannot take."""

    def list_commands(self, ctx: Any) -> list[str]:
        own = sorted(super().list_commands(ctx), key=_ORDER.index)
        return [*(name for name in entries() if name not in own), *own]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name in self.commands or cmd_name not in entries():
            return super().get_command(ctx, cmd_name)
        try:
            workload = load(cmd_name)
            command = typer.main.get_command(commands_of(workload))
        except PluginError as error:
            return _broken(cmd_name, error)
        # Of the whole program, not of each workload.
        command.params = [one for one in command.params if one.name not in ("install_completion", "show_completion")]
        complete(command, "rollout")
        command.name = cmd_name
        command.short_help = workload.help
        return command


def _broken(name: str, error: PluginError) -> Any:
    """What stands in the place of a workload that cannot be loaded: the list of commands says so, a call fails."""
    app = typer.Typer(add_completion=False, rich_markup_mode=None)

    def fail() -> None:
        raise error

    app.command(name, help=error.message, context_settings={"ignore_unknown_options": True, "allow_extra_args": True})(
        fail
    )
    return typer.main.get_command(app)
