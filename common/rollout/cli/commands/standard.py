"""`rollout WORKLOAD VERB --config FILE`: the command of every workload that has a configuration file."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rollout.cli.groups import CommandGroup
from rollout.cli.options import (
    CoordinatorOption,
    DetachOption,
    DryRunOption,
    JsonLinesOption,
    NameOption,
    ResumeOption,
    TlsDirOption,
    WorkersOption,
)
from rollout.config.load import load_settings, located

if TYPE_CHECKING:
    from rollout.workloads.port import Workload

HELP = """{details}

With no cluster named or joined, or with --local, it starts a coordinator and workers on this machine for as long as it
runs; a line of output says which cluster it is. Interrupt or kill it at any time: the same command goes on
where it was.

Exit codes: {exits}; 2 configuration or input; 130 interrupted.

--json prints an object a line, told apart by `event`: `cluster` {{cluster, addresses, private, why}},
`run_opened` {{run_id, resumed, {unit}, address}}, `progress`
{{{unit}, submitted, done, failed, invalid, committed, running, workers, {rates}, eta_s, state}}, `note`
{{message}}, `cause` {{as in `run show --json`}}, `cause_gone` {{code}}, `dry_run` {{{unit}, workers}}, `interrupted`
{{run_id, committed, command}}, `summary` {{the content of summary.json, and files}} and `error`
{{error: {{code, message, faults}}}}. Keys are only ever added."""

EXITS = """0 every one of the {unit} has its result, failed ones included (they are in errors.jsonl); 1 the run failed
or was killed, or all of the {unit} failed"""


def standard_commands(workload: Workload[Any, Any], help: str) -> typer.Typer:
    """A group with the one command. `help`: of the group."""
    app = typer.Typer(cls=CommandGroup, no_args_is_help=True, rich_markup_mode=None)

    @app.callback(help=help)
    def group() -> None: ...

    rates = [f"{what}_per_s" for what in (workload.unit, workload.measure) if what]
    help_text = HELP.format(
        details=workload.details or help, unit=workload.unit, rates=", ".join(rates),
        exits=EXITS.format(unit=workload.unit),
    )  # fmt: skip

    @app.command(workload.verb, help=help_text)
    def run(
        config: Annotated[Path, typer.Option("--config", metavar="FILE", help="The run's configuration (TOML).")],
        name: NameOption = "",
        coordinator: CoordinatorOption = None,
        tls_dir: TlsDirOption = None,
        resume: ResumeOption = None,
        workers: WorkersOption = None,
        dry_run: DryRunOption = False,
        detach: DetachOption = False,
        json: JsonLinesOption = False,
    ) -> None:
        from rollout.cli.session import Options, run_workload  # brings grpc

        overrides = {"workers.count": workers} if "workers" in workload.settings.model_fields else {}
        settings = load_settings(workload.settings, config, overrides)
        options = Options(
            words=("rollout", workload.name, workload.verb, "--config", str(config)),
            name=name,
            coordinators=tuple(coordinator or ()),
            tls_dir=tls_dir,
            resume=resume,
            workers=workers,
            dry_run=dry_run,
            detach=detach,
            json=json,
        )
        with located(config):
            raise typer.Exit(run_workload(workload, settings, options))

    del group, run  # typer keeps them
    return app
