"""`rollout task ...`: creates, checks and tests task directories."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from rollout.cli.options import JsonOption
from rollout.cli.program import new_app
from rollout.model.errors import ConfigError
from rollout.model.problems import problems

if TYPE_CHECKING:
    from rollout.workloads.job.check_tasks import CheckedTask

app = new_app(help="Make, check and test tasks for agents.")

DirectoriesArgument = Annotated[
    list[Path], typer.Argument(metavar="DIR...", help="Tasks, or directories of tasks.", show_default=False)
]
DialectOption = Annotated[
    Literal["rollout", "harbor"] | None,
    typer.Option("--dialect", help="Format of the tasks; default: by the version in task.toml."),
]


@app.command("init")
def init(
    directory: Annotated[
        Path, typer.Argument(metavar="DIR", help="New or empty directory, which names the task.", show_default=False)
    ],
    format: Annotated[
        Literal["rollout", "harbor"],
        typer.Option("--format", help="Format of task.toml; see docs/job.md."),
    ] = "rollout",
    name: Annotated[
        str | None, typer.Option("--name", metavar="ORG/NAME", help="Name of the package in task.toml.")
    ] = None,
    json: JsonOption = False,
) -> None:
    """Make a small task that passes `task check` and its own oracle.

    Nothing is overwritten. --json: `{directory, format, files}`.
    """
    import re

    from rollout.cli.show import print_json
    from rollout.workloads.job.new_task import PACKAGE, write_task

    if name is not None and not re.fullmatch(PACKAGE, name):
        raise ConfigError(f"--name: {name!r} must be like org/name: letters, digits, dots, - and _ around one slash")
    files = write_task(directory, format, name)
    if json:
        print_json({"directory": str(directory), "format": format, "files": [str(path) for path in files]})
        return
    for path in files:
        typer.echo(path)
    typer.echo(f"check it with: rollout task check {directory}\ntry it with: rollout task oracle {directory}")


@app.command("check")
def check(directories: DirectoriesArgument, dialect: DialectOption = None, json: JsonOption = False) -> None:
    """Find all faults in tasks, without running anything.

    Faults have file and line where possible. Warnings cover what fails only in trials, such as a verifier
    without a reward or missing files of a Dockerfile.

    Exit codes: 0 every task can run; 2 some cannot.

    --json: an object per line, `{name, directory, ok, format, schema_version, steps, checksum, files, size, faults,
    warnings}`. Keys are only ever added.
    """
    from rollout.cli.show import print_json
    from rollout.workloads.job.check_tasks import check_tasks

    faults: list[str] = []
    warnings = tasks = 0
    for found in check_tasks(directories, os.environ, dialect):
        faults += found.faults
        warnings += len(found.warnings)
        tasks += found.loaded is not None
        if json:
            print_json(found.to_json())
        else:
            _print(found)
    if faults:
        raise ConfigError(problems(faults))
    if not json:
        from rollout.cli.words import counted

        typer.echo(f"{counted(tasks, 'task')} can be run, {counted(warnings, 'warning')}")


@app.command("oracle")
def oracle(
    directories: DirectoriesArgument,
    provider: Annotated[
        str,
        typer.Option("--provider", metavar="PROVIDER", help="Provider of sandboxes, as environment.type in job.yaml."),
    ] = "bubblewrap",
    provider_config: Annotated[
        list[str] | None,
        typer.Option(
            "--provider-config",
            metavar="KEY=VALUE",
            help="Setting of environment.provider_config in job.yaml; repeatable.",
        ),
    ] = None,
    network_mode: Annotated[
        Literal["host"] | None,
        typer.Option(
            "--network-mode",
            metavar="host",
            help="Let tasks with a public network share this machine's.",
        ),
    ] = None,
    attempts: Annotated[
        int, typer.Option("--attempts", min=1, max=1000, help="Attempts per agent, to find unstable tests.")
    ] = 1,
    concurrency: Annotated[int, typer.Option("--concurrency", min=1, help="Maximum concurrent trials.")] = 4,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output", metavar="DIR", help="Directory of the job; default: a temporary one, kept if a task fails."
        ),
    ] = None,
    dialect: DialectOption = None,
    json: JsonOption = False,
) -> None:
    """Test tasks: the solution must pass, and an agent that does nothing must fail.

    The agents `oracle` and `nop` run at each task in sandboxes, on a private cluster of this machine.

    Exit codes: 0 every task is good; 1 one is not, or a trial could not run; 2 faults in the tasks; 130 interrupted.

    --json prints an object per line: those of a run except `cluster`, `run_opened` and `summary`; `task` {task,
    dataset, ok, faults: [{trial, message}], warnings, trials: [{agent, attempt, reward, rewards, error, durations}]};
    finally `oracle` {tasks, failed, directory}. Keys are only ever added.
    """
    from rollout.workloads.job.commands.try_tasks import try_tasks  # brings grpc

    raise typer.Exit(
        try_tasks(
            directories,
            provider=provider,
            provider_config=dict(_setting(text) for text in provider_config or ()),
            network_mode=network_mode,
            attempts=attempts,
            concurrency=concurrency,
            output=output,
            dialect=dialect,
            json=json,
        )
    )


def _setting(text: str) -> tuple[str, Any]:
    """Parse KEY=VALUE. A value that is not JSON is text."""
    import json

    key, equals, value = text.partition("=")
    if not equals or not key.strip():
        raise ConfigError(f"--provider-config {text}: write KEY=VALUE, such as image=host")
    try:
        return key.strip(), json.loads(value)
    except ValueError:
        return key.strip(), value.strip()


def _print(found: CheckedTask) -> None:
    from rollout.cli.words import counted
    from rollout.config.visible import visible

    if found.loaded is not None:
        task = found.loaded.task
        steps = f", {counted(len(task.steps), 'step')}" if task.has_steps else ""
        files = f"{counted(found.loaded.count, 'file')}, {_size(found.loaded.size)}"
        format = f"{task.dialect_name} {task.schema_version}" if found.loaded.settled else "of a format to be named"
        typer.echo(visible(f"{found.directory}: ok, {format}{steps}, {files}"))
    for warning in found.warnings:
        typer.echo(visible(f"warning: {warning}"))


def _size(size: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.0f} {unit}"
        size /= 1024
    return f"{size:.1f} GiB"
