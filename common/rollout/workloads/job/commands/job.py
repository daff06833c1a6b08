"""`rollout job`: runs evaluations of agents, each described by a job.yaml, and works with their results."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, NoReturn

import typer

from rollout.cli.commands.standard import HELP
from rollout.cli.groups import CommandGroup
from rollout.cli.options import one_file
from rollout.cli.work_command import Typed, work_command
from rollout.model.errors import ConfigError
from rollout.workloads.job.commands import job_tools
from rollout.workloads.job.commands.job_tail import tail
from rollout.workloads.job.config import JobConfig
from rollout.workloads.job.dialect import DialectName
from rollout.workloads.job.errors import types_of
from rollout.workloads.job.named import job_values

app = typer.Typer(cls=CommandGroup, no_args_is_help=True, rich_markup_mode=None)

FileArgument = Annotated[Path | None, typer.Argument(metavar="[FILE]", help="The job.yaml.", show_default=False)]
ConfigOption = Annotated[Path | None, typer.Option("--config", metavar="FILE", help="The same as FILE.")]
RetryErrorsOption = Annotated[
    str,
    typer.Option(
        "--retry-errors",
        metavar="TYPE[,TYPE]",
        help="Run trials again that ended with one of these error types.",
    ),
]
DatasetOption = Annotated[
    list[str] | None,
    typer.Option(
        "--dataset",
        "-d",
        metavar="DATASET",
        help="Without FILE: tasks, as a directory, bundled:NAME, or NAME[@VERSION] in Harbor's registry.",
    ),
]
AgentOption = Annotated[
    list[str] | None, typer.Option("--agent", "-a", metavar="NAME", help="Without FILE: agents. Default: oracle.")
]
ModelOption = Annotated[
    list[str] | None, typer.Option("--model", "-m", metavar="MODEL", help="Without FILE: models of each agent.")
]
LimitOption = Annotated[
    int | None,
    typer.Option("--limit", "-l", min=1, metavar="N", help="Without FILE: use only the first N tasks of a dataset."),
]
DialectOption = Annotated[
    DialectName | None,
    typer.Option("--dialect", help="Without FILE: format of tasks that do not name it."),
]

_RUN = HELP.format(
    events="",
    details="""Run every agent of a job at every task, and write results below jobs_dir.

The job is a FILE, or options: `rollout job run -d bundled:rollout -a oracle --provider bubblewrap`.

The same command resumes: it keeps finished trials and runs new or changed ones. The first Ctrl-C waits for running
trials; the second abandons them.""",
    unit="trials",
    rates="trials_per_s, agents, trials_running, cost_usd, tokens",
    exits="0 every trial is final, failed ones included; 1 the job was stopped by infrastructure "
    "failures, or no worker could run a trial",
)


@app.callback(help="Evaluate agents at tasks, in sandboxes, verified and resumable.")
def group() -> None: ...


@app.command("run", help=_RUN)
@work_command(JobConfig)
def run(
    typed: Typed,
    file: FileArgument = None,
    config: ConfigOption = None,
    dataset: DatasetOption = None,
    agent: AgentOption = None,
    model: ModelOption = None,
    limit: LimitOption = None,
    dialect: DialectOption = None,
    retry_errors: RetryErrorsOption = "",
) -> None:
    named = {"--dataset": dataset, "--agent": agent, "--model": model, "--limit": limit, "--dialect": dialect}
    given = [option for option, value in named.items() if value]
    if file or config or not given:
        if given:
            raise ConfigError(f"a FILE says which job this is: leave out {' and '.join(given)}, or the file")
        path = one_file(file, config, "rollout job run job.yaml` or `rollout job run -d DATASET -a AGENT")
        _run(typed, path, retry_errors, (str(path),), only_resume=False)
    if not dataset:
        raise ConfigError("--dataset must be given, or a FILE")
    words = [word for option, value in named.items() for one in _listed(value) for word in (option, one)]
    named_job = job_values(dataset, agent or [], model or [], limit, dialect)
    typed.given.update({key: value for key, value in named_job.items() if typed.given.get(key) is None})
    _run(typed, None, retry_errors, tuple(words), only_resume=False)


def _listed(value: list[str] | str | int | None) -> list[str]:
    return value if isinstance(value, list) else [] if value is None else [str(value)]


@app.command("resume")
@work_command(JobConfig, without=["resume", "dry_run"])
def resume_job(
    typed: Typed, file: FileArgument = None, config: ConfigOption = None, retry_errors: RetryErrorsOption = ""
) -> None:
    """Resume a job as `rollout job run` does, but never start a new one."""
    path = one_file(file, config, "rollout job run job.yaml")
    _run(typed, path, retry_errors, (str(path),), only_resume=True)


def _run(typed: Typed, path: Path | None, retry_errors: str, words: tuple[str, ...], *, only_resume: bool) -> NoReturn:
    from rollout.workloads.job.workload import Job

    workload = Job(_types(retry_errors))
    if not typed.names_cluster:
        workload.works_here()
    settings = workload.load(path, typed.given)
    directory = workload.directory(settings)
    if only_resume and not (directory / "run-id").exists():
        raise ConfigError(f"{directory} holds no job to go on with: `rollout job run {path}` starts it")
    typed.run(workload, settings, typed.words("job", "run", *words), path)


app.command("tail")(tail)
job_tools.add_to(app)


def _types(text: str) -> list[str]:
    found: list[str] = []
    for name in [part.strip() for part in text.split(",") if part.strip()]:
        try:
            found += types_of(name)
        except KeyError:
            raise ConfigError(
                f'--retry-errors: "{name[:60]}" is no type of error; `errors.jsonl` and docs/job.md have them'
            ) from None
    return found
