"""`rollout experiment analyze|query|views|trend|report`: analyses of the facts of runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from rollout.cli.asking import tell
from rollout.cli.boundary import FAILED
from rollout.cli.options import JsonOption
from rollout.model.errors import ConfigError
from rollout.workloads.experiment.commands.find_facts import run_directory
from rollout.workloads.experiment.commands.find_run import RUNS_DIR
from rollout.workloads.experiment.commands.refuse_output import refuse_output_in_run

_RUN_HELP = "The run's directory, name or id, or @last."
_OTHER_HELP = (
    "Run to compare with. Both can be jobs, directories with results.jsonl, or JSON Lines with a "
    "unit and a score per line."
)
RunArgument = Annotated[str, typer.Argument(metavar="RUN|DIR", help=_RUN_HELP, show_default=False)]
OtherArgument = Annotated[str | None, typer.Argument(metavar="[RUN_B]", help=_OTHER_HELP, show_default=False)]
RunsOption = Annotated[Path, typer.Option("--runs-dir", metavar="DIR", help="Directory of all runs.")]
VariantOption = Annotated[
    list[str] | None,
    typer.Option(
        "--variant",
        metavar="VARIANT",
        help="Variant to compare; given twice: baseline and variant, or one of each run.",
    ),
]
MarginOption = Annotated[
    float | None,
    typer.Option(
        "--margin",
        metavar="X",
        min=0.0,
        help="Largest irrelevant difference of the primary measure; default: primary_metric.non_inferiority_margin.",
    ),
]
UnitOption = Annotated[str, typer.Option("--unit", metavar="KEY", help="JSON Lines: key of the unit, such as task.id.")]
ScoreOption = Annotated[
    str, typer.Option("--score", metavar="KEY", help="JSON Lines: key of the score, such as result.score.")
]
FailIfOption = Annotated[
    Literal["worse", "not-better"] | None,
    typer.Option(
        "--fail-if",
        help="Exit with 1 if any variant is worse (or not better), nothing is compared, or no grader works.",
        show_default=False,
    ),
]
Format = Literal["table", "csv", "json", "parquet"]
TABLE_ROWS = 200
_RUNS = Path(RUNS_DIR)


def add_to(app: typer.Typer) -> None:
    """Add these commands to the group `rollout experiment`."""
    app.command("analyze")(analyze)
    app.command("query")(query)
    app.command("views")(views)
    app.command("trend")(trend)
    app.command("report")(report)


def analyze(
    run: RunArgument,
    run_b: OtherArgument = None,
    variant: VariantOption = None,
    margin: MarginOption = None,
    unit: UnitOption = "",
    score: ScoreOption = "",
    fail_if: FailIfOption = None,
    runs_dir: RunsOption = _RUNS,
    json: JsonOption = False,
) -> None:
    """Report which variant is better, by how much and how surely, or compare two runs task by task.

    Rates have 95 % intervals clustered by task. A paired design compares variant and baseline over the tasks scored in
    both: McNemar's mid-p test with one trial per task, else a sign-flip test, corrected for the number of variants
    (Holm, Benjamini-Hochberg). A running run is analyzed as far as it is committed.

    It writes analysis/agentlab.duckdb and analysis/load_duckdb.sql into the run's directory.

    --json: `{experiment_id, runs, compared: [{label, run_id, name, created_at, directory}], view_set, primary, margin,
    committed, total_slots, variants: [{variant_id, baseline, trials, scored, completed, failed, infrastructure, pruned,
    cancelled, tasks, pass_rate, mean_score, pass_at_k, cost_usd, mean_cost_usd, tokens_in, tokens_out,
    mean_duration_ms}], ungraded: [variant_id], comparisons: [{measure, direction, baseline_id,
    variant_id, tasks, only_a, only_b, baseline_mean, variant_mean, difference, low, high, test, p_value, p_exact,
    discordant, cohens_h, bootstrap, p_holm, p_bh, verdict, non_inferior}], costs, metrics, flaky_tasks, flaky,
    failure_clusters, failures, notes}`. Keys are only ever added.
    """
    from rollout.cli.show import print_json
    from rollout.workloads.experiment.analysis.opening import opened
    from rollout.workloads.experiment.analysis.other_runs import Keys
    from rollout.workloads.experiment.analysis.summary import analysis_json
    from rollout.workloads.experiment.commands.show_analysis import print_analysis

    a, b = run_directory(run, runs_dir), None if run_b is None else run_directory(run_b, runs_dir)
    with opened(a, b, variants=variant or [], keys=Keys(unit, score), keep=True) as found:
        result = found.analyze(margin)
        if json:
            print_json(analysis_json(result))
        else:
            print_analysis(result)
    verdicts = {one.verdict for one in result.verdicts}
    fails = "worse" in verdicts if fail_if == "worse" else verdicts != {"better"}
    if fail_if is not None and (fails or not verdicts or result.ungraded):
        raise typer.Exit(FAILED)


def query(
    run: RunArgument,
    sql: Annotated[str, typer.Argument(metavar="SQL", help="The query.", show_default=False)],
    format: Annotated[
        Format, typer.Option("--format", help="json prints one object per line; parquet needs --output.")
    ] = "table",
    output: Annotated[
        Path | None,
        typer.Option("--output", metavar="FILE", help="File to write; default: standard output.", show_default=False),
    ] = None,
    time_limit: Annotated[
        float, typer.Option("--time-limit", metavar="SECONDS", min=0.1, help="Time limit of the query.")
    ] = 60.0,
    runs_dir: RunsOption = _RUNS,
) -> None:
    """Query the facts of a run in SQL (DuckDB).

    RUN can be a directory of runs, which all_runs, all_trials and pass_rate_trend cover. A query reads only views
    (`rollout experiment views RUN`), no files, network or settings.
    """
    from rollout.workloads.experiment.analysis.opening import opened
    from rollout.workloads.experiment.commands.query_output import write_answer
    from rollout.workloads.experiment.commands.query_process import give_up, limited_memory

    if (format == "parquet") > (output is not None):
        raise ConfigError("--format parquet needs --output FILE")
    if output is not None and not output.parent.is_dir():
        raise ConfigError(f"--output: there is no directory {output.parent}")
    directory = run_directory(run, runs_dir)
    if output is not None:
        refuse_output_in_run(output, directory)
    with opened(directory) as found, limited_memory():
        for note in found.database.notes:
            tell(f"warning: {note}")
        with found.database.query(sql, time_limit_s=time_limit, stuck=give_up) as answer:
            write_answer(answer, format, output, TABLE_ROWS)


def views(
    run: RunArgument,
    view: Annotated[
        str | None, typer.Argument(metavar="[VIEW]", help="View whose first rows to show.", show_default=False)
    ] = None,
    limit: Annotated[int, typer.Option("--limit", min=1, metavar="N", help="Rows of VIEW.")] = 20,
    runs_dir: RunsOption = _RUNS,
    json: JsonOption = False,
) -> None:
    """List the views of a run with their columns, or show the first rows of one.

    --json: `{view_set, views: [{view, columns: [{name, type}]}]}`; with VIEW one row per line.
    """
    from rollout.cli.show import print_json, print_table, table
    from rollout.workloads.experiment.analysis.opening import opened
    from rollout.workloads.experiment.commands.query_output import write_answer

    with opened(run_directory(run, runs_dir)) as found:
        database = found.database
        known = database.views()
        if view is not None:
            if view not in known:
                raise ConfigError(
                    f'there is no view "{view}"; a run of the set {database.view_set} has {", ".join(known)}'
                )
            with database.query(f'SELECT * FROM "{view}" LIMIT {limit}') as answer:
                write_answer(answer, "json" if json else "table", None, limit)
            return
        columns = {name: database.rows(f'DESCRIBE "{name}"') for name in known}
    if json:
        listed = [
            {"view": name, "columns": [{"name": row[0], "type": row[1]} for row in rows]}
            for name, rows in columns.items()
        ]
        print_json({"view_set": str(database.view_set), "views": listed})
        return
    shown = table("view", "columns")
    for name, rows in columns.items():
        shown.add_row(name, ", ".join(row[0] for row in rows))
    print_table(shown, "no views")


def trend(
    experiment: Annotated[
        str | None, typer.Argument(metavar="[EXPERIMENT]", help="Only this experiment.", show_default=False)
    ] = None,
    runs_dir: RunsOption = _RUNS,
    json: JsonOption = False,
) -> None:
    """Show how pass rates changed from run to run of a project.

    --json: an object per line, `{experiment_id, variant_id, run_id, name, created_at, scored, tasks, pass_rate,
    mean_score, cost_usd, forked_from, change}`. `forked_from`: the run that some of its trials come from.
    """
    from rollout.workloads.experiment.analysis.opening import opened
    from rollout.workloads.experiment.analysis.sources import project
    from rollout.workloads.experiment.commands.query_output import write_answer

    runs = project(runs_dir)
    if not runs:
        raise ConfigError(f"{runs_dir} holds no run: name the directory of the runs with --runs-dir")
    known = sorted({one.manifest.experiment_id for one in runs})
    if experiment is not None and experiment not in known:
        raise ConfigError(f'no run in {runs_dir} is of the experiment "{experiment}"; there are {", ".join(known)}')
    of_one = "" if experiment is None else f" WHERE experiment_id = '{experiment}'"
    with opened(runs_dir) as found, found.database.query(f"SELECT * FROM pass_rate_trend{of_one}") as answer:
        write_answer(answer, "json" if json else "table", None, 10 * TABLE_ROWS)


def report(
    run: RunArgument,
    run_b: OtherArgument = None,
    output: Annotated[
        Path | None,
        typer.Option("--output", metavar="FILE", help="File to write; default: report.html in the run's directory."),
    ] = None,
    variant: VariantOption = None,
    margin: MarginOption = None,
    unit: UnitOption = "",
    score: ScoreOption = "",
    trials: Annotated[
        int, typer.Option("--trials", min=0, metavar="N", help="Trials to list; those that did not pass come first.")
    ] = 1000,
    runs_dir: RunsOption = _RUNS,
    json: JsonOption = False,
) -> None:
    """Write a report of a run, or of a comparison of two, as one self-contained HTML file.

    Links to logs, diffs and evidence are relative to the file. An existing file is replaced.

    --json: `{experiment_id, file, trials, listed}`.
    """
    from rollout.cli.show import console, print_json
    from rollout.cli.words import counted
    from rollout.config.visible import visible
    from rollout.workloads.experiment.analysis.opening import opened
    from rollout.workloads.experiment.analysis.other_runs import Keys
    from rollout.workloads.experiment.analysis.report import write_report

    a, b = run_directory(run, runs_dir), None if run_b is None else run_directory(run_b, runs_dir)
    if output is None and (b is not None or not a.is_dir()):
        raise ConfigError("--output FILE must be given where RUN is not the directory of one run")
    path = output or a / "report.html"
    if not path.parent.is_dir() or path.is_dir():
        raise ConfigError(f"--output: {path} {'is a directory' if path.is_dir() else 'is in no directory that exists'}")
    refuse_output_in_run(path, *([a] if b is None else [a, b]))
    with opened(a, b, variants=variant or [], keys=Keys(unit, score), keep=True) as found:
        written = write_report(found, path, margin, trials)
    if json:
        print_json(written)
    else:
        console().print(f"{visible(str(path))}: {counted(written['trials'], 'trial')}", soft_wrap=True)
