"""`rollout WORKLOAD VERB --config FILE`: the command of each workload that has a configuration file."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rollout.cli.groups import CommandGroup
from rollout.cli.options import ExtendOption
from rollout.cli.work_command import Typed, work_command
from rollout.config.load import load_settings

if TYPE_CHECKING:
    from rollout.workloads.port import Workload

PLACE = """Without a cluster, or with --local, it starts a coordinator and workers on this machine while it runs; the
output
names the cluster. The same command resumes after an interrupt or kill."""
EVENTS = """--json prints an object per line with an `event`: `cluster` {{cluster, addresses, private, why}},
`run_opened` {{run_id, resumed, {unit}, address}}, `progress`
{{{unit}, submitted, done, failed, invalid, committed, running, workers, {rates}, eta_s, state}}, `note`
{{message}}, `cause` {{as in `run show --json`}}, `cause_gone` {{code}}, `dry_run` {{{unit}, workers}}{events},
`interrupted` {{run_id, committed, command}}, `summary` {{the content of summary.json, and files}} and `error`
{{error: {{code, message, faults}}}}. Keys are only ever added."""
HELP = f"""{{details}}

{PLACE}

Exit codes: {{exits}}; 2 configuration or input; 130 interrupted.

{EVENTS}"""

EXITS = "0 all {unit} have a result or an error in errors.jsonl; 1 the run failed or was killed, or all {unit} failed"


def standard_commands(workload: Workload[Any, Any], help: str, verb: str = "run") -> typer.Typer:
    """Return a group with the one command `verb`. `help` is the group's help text."""
    app = typer.Typer(cls=CommandGroup, no_args_is_help=True, rich_markup_mode=None)

    @app.callback(help=help)
    def group() -> None: ...

    rates = [f"{what}_per_s" for what in (workload.unit, workload.measure) if what]
    help_text = HELP.format(
        details=workload.details or help, unit=workload.unit, rates=", ".join(rates),
        exits=EXITS.format(unit=workload.unit), events="",
    )  # fmt: skip

    @app.command(verb, help=help_text)
    @work_command(workload.settings, without=() if workload.carries else ("extend",))
    def run(
        typed: Typed,
        config: Annotated[Path, typer.Option("--config", metavar="FILE", help="The configuration file (TOML).")],
        extend: ExtendOption = False,
    ) -> None:
        settings = load_settings(workload.settings, config, typed.given)
        words = typed.words(workload.name, verb, config=config)
        typed.run(workload, settings, words, config, extend=extend)

    del group, run  # typer keeps them
    return app
