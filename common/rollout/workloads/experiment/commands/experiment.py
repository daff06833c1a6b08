"""`rollout experiment`: runs of experiments, each described by an experiment.yaml."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from rollout.cli.boundary import OK
from rollout.cli.commands.standard import HELP
from rollout.cli.groups import CommandGroup
from rollout.cli.work_command import Typed, work_command
from rollout.cli.work_options import Options
from rollout.config.load import YAML
from rollout.model.errors import ConfigError
from rollout.workloads.experiment.commands import again, analysis, controls
from rollout.workloads.experiment.commands.again import checked_here
from rollout.workloads.experiment.commands.condition import condition_of
from rollout.workloads.experiment.commands.find_run import RUNS_DIR, directory_for, find_run, run_at
from rollout.workloads.experiment.config import ExperimentConfig, load_experiment
from rollout.workloads.experiment.contracts import SCHEMAS, json_schema
from rollout.workloads.experiment.engines import model_of
from rollout.workloads.experiment.layout import TRIALS
from rollout.workloads.experiment.primary_watch import PrimaryWatch
from rollout.workloads.experiment.resolve import config_of
from rollout.workloads.json_form import JsonObject

if TYPE_CHECKING:
    from rollout.workloads.experiment.workload import ExperimentChecked

app = typer.Typer(cls=CommandGroup, no_args_is_help=True, rich_markup_mode=None)

FileArgument = Annotated[Path, typer.Argument(metavar="FILE", help="The experiment.yaml.")]
RunOrFile = Annotated[
    str, typer.Argument(metavar="RUN|FILE", help="The run's directory, name or id, @last, or its experiment.yaml.")
]
SetOption = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Override a key; repeatable."),
]
OverridesOption = Annotated[
    Path | None,
    typer.Option("--overrides", metavar="FILE", help="File of overridden keys (experiment_overrides_v1)."),
]
RunNameOption = Annotated[
    str, typer.Option("--name", help="Name of the run and its directory; default: the experiment's id, numbered.")
]
EffectOption = Annotated[
    float | None,
    typer.Option("--effect", metavar="X", help="Report how many tasks detect this difference of pass rates."),
]
SmokeOption = Annotated[
    bool, typer.Option("--smoke", help="Run one trial first, and continue only if it has a result.")
]

_RUN = HELP.format(
    events="",
    details="""Run every variant of an experiment at every task, and write facts and evidence below runs_dir.

