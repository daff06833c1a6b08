"""`rollout test`: run the tests of a project, see which there are, and what came of them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rollout.cli.commands.standard import HELP
from rollout.cli.groups import CommandGroup
from rollout.cli.options import chosen
from rollout.cli.work_command import Typed, work_command
from rollout.client.target import find_target
from rollout.workloads.test.commands.make_room import make_room
from rollout.workloads.test.config import FILE, TestConfig

app = typer.Typer(cls=CommandGroup, no_args_is_help=True, rich_markup_mode=None)

ConfigOption = Annotated[
    Path | None,
    typer.Option("--config", "-c", metavar="FILE", help=f"The configuration. Default: {FILE} of the project, if any."),
]
SelectedArgument = Annotated[
    list[str] | None,
    typer.Argument(metavar="[PATH|ID]...", help="Files, directories or tests. Default: all.", show_default=False),
]
RecordOption = Annotated[
    bool, typer.Option("--record-history", help='Record this run where [history] record_history = "flag".')
]

_RUN = HELP.format(
    events=", `test` {id, group, outcome}",
    details=f"""Run the tests of the project in this directory, as many at once as there are cores or workers.

A project needs no {FILE}; `rollout test init` writes one. Tests are discovered once, batches are made of how long they
took before, and each outcome is known when it is there: a test that ends its process is a crash, and the others go on.
A run that is over begins anew; one that was killed goes on, unless the project was changed meanwhile.""",
    unit="batches",
    rates="batches_per_s, tests, tests_done, outcomes, tests_running",
    exits="0 all tests passed; 1 some failed; 3 none failed, some were flaky, and [report] fail_on_flaky is set",
)


@app.callback(help="Run any test suite, spread over the workers.")
def group() -> None: ...


@app.command("run", help=_RUN)
@work_command(TestConfig)
def run(
    typed: Typed, selected: SelectedArgument = None, config: ConfigOption = None, record_history: RecordOption = False
) -> None:
    _run(typed, selected or [], config, record_history)


def _run(typed: Typed, selected: list[str], config: Path | None, record: bool) -> None:
    from rollout.workloads.test.workload import Test

    workload = Test(selected, record=record)
    if not find_target(list(typed.shared["coordinators"]), typed.shared["tls_dir"], chosen().selector).addresses:
        workload.works_here()
    if typed.shared.get("workers"):
        typed.given["offload.max_parallel"] = typed.shared["workers"]
    settings = workload.load(config, typed.given)
    if not typed.shared["dry_run"] and typed.shared["resume"] is None:
        make_room(workload.directory(settings))
    words = typed.words("test", "run", *selected, config=config)
    typed.run(workload, settings, words, workload.project.file)
