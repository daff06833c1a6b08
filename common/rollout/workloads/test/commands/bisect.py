"""`rollout test bisect`: finds the test that breaks another one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import typer

from rollout.cli.options import JsonOption
from rollout.model.counts import counted
from rollout.model.errors import ConfigError
from rollout.workloads.test.commands.arguments import ConfigOption, RunArgument


def bisect(
    id: Annotated[str, typer.Argument(metavar="ID", help="The failing test.", show_default=False)],
    run: RunArgument = None,
    config: ConfigOption = None,
    json: JsonOption = False,
) -> None:
    """Find the test that makes another pytest test fail by running before it.

    Tests that ran before ID, then parts of them, run again with ID last, in new processes on this machine. Exit codes:
    0 found; 1 ID fails alone, or passes after all of them; 2 ID did not fail in that run, or configuration. --json:
    {id, spoiled_by, runs, outcome}.
    """
    from rollout.cli.asking import tell
    from rollout.cli.show import print_json
    from rollout.workloads.test.bisect import minimal, outcome_after, ran_before
    from rollout.workloads.test.cases import GOOD, Outcome
    from rollout.workloads.test.discovery import framework_of
    from rollout.workloads.test.frameworks.port import Group
    from rollout.workloads.test.result_lines import read_lines
    from rollout.workloads.test.results_here import results_file
    from rollout.workloads.test.workload import Test

    workload = Test()
    settings = workload.load(config)
    framework, project = framework_of(settings), workload.project
    if framework.name != "pytest":
        raise ConfigError(f"tests of {framework.name} share no process: rollout test bisect works with pytest")
    name, before = ran_before(read_lines(results_file(workload.directory(settings), run)), id)
    if name not in settings.groups:
        raise ConfigError(f"the group {name}, which {id} is of, is not in the configuration any more")
    of_group = framework.group_config(project, Group(name, settings.groups[name], settings.framework))
    outcomes = list[Outcome | None]()

    def fails(ids: Sequence[str]) -> bool:
        found = outcome_after(ids, id, project.root, of_group, settings.provider.env)
        outcomes.append(found)
        if not json:
            tell(f"after {counted(len(ids), 'test')}: {found.value if found else 'not come to'}")
        return found is not None and found not in GOOD

    if fails([]):
        spoiled_by, why = list[str](), f"{id} fails by itself, before any other test"
    elif not before or not fails(before):
        spoiled_by, why = list[str](), f"{id} passes after the {counted(len(before), 'test')} that ran before it"
    else:
        spoiled_by, why = minimal(before, fails), ""
    if json:
        last = outcomes[-1]
        print_json({"id": id, "spoiled_by": spoiled_by, "runs": len(outcomes), "outcome": last and last.value})
    else:
        typer.echo("\n".join([f"{id} fails after", *(f"  {one}" for one in spoiled_by)]) if spoiled_by else why)
    raise typer.Exit(0 if spoiled_by else 1)
