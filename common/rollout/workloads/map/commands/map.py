"""`rollout map PKG.MODULE:FUNCTION`: options for everything, or a file, or options over a file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

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
from rollout.model.errors import ConfigError
from rollout.workloads.map.config import MapConfig

app = typer.Typer(add_completion=False)


@app.command()
def map(
    function: Annotated[
        str | None,
        typer.Argument(metavar="PKG.MODULE:FUNCTION", help="A function, an `async def`, or a class with __call__."),
    ] = None,
    input: Annotated[
        list[str] | None,
        typer.Option("--input", metavar="FILE", help="JSON Lines, a row each: files or globs; - is standard input."),
    ] = None,
    output: Annotated[str | None, typer.Option("--output", metavar="DIR", help="Directory of the results.")] = None,
    on_bad_row: Annotated[
        str | None,
        typer.Option(
            "--on-bad-row",
            metavar="error|skip",
            help="Rows that are no JSON. error (default): all are told, nothing starts; skip: they go to errors.jsonl.",
        ),
    ] = None,
    code: Annotated[
        str | None,
        typer.Option(
            "--code",
            metavar="DIR",
            help="Directory of the code, which travels to the workers. Default: this one, if the module is in it.",
        ),
    ] = None,
    config: Annotated[
        Path | None, typer.Option("--config", metavar="FILE", help="All of this as a TOML file; options win over it.")
    ] = None,
    timeout: Annotated[
        str | None, typer.Option("--timeout", metavar="TIME", help="Of one try at a row: 60s, 5m. Default: none.")
    ] = None,
    max_attempts: Annotated[
        int | None, typer.Option("--max-attempts", min=1, max=100, help="Tries at a row. Default: 3.")
    ] = None,
    retry_backoff: Annotated[
        str | None,
        typer.Option("--retry-backoff", metavar="TIME", help="Before the second try, then doubled. Default: 1s."),
    ] = None,
    concurrency: Annotated[
        int | None, typer.Option("--concurrency", min=1, help="Rows at once over all workers. Default: no limit.")
    ] = None,
    lane_key: Annotated[
        str | None,
        typer.Option("--lane-key", metavar="FIELD", help="Field of a row: --concurrency holds for each of its values."),
    ] = None,
    gpus: Annotated[int | None, typer.Option("--gpus", min=0, help="Whole accelerators a row's process has.")] = None,
    memory: Annotated[
        str | None, typer.Option("--memory", metavar="SIZE", help="Memory a row's process may use: 2GiB.")
    ] = None,
    name: NameOption = "",
    coordinator: CoordinatorOption = None,
    tls_dir: TlsDirOption = None,
    resume: ResumeOption = None,
    workers: WorkersOption = None,
    dry_run: DryRunOption = False,
    detach: DetachOption = False,
    json: JsonLinesOption = False,
) -> None:
    """Call a Python function with each row of the input, on this machine or on a cluster.

    A row is any JSON value, and so is what the function returns: OUTPUT/results.jsonl has
    {"row", "result", "seconds", "attempts"} for each, in input order. A row whose function raises, hangs, crashes or
    returns what is no JSON is tried again where that may help, and becomes a line of OUTPUT/errors.jsonl with type,
    message and traceback; the others go on.

    With no cluster named or joined, or with --local, it starts a coordinator and workers on this machine for as long as
    it runs; a line of output says which cluster it is. Interrupt or kill it at any time: the same command goes
    on where it was.

    Exit codes: 0 every row has its result, or its line of errors.jsonl; 1 no worker can load the function, all
    rows failed, or the run was killed; 2 configuration or input; 130 interrupted.
    """
    from rollout.cli.session import Options, run_workload  # brings grpc
    from rollout.workloads.map.workload import Map

    given: dict[str, Any] = {
        "function.name": function,
        "function.code": code,
        "input.glob": input,
        "input.on_bad_row": on_bad_row,
        "output.dir": output,
        "run.timeout": timeout,
        "run.max_attempts": max_attempts,
        "run.retry_backoff": retry_backoff,
        "run.concurrency": concurrency,
        "run.lane_key": lane_key,
        "run.gpus": gpus,
        "run.memory": memory,
        "run.name": name or None,
        "workers.count": workers,
    }
    if config is None:
        needed = {"PKG.MODULE:FUNCTION": function, "--input": input, "--output": output}
        if absent := [option for option, value in needed.items() if not value]:
            raise ConfigError(f"{' and '.join(absent)} must be given, or a file that says it with --config")
    settings = load_settings(MapConfig, config, given)
    options = Options(
        words=words(config, given),
        coordinators=tuple(coordinator or ()),
        tls_dir=tls_dir,
        resume=resume,
        workers=workers,
        dry_run=dry_run,
        detach=detach,
        json=json,
    )
    with located(config):
        raise typer.Exit(run_workload(Map(), settings, options))


_OPTION = {
    "function.code": "--code", "input.glob": "--input", "input.on_bad_row": "--on-bad-row",
    "output.dir": "--output", "run.timeout": "--timeout",
    "run.max_attempts": "--max-attempts", "run.retry_backoff": "--retry-backoff", "run.concurrency": "--concurrency",
    "run.lane_key": "--lane-key", "run.gpus": "--gpus", "run.memory": "--memory", "run.name": "--name",
}  # fmt: skip


def words(config: Path | None, given: dict[str, Any]) -> tuple[str, ...]:
    """The command as it was typed, without what every workload's command takes."""
    typed = ["rollout", "map", *([given["function.name"]] if given["function.name"] else [])]
    if config is not None:
        typed += ["--config", str(config)]
    for key, option in _OPTION.items():
        values: list[Any] = given[key] if isinstance(given[key], list) else [given[key]]
        for value in values:
            typed += [option, str(value)] if value is not None else []
    return tuple(typed)