It resumes an unfinished run of the same experiment (every key, task and file), else starts another. The first Ctrl-C
waits for running trials; the second abandons them.""",
    unit="trials",
    rates="trials_per_s, variants",
    exits="0 every trial is final, failed ones included; 1 no worker could run one",
)


@app.callback(help="Compare variants of an agent: facts, evidence and analysis.")
def group() -> None: ...


@app.command("run", help=_RUN)
@work_command(ExperimentConfig)
def run(
    typed: Typed,
    file: FileArgument,
    name: RunNameOption = "",
    assignments: SetOption = None,
    overrides: OverridesOption = None,
    effect: EffectOption = None,
    smoke: SmokeOption = False,
) -> None:
    if effect is not None and not 0 < effect <= 1:
        raise ConfigError(f"--effect: must be above 0 and at most 1, such as 0.1 for ten points, not {effect:g}")
    settings = load_experiment(file, overrides, assignments or (), typed.given)
    words = [str(file)]
    for text in assignments or ():
        words += ["--set", text]
    if overrides is not None:
        words += ["--overrides", str(overrides)]
    checked = checked_here(settings, file)
    if smoke and not typed.shared["dry_run"]:
        _smoke(typed, settings, checked)
    directory, _ = directory_for(checked.resolved.json, Path(settings.runs_dir).expanduser(), name)
    _run(typed, settings, directory, (*words, *(["--name", name] if name else [])), file, effect)


@app.command("continue")
@work_command(ExperimentConfig, without=["dry_run", "provider", "concurrent"])
def continue_run(typed: Typed, run: RunOrFile) -> None:
    """Resume a run, even a killed one, as `rollout experiment run` does, but never start a new one."""
    path = Path(run)
    if path.suffix.lower() in YAML and path.is_file():
        settings = load_experiment(path, typed=typed.given)
        directory, goes_on = directory_for(
            checked_here(settings, path).resolved.json, Path(settings.runs_dir).expanduser(), "", killed=True
        )
        if not goes_on:
            raise ConfigError(f"no run of {path} is to go on: `rollout experiment run {path}` begins one")
        _run(typed, settings, directory, (run,), path, None, verb="continue")
    found = find_run(run, Path(typed.given.get("runs_dir") or RUNS_DIR))
    _run(typed, config_of(found.resolved), found.directory, (str(found.directory),), None, None, verb="continue")


@app.command("describe")
def describe(
    run: RunOrFile,
    runs_dir: controls.RunsDirOption = RUNS_DIR,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON on standard output.")] = False,
) -> None:
    """Show an experiment and the progress of its run."""
    path = Path(run)
    if path.suffix.lower() in YAML and path.is_file():
        _describe_file(path, as_json)
    found = find_run(run, Path(runs_dir))
    condition, total = condition_of(found), found.resolved["total_slots"]
    active = {} if condition.control is None else condition.control.active_trials
    if as_json:
        value = {
            "run_id": found.run_id,
            "directory": str(found.directory),
            "status": condition.status,
            "committed": condition.committed,
            "total_slots": total,
            "damaged": condition.damaged,
            "held_by": condition.held_by,
            "active_trials": {name: one.to_json() for name, one in active.items()},
            "experiment": found.resolved,
        }
        typer.echo(json.dumps(value, ensure_ascii=False))
        return
    settings = config_of(found.resolved)
    typer.echo(f"{found.directory}: {condition.status}, {condition.committed} of {total} trials are committed")
    typer.echo(f"experiment {settings.experiment.id}: {len(found.resolved['dataset']['task_ids'])} tasks")
    for variant in settings.variants:
        mark = " (baseline)" if variant is settings.baseline else ""
        model, _ = model_of(variant.variant_id, settings, {})
        known = [*([f"model {model}"] if model else []), *(f"{k}={json.dumps(v)}" for k, v in variant.bindings.items())]
        typer.echo(f"  {variant.variant_id}{mark}: {', '.join(known) or 'no bindings'}")
    for name, one in active.items():
        cut_off = "" if condition.held_by else ", cut off"
        typer.echo(f"  {name}: {one.variant_id}, {(one.control or {}).get('phase', '')}{cut_off}")
    for line in condition.advice:
        typer.echo(line)


@app.command("schema")
def schema(
    name: Annotated[str, typer.Argument(metavar="[NAME]", help="The contract; default: list all.")] = "",
) -> None:
    """Print the JSON Schema of a contract, or of experiment.yaml (experiment_v1_0)."""
    own = {"experiment_v1_0": ExperimentConfig.model_json_schema}
    if not name:
        for one in (*own, *SCHEMAS):
            typer.echo(one)
        return
    if name not in own and name not in SCHEMAS:
        raise ConfigError(f'there is no contract "{name}": there are {", ".join((*own, *SCHEMAS))}')
    found = own[name]() if name in own else json_schema(name)
    sys.stdout.write(json.dumps(found, indent=2, ensure_ascii=False) + "\n")


controls.add_to(app)
again.add_to(app)
analysis.add_to(app)


def _run(
    typed: Typed,
    settings: ExperimentConfig,
    directory: Path,
    words: tuple[str, ...],
    file: Path | None,
    effect: float | None,
    *,
    verb: str = "run",
) -> NoReturn:
    from rollout.workloads.experiment.workload import Experiment

    found, part, inherited = run_at(directory), None, None
    if found is not None:
        typer.echo(f"{found.directory} holds a run of this experiment", err=True)
        part, inherited = found.part, found.config.get("inherited")
        if verb == "continue":
            typed.shared["resume"] = typed.shared["resume"] or found.run_id
    workload = Experiment(directory, effect=effect, part=part, inherited=inherited)
    typed.run(workload, settings, typed.words("experiment", verb, *words), file)


def _smoke(typed: Typed, settings: ExperimentConfig, checked: ExperimentChecked) -> None:
    """Run the first trial. Raises ConfigError if it has no result or does not report the primary metric; before that,
    ConfigError or NotFoundError if a model is missing."""
    from rollout.cli.dry_run import find_named_now
    from rollout.cli.progress import NotesOnly
    from rollout.cli.session import run_workload
    from rollout.workloads.experiment.workload import Experiment

    first = settings.model_copy(
        update={
            "dataset": settings.dataset.model_copy(update={"limit": 1}),
            "design": settings.design.model_copy(update={"replications": 1, "max_concurrency": 1}),
            "variant_plan": [],
        }
    )
    with TemporaryDirectory(prefix="rollout-smoke-") as place:
        directory = Path(place) / "smoke"
        options = Options(words=typed.words("experiment", "run"), **typed.shared)
        find_named_now(Experiment(directory), settings, checked, options, controls.tell)
        run_workload(Experiment(directory), first, options, NotesOnly(controls.tell))
        line = (directory / TRIALS).read_bytes().partition(b"\n")[0]
        trial: JsonObject = json.loads(line or b"{}")
        watch = PrimaryWatch(settings.primary_metric.name)
        watch.take_up(directory)
    if trial.get("status") != "completed":
        why = f"{trial.get('classification')}: {trial.get('error_message')}" if trial else "it did not run"
        raise ConfigError(f"the smoke trial has no result, and nothing else was begun: {why}")
    watch.add_trial(trial)
    if watch.is_missing:
        raise ConfigError(f"only the smoke trial was begun: {watch.warning()}")
    typer.echo(f"smoke trial: {trial['outcome']}, score {trial['score']}", err=True)


def _describe_file(path: Path, as_json: bool) -> NoReturn:
    from rollout.workloads.experiment.workload import Experiment

    settings = load_experiment(path)
    checked = checked_here(settings, path)
    if as_json:
        typer.echo(json.dumps(checked.resolved.json, ensure_ascii=False))
    else:
        typer.echo("\n".join(Experiment().describe(settings, checked)))
    raise typer.Exit(OK)
