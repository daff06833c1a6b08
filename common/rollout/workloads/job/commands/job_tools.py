"""`rollout job show|export|compare|regrade`: commands that work with the results of jobs."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Annotated

import typer

from rollout.cli.asking import tell
from rollout.cli.completion import Offer, complete_run
from rollout.cli.options import CoordinatorOption, JsonOption, TlsDirOption, WorkersOption
from rollout.model.errors import ConfigError, RolloutError

_JOB_HELP = "The run's directory, name or id, or @last."


def complete_job(context: typer.Context, incomplete: str) -> list[Offer]:
    """Complete jobs on this machine by name, then runs of the cluster."""
    from rollout.workloads.job.commands.find_job import known_jobs

    jobs = {name: str(path) for name, path in known_jobs().items() if name.startswith(incomplete)}
    return [*jobs.items(), *(offer for offer in complete_run(context, incomplete) if offer[0] not in jobs)]


def complete_trial(context: typer.Context, incomplete: str) -> list[str]:
    """Complete trials of the job named before, if it is on this machine."""
    from rollout.workloads.job.commands.find_job import directory_of
    from rollout.workloads.job.job_directory import read_job_directory

    with suppress(RolloutError):
        directory = directory_of(str(context.params.get("job", "")), lambda text: None)
        if directory is not None:
            trials = read_job_directory(directory).trials
            return [trial.label for trial in trials if trial.label.startswith(incomplete)]
    return []


JobArgument = Annotated[
    str, typer.Argument(metavar="RUN|DIR", help=_JOB_HELP, autocompletion=complete_job, show_default=False)
]
FORMATS = (".csv", ".jsonl", ".parquet", ".html")


def add_to(app: typer.Typer) -> None:
    """Add these commands to the group `rollout job`."""
    app.command("show")(show)
    app.command("export")(export)
    app.command("compare")(compare)
    app.command("regrade")(regrade)


def show(
    job: JobArgument,
    trial: Annotated[
        str | None,
        typer.Argument(
            metavar="TRIAL",
            help="Show all of one trial: dataset/task/agent/attempt, or a unique part of it.",
            autocompletion=complete_trial,
            show_default=False,
        ),
    ] = None,
    failed: Annotated[
        bool,
        typer.Option("--failed", help="List trials that ended with an error and without a valid reward."),
    ] = False,
    not_passed: Annotated[
        bool, typer.Option("--not-passed", help="List failed trials and those with a reward below 1.")
    ] = False,
    coordinator: CoordinatorOption = None,
    tls_dir: TlsDirOption = None,
    json: JsonOption = False,
) -> None:
    """Show a job's rates per agent, pass@k, errors and slowest trials, or all of one TRIAL.

    Rates cover scored trials (docs/job.md), with 95 % intervals clustered by task.

    --json: `{job, run_id, directory, state, reason, agents: [{agent, dataset, counts, pass_rate, mean_reward,
    pass_at_k, metrics, errors, cost_usd, tokens, versions}], groups, errors: [{type, count, agents, example}], slowest,
    earlier, notes}`, where `groups` splits several datasets; with TRIAL `{job, trial, status, infrastructure, score,
    result, record, directory, files}`; with --failed or --not-passed a row of `job export` per line. Keys are only ever
    added.
    """
    from rollout.cli.show import print_json
    from rollout.workloads.job.commands import show_job
    from rollout.workloads.job.commands.find_job import job_named
    from rollout.workloads.job.overview import overview, overview_json
    from rollout.workloads.job.table import rows

    if failed + not_passed + (trial is not None) > 1:
        raise ConfigError("--failed, --not-passed and TRIAL say different things: give one of them")
    with job_named(job, coordinator, tls_dir, tell) as found:
        if trial is not None:
            one = found.find(trial)
            if json:
                print_json(show_job.trial_json(found, one))
            else:
                show_job.print_trial(found, one)
        elif failed or not_passed:
            chosen = [
                one for one in found.trials if (found.not_passed(one) if not_passed else found.status(one) == "failed")
            ]
            if json:
                for row in rows(found, chosen):
                    print_json(row)
            else:
                empty = "no trial that has ended did not pass" if not_passed else "no trial failed"
                show_job.print_trials(found, chosen, empty)
        elif json:
            print_json(overview_json(found, overview(found)))
        else:
            show_job.print_overview(found, overview(found))


def export(
    job: JobArgument,
    output: Annotated[
        Path,
        typer.Option("--output", metavar="FILE", help="File to write, of format .csv, .jsonl, .parquet or .html."),
    ],
    coordinator: CoordinatorOption = None,
    tls_dir: TlsDirOption = None,
    json: JsonOption = False,
) -> None:
    """Write a job's trials as a table, or its report as one self-contained HTML file.

    docs/job.md lists the columns; .parquet needs pyarrow. An existing file is replaced.

    --json: `{job, file, trials, earlier, notes}`.
    """
    from rollout.cli.show import print_json
    from rollout.workloads.job import table
    from rollout.workloads.job.commands.find_job import job_named
    from rollout.workloads.job.commands.show_job import earlier_left_out, print_written
    from rollout.workloads.output import write_atomically

    ending = output.suffix.lower()
    if ending not in FORMATS:
        raise ConfigError(f"--output {output}: the ending must be one of {', '.join(FORMATS)}")
    if not output.parent.is_dir():
        raise ConfigError(f"--output: there is no directory {output.parent}")
    if output.is_dir():
        raise ConfigError(f"--output: {output} is a directory: name a file")
    with job_named(job, coordinator, tls_dir, tell) as found:
        for note in found.notes:
            tell(f"warning: {note}")
        if found.earlier:
            tell(earlier_left_out(found))
        if ending == ".html":
            from rollout.workloads.job.html import html_file

            data = html_file(found, output)
        else:
            writers = {".csv": table.csv_file, ".jsonl": table.jsonl_file, ".parquet": table.parquet_file}
            data = writers[ending](table.rows(found))
        write_atomically(output, data)
        if json:
            told = {"trials": len(found.trials), "earlier": found.earlier, "notes": list(found.notes)}
            print_json({"job": found.name, "file": str(output), **told})
        else:
            print_written(output, len(found.trials))


def compare(
    a: JobArgument,
    b: Annotated[
        str | None,
        typer.Argument(
            metavar="[RUN|DIR]",
            help="The other job; default: two agents of the same job.",
            autocompletion=complete_job,
            show_default=False,
        ),
    ] = None,
    agent: Annotated[
        list[str] | None,
        typer.Option(
            "--agent", metavar="AGENT", help="Agent to compare; given twice: of the first and of the second job."
        ),
    ] = None,
    coordinator: CoordinatorOption = None,
    tls_dir: TlsDirOption = None,
    json: JsonOption = False,
) -> None:
    """Compare two jobs, or two agents of one job, task by task, with a test of significance.

    Without --agent each agent is compared with itself. Differences are B minus A over the tasks scored in both.

    --json: an object per line, `{job_a, job_b, agent_a, agent_b, tasks, mean_a, mean_b, difference, low, high, p_value,
    test, p_exact, discordant, gained, lost, tasks_only_a, tasks_only_b, only_a, only_b, moved}`; `test` is
    mcnemar_mid_p, sign_flip_exact or sign_flip_sampled. Keys are only ever added.
    """
    from contextlib import nullcontext

    from rollout.cli.show import print_json
    from rollout.workloads.job.commands.find_job import job_named
    from rollout.workloads.job.commands.show_job import earlier_left_out, print_compared
    from rollout.workloads.job.compare_directories import compare_directories, compared_json

    with job_named(a, coordinator, tls_dir, tell) as first:
        other = nullcontext(first) if b is None else job_named(b, coordinator, tls_dir, tell)
        with other as second:
            for note in dict.fromkeys((*first.notes, *second.notes)):
                tell(f"warning: {note}")
            for told in dict.fromkeys(earlier_left_out(one) for one in (first, second) if one.earlier):
                tell(told)
            found, impossible = compare_directories(first, second, agent or [])
            for why in impossible:
                tell(f"not compared: {why}")
            for one in found:
                if json:
                    print_json({"job_a": first.name, "job_b": second.name, **compared_json(one)})
                else:
                    print_compared(one, first.name, second.name)


def regrade(
    job: JobArgument,
    config: Annotated[
        Path | None,
        typer.Option("--config", metavar="FILE", help="job.yaml with other settings or tasks; default: the job's."),
    ] = None,
    tasks: Annotated[
        list[str] | None,
        typer.Option("--tasks", metavar="GLOB", help="Only these tasks, as TASK or DATASET/TASK; repeatable."),
    ] = None,
    coordinator: CoordinatorOption = None,
    tls_dir: TlsDirOption = None,
    workers: WorkersOption = None,
    json: JsonOption = False,
) -> None:
    """Verify a job's finished trials again with the current tests, without running agents.

    Each trial gets a new sandbox with its kept artifacts. Results go to DIR/regrade-N, a job's directory, with the
    changes in regrade.json; the job is unchanged. The same command resumes.

    Exit codes: 0 every trial was verified; 1 one was not; 2 configuration or input, or nothing was kept; 130
    interrupted.

    --json prints an object per line: those of `rollout job run`, finally `regraded` {directory, regraded, changed,
    agents: [{agent, trials, pass_rate_before, pass_rate_after, mean_reward_before, mean_reward_after}], trials:
    [{trial, agent, before, after, error_before, error_after}]}. Keys are only ever added.
    """
    from rollout.workloads.job.commands.find_job import directory_of
    from rollout.workloads.job.commands.regrading import Regrading  # brings grpc

    directory = directory_of(job, tell)
    if directory is None:
        raise ConfigError(
            f"no directory of a job {job!r} is on this machine: name it, or write it from the ledger of its cluster: "
            f"rollout run results {job} --output DIR"
        )
    working = Regrading(
        directory, config, tuple(tasks or ()), coordinators=tuple(coordinator or ()), tls_dir=tls_dir, workers=workers,
        json=json,
    )  # fmt: skip
    raise typer.Exit(working.run())
