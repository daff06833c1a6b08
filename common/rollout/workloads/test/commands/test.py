"""`rollout test`: runs the tests of a project, lists them, and shows their results."""

from __future__ import annotations

import re
import shlex
from json import dumps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from rollout.cli.commands.standard import HELP
from rollout.cli.groups import CommandGroup
from rollout.cli.options import JsonOption
from rollout.cli.work_command import Typed, work_command
from rollout.config.load import located
from rollout.model.counts import counted
from rollout.model.errors import ConfigError, NotFoundError
from rollout.workloads.test.commands.arguments import ConfigOption, RunArgument
from rollout.workloads.test.commands.bisect import bisect
from rollout.workloads.test.commands.history import history
from rollout.workloads.test.commands.make_room import make_room, refuse_in_use
from rollout.workloads.test.config import FrameworkType, ProviderType, TestConfig
from rollout.workloads.test.project import FILE

if TYPE_CHECKING:
    from rollout.workloads.test.workload import Test

app = typer.Typer(cls=CommandGroup, no_args_is_help=True, rich_markup_mode=None)

SelectedArgument = Annotated[
    list[str] | None,
    typer.Argument(metavar="[PATH|ID]...", help="Files, directories or tests; default: all.", show_default=False),
]
RecordOption = Annotated[
    bool, typer.Option("--record-history", help='Record this run if [history] record_history = "flag".')
]

_RUN = HELP.format(
    events=", `test` {id, group, outcome, seconds}",
    details=f"""Run the tests of the project in this directory, as many at once as there are cores or workers.

{FILE} is optional. A test that ends its process is a crash, and the others continue. A finished run starts anew; a
killed one resumes unless the project changed.""",
    unit="batches",
    rates="tests_per_s, tests, tests_done, outcomes, tests_running",
    exits="0 all tests passed; 1 some failed; 3 none failed, some were flaky, and [report] fail_on_flaky is set",
)

_ERRORS = frozenset({"error", "crashed", "timeout"})


CachedOption = Annotated[bool, typer.Option("--cached", help="Skip tests that passed with the same project files.")]
AffectedOption = Annotated[
    bool,
    typer.Option("--affected", help="Skip tests that passed with the same imported files."),
]


@app.callback(help="Run any test suite on many workers.")
def group() -> None: ...


@app.command("run", help=_RUN)
@work_command(TestConfig)
def run(
    typed: Typed,
    selected: SelectedArgument = None,
    config: ConfigOption = None,
    record_history: RecordOption = False,
    cached: CachedOption = False,
    affected: AffectedOption = False,
    keyword: Annotated[str | None, typer.Option("-k", hidden=True, help="Refused.")] = None,
    marks: Annotated[str | None, typer.Option("-m", hidden=True, help="Refused.")] = None,
) -> None:
    from rollout.workloads.test.workload import Test

    for option, value in (("-k", keyword), ("-m", marks)):
        if value is not None:
            raise ConfigError(
                f"{option} is an option of pytest: name paths or ids here, or give a group in {FILE} "
                f"[groups.NAME] filters = {dumps(f'{option} {shlex.quote(value)}')}"
            )
    words = typed.words("test", "run", *(selected or []), config=config)
    unchanged = "imports" if affected else "project" if cached else None
    flags = {"--record-history": record_history, "--cached": cached, "--affected": affected}
    words = (*words, *(flag for flag, given in flags.items() if given))
    _run(typed, Test(selected or [], record=record_history, unchanged=unchanged), config, words)


@app.command("rerun-failed")
@work_command(TestConfig)
def rerun_failed(typed: Typed, run: RunArgument = None, config: ConfigOption = None) -> None:
    """Run the tests again that failed in RUN, or that --maxfail left out, without flaky and quarantined ones.

    The results replace the last run's. All else is as in `rollout test run`; exit code 0 also if no test failed.
    """
    from rollout.workloads.test.results_here import failed_ids, is_over, not_run, results_file, unfinished
    from rollout.workloads.test.workload import Test

    directory = Test().here(config, typed.given)
    refuse_in_use(directory)
    begun = None if run else unfinished(directory)
    failed = begun or failed_ids(results_file(directory, run))
    left = not_run(directory) if run is None and begun is None else None
    notes: list[str] = []
    if left is not None and left.ids:
        if is_over(directory):
            failed = failed.and_also(left)
            notes.append(f"{counted(len(left.ids), 'test')} that the last run left out run, too")
        else:
            have = "has" if len(left.ids) == 1 else "have"
            notes.append(
                f"the last run was interrupted: {counted(len(left.ids), 'test')} {have} no result, and {have} none "
                "after this run either: `rollout test run` runs all"
            )
    if not failed.ids:
        typer.echo("\n".join(["no test failed", *notes]))
        return
    words = typed.words("test", "rerun-failed", *([run] if run else []), config=config)
    _run(typed, Test(failed.files, only=failed.ids, notes=notes), config, words)


def _run(typed: Typed, workload: Test, config: Path | None, words: tuple[str, ...]) -> None:
    if not typed.names_cluster:
        workload.works_here()
    if workers := typed.shared["workers"]:
        workload.use_workers(workers)
    settings = workload.load(config, typed.given)
    if not typed.shared["dry_run"] and typed.shared["resume"] is None:
        make_room(workload.directory(settings))
    typed.run(workload, settings, words, workload.project.file)


