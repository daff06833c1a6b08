"""`rollout job`: evaluations of agents, each described by a job.yaml; and what is done with their runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rollout.cli.commands.standard import HELP
from rollout.cli.groups import CommandGroup
from rollout.cli.options import chosen, one_file
from rollout.cli.work_command import Typed, work_command
from rollout.client.target import find_target
from rollout.model.errors import ConfigError
from rollout.workloads.job.commands import job_tools
from rollout.workloads.job.commands.job_tail import tail
from rollout.workloads.job.config import JobConfig
from rollout.workloads.job.errors import types_of

app = typer.Typer(cls=CommandGroup, no_args_is_help=True, rich_markup_mode=None)

FileArgument = Annotated[Path | None, typer.Argument(metavar="[FILE]", help="The job: job.yaml.", show_default=False)]
ConfigOption = Annotated[
    Path | None, typer.Option("--config", metavar="FILE", help="The same, as other workloads have it.")
]
RetryErrorsOption = Annotated[
    str,
    typer.Option(
        "--retry-errors",
        metavar="TYPE[,TYPE]",
        help="Trials that ended with one of these types of errors run once more.",
    ),
]

_RUN = HELP.format(
    details="""Run every agent of a job at every task, and write what they came to below jobs_dir.

What is there already stays: the same command goes on, also when attempts, agents or tasks were added to the file, and
runs what is new or was changed; it says which. With --retry-errors trials that ended with such an error run once more.
The first Ctrl-C starts no further trial and waits for those that run; the second abandons them.""",
    unit="trials",
    rates="trials_per_s, agents, trials_running, cost_usd, tokens",
    exits="0 every trial is final, failed ones included; 1 the job itself was stopped: too many trials failed by no "
    "fault\nof an agent, or no worker could run one",
)


@app.callback(help="Evaluate agents at tasks: in sandboxes, verified, and resumable.")
def group() -> None: ...


@app.command("run", help=_RUN)
@work_command(JobConfig)
def run(
    typed: Typed, file: FileArgument = None, config: ConfigOption = None, retry_errors: RetryErrorsOption = ""
) -> None:
    _run(typed, file, config, retry_errors, only_resume=False)


@app.command("resume")
@work_command(JobConfig, without=["resume", "dry_run"])
def resume_job(
    typed: Typed, file: FileArgument = None, config: ConfigOption = None, retry_errors: RetryErrorsOption = ""
) -> None:
    """Go on with a job, as `rollout job run` does, and refuse to start one that was never begun.

    Options, output and exit codes are those of `rollout job run`.
    """
    _run(typed, file, config, retry_errors, only_resume=True)


def _run(typed: Typed, file: Path | None, config: Path | None, retry_errors: str, *, only_resume: bool) -> None:
    from rollout.workloads.job.workload import Job

    path = one_file(file, config, "rollout job run job.yaml")
    workload = Job(_types(retry_errors))
    if not find_target(list(typed.shared["coordinators"]), typed.shared["tls_dir"], chosen().wish).addresses:
        workload.works_here()
    settings = workload.load(path, typed.given)
    directory = workload.directory(settings)
    if only_resume and not (directory / "run-id").exists():
        raise ConfigError(f"{directory} holds no job to go on with: `rollout job run {path}` starts it")
    typed.run(workload, settings, typed.words("job", "run", str(path)), path)


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
