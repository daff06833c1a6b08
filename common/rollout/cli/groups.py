"""Groups of commands: help that is never truncated, and hints for the words that other tools use."""

from __future__ import annotations

from collections.abc import Callable
from difflib import get_close_matches
from typing import Any

import typer
import typer.core
import typer.main

from rollout.cli.boundary import begin_logging

_HELP_MAX = 1000
INSTEAD = {
    "rollout": {
        "rollout run list": ("get", "jobs", "list", "ls", "ps", "queue", "squeue"),
        "rollout run show @last": ("describe", "info", "show", "status"),
        "rollout run watch @last": ("attach", "tail", "top", "wait", "watch"),
        "rollout run kill RUN": ("abort", "cancel", "kill", "scancel", "stop"),
        "rollout run pause RUN": ("hold", "pause", "suspend"),
        "rollout run resume RUN": ("continue", "release", "restart", "resume", "retry"),
        "rollout run delete RUN": ("delete", "remove", "rm"),
        "rollout run results RUN --output DIR": ("download", "fetch", "output", "results"),
        "rollout run items RUN": ("items", "rows", "tasks"),
        "rollout infer batch --config FILE": ("batch", "generate", "sbatch", "submit"),
        "rollout workers": ("node", "nodes", "sinfo", "worker"),
        "rollout workers drain WORKER": ("cordon", "drain"),
        "rollout context list": ("cluster", "clusters", "config", "contexts"),
        "rollout join": ("init", "login"),
        "rollout-coordinator run": ("coordinator", "server", "start"),
        "rollout-coordinator host list": ("host", "hosts"),
        "rollout-coordinator token create": ("token", "tokens"),
    },
    "rollout run": {
        "rollout run show": ("describe", "get", "info", "status"),
        "rollout run watch": ("attach", "follow", "tail", "wait"),
        "rollout run kill": ("abort", "cancel", "stop"),
        "rollout run pause": ("hold", "suspend"),
        "rollout run resume": ("release", "restart", "retry", "unpause"),
        "rollout run delete": ("remove", "rm"),
        "rollout run results": ("download", "fetch", "output"),
        "rollout run items": ("rows", "tasks"),
        "rollout logs": ("log", "logs"),
        "rollout events": ("event", "events", "history"),
        "rollout infer batch --config FILE": ("create", "start", "submit"),
    },
    "rollout item": {"rollout run items RUN": ("list", "ls"), "rollout item show": ("describe", "get", "status")},
    "rollout workers": {
        "rollout workers show": ("describe", "get", "info", "status"),
        "rollout workers drain": ("cordon", "kill", "remove", "rm", "stop"),
        "rollout logs RUN --worker WORKER": ("log", "logs"),
        "rollout-worker run": ("add", "start"),
    },
    "rollout job": {
        "rollout job show": ("describe", "get", "info", "results", "status"),
        "rollout job export": ("download", "report", "table"),
        "rollout job compare": ("diff", "versus"),
        "rollout job regrade": ("rescore", "verify"),
    },
    "rollout task": {
        "rollout task init": ("create", "new"),
        "rollout task check": ("lint", "validate"),
        "rollout task oracle": ("run", "solve", "test", "try"),
    },
    "rollout context": {
        "rollout context list": ("current", "get", "ls", "show"),
        "rollout context use": ("set", "switch"),
        "rollout context remove": ("delete", "rm"),
    },
    "rollout-coordinator": {
        "rollout-coordinator run": ("serve", "start"),
        "rollout-coordinator host list": ("hosts",),
        "rollout-coordinator token create --role ROLE": ("tokens",),
    },
    "rollout-worker": {"rollout-worker run": ("serve", "start"), "rollout workers drain WORKER": ("drain", "stop")},
}
"""Commands by group, each with the words under which users of Slurm, kubectl or Ray look for it."""


class CommandGroup(typer.core.TyperGroup):
    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write whole sentences, over several lines where one is too narrow."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, self.help_of(ctx, name)) for name in self.list_commands(ctx)])

    def help_of(self, ctx: Any, name: str) -> str:
        """Return the help text for the list of commands."""
        command = self.get_command(ctx, name)
        return "" if command is None else command.get_short_help_str(_HELP_MAX)

    def invoke(self, ctx: Any) -> Any:
        if ctx.parent is None:  # of the program; its help, which needs no log, has been printed by now
            begin_logging()
        return super().invoke(ctx)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        word = args[0]
        if self.get_command(ctx, word) is None:
            if command := instead_of(ctx.command_path, word):
                ctx.fail(f"No such command {word!r}. For that there is `{command}`.")
            if near := get_close_matches(word, self.list_commands(ctx)):
                ctx.fail(f"No such command {word!r}. Did you mean {', '.join(map(repr, near))}?")
        return super().resolve_command(ctx, args)


def instead_of(group: str, word: str) -> str:
    """Return the command that `word` after `group` probably means, or an empty string."""
    if word == "help":
        return f"{group} -h"
    return next((command for command, words in INSTEAD.get(group, {}).items() if word in words), "")


def parameters_of(function: Callable[..., None]) -> list[Any]:
    """Return the parameters as typer makes them, whatever its version calls its classes."""
    carrier = typer.Typer(add_completion=False)
    carrier.command()(function)
    return [one for one in typer.main.get_command(carrier).params if one.name != "help"]