@app.command("collect")
def collect(
    selected: SelectedArgument = None,
    config: ConfigOption = None,
    format: Annotated[Literal["text", "json"], typer.Option("--format", help="Output format.")] = "text",
    json: JsonOption = False,
) -> None:
    """Print the id of each test, one per line, without running tests.

    Exit codes: 0; 1 something could not be collected; 2 configuration, or no tests. --json: an object per line, {id,
    group, framework, file, line, scope, markers}, or {id, group, error} for what could not be collected.
    """
    from rollout.cli.show import print_json
    from rollout.workloads.test.discovery import discover
    from rollout.workloads.test.workload import Test

    workload = Test(selected or [])
    settings = workload.load(config)
    with located(workload.project.file, TestConfig):
        found = discover(workload.project, settings, selected or [], lambda text: None)
    as_json = json or format == "json"
    for case in found.cases:
        if as_json:
            print_json(case.model_dump(mode="json", exclude={"session"}))
        else:
            typer.echo(case.id)
    bad = [result for result in found.results if not result.good]
    for result in bad:
        message = result.tries[-1].message
        if as_json:
            print_json({"id": result.id, "group": result.group, "error": message})
        else:
            typer.echo(f"error: {result.id}: {message}", err=True)
    raise typer.Exit(1 if bad else 0)


@app.command("validate")
def validate(config: ConfigOption = None, json: JsonOption = False) -> None:
    """Check the configuration and show its effect, without running anything.

    Exit codes: 0; 2 with one fault per line. --json: {file, root, framework, provider, python, groups, output_dir,
    notes}; `python` is the interpreter, relative to root, or null.
    """
    from rollout.cli.show import print_json
    from rollout.workloads.test.workload import Test

    workload = Test()
    workload.works_here()
    settings = workload.load(config)
    with located(workload.project.file, TestConfig):
        told = workload.validated(settings)
    if json:
        print_json(told)
        return
    typer.echo(f"{told['file'] or 'no offload.toml, defaults'}: OK")
    for key in ("root", "framework", "python", "provider", "output_dir"):
        if told[key] is not None:
            typer.echo(f"{key}: {told[key]}")
    typer.echo(f"groups: {', '.join(told['groups'])}")
    for note in told["notes"]:
        typer.echo(f"note: {note}")


@app.command("init")
def init(
    directory: Annotated[
        Path, typer.Argument(metavar="[DIR]", help="The project; default: the current directory.", show_default=False)
    ] = Path(),
    framework: Annotated[
        FrameworkType | None, typer.Option("--framework", help="Test framework; default: detected.")
    ] = None,
    provider: Annotated[ProviderType, typer.Option("--provider", help="Where tests run.")] = "local",
) -> None:
    """Write an offload.toml for a project. Nothing is overwritten."""
    from rollout.workloads.test.starting import first_file, guess

    path = directory / FILE
    text = first_file(framework or guess(directory), provider)
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        raise ConfigError(f"{path} is there already: `rollout test validate` checks it") from None
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror or error}") from error
    typer.echo(f"{path}\ncheck it with: rollout test validate\ntry it with: rollout test run")


@app.command("logs")
def logs(
    run: RunArgument = None,
    failures: Annotated[bool, typer.Option("--failures", help="Only failed tests.")] = False,
    errors: Annotated[
        bool, typer.Option("--errors", help="Only tests with an error of collection, fixtures, crash or timeout.")
    ] = False,
    test: Annotated[list[str] | None, typer.Option("--test", metavar="ID", help="Only this test; repeatable.")] = None,
    test_regex: Annotated[
        str, typer.Option("--test-regex", metavar="PATTERN", help="Only tests whose id matches.")
    ] = "",
    config: ConfigOption = None,
    json: JsonOption = False,
) -> None:
    """Print results and output of the tests of RUN. Options are combined.

    --json: lines of results.jsonl.
    """
    from rollout.workloads.test.report import failure_text
    from rollout.workloads.test.result_lines import BAD, read_lines
    from rollout.workloads.test.results_here import results_file
    from rollout.workloads.test.workload import Test

    directory = Test().here(config)
    try:
        pattern = re.compile(test_regex)
    except re.error as error:
        raise ConfigError(f"--test-regex: {test_regex!r} is no regular expression: {error}") from None
    wanted = _ERRORS if errors else BAD if failures else frozenset[str]()
    unknown = set(test or ())
    for line in read_lines(results_file(directory, run)):
        status, id = line.result.status.value, line.case.id
        unknown.discard(id)
        if (wanted and status not in wanted) or (test and id not in test) or not pattern.search(id):
            continue
        if json:
            typer.echo(line.encode().decode().rstrip("\n"))
        else:
            typer.echo(f"{failure_text(line)}\n")
    if unknown:
        raise NotFoundError(
            f"--test: the run has no test {', '.join(sorted(unknown))}: `rollout test collect` lists them"
        )


app.command("history")(history)
app.command("bisect")(bisect)
