"""`rollout train`: a command for each algorithm, and commands that work with training runs."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rollout.cli.commands.run import RunArgument
from rollout.cli.commands.standard import HELP
from rollout.cli.groups import CommandGroup
from rollout.cli.options import (
    CoordinatorOption,
    JsonOption,
    TlsDirOption,
    WorkersOption,
)
from rollout.cli.work_command import Typed, work_command
from rollout.config.load import load_settings
from rollout.config.visible import visible
from rollout.model.counts import counted
from rollout.model.errors import ConfigError, UsageError
from rollout.workloads.registered import load
from rollout.workloads.train.config import KINDS, Kind, TrainConfig

if TYPE_CHECKING:
    from rollout.client import Runs
    from rollout.workloads.json_form import JsonObject
    from rollout.workloads.train.commands.snapshots import Figures, TrainingRun

app = typer.Typer(cls=CommandGroup, no_args_is_help=True, rich_markup_mode=None)

_SNAPSHOT_ID = re.compile(r"[0-9a-f]{64}")
_WHAT: dict[Kind, str] = {
    "sft": "Fine-tune on texts, conversations or answers (SFT).",
    "rm": "Train a reward model on pairs of a better and a worse answer.",
    "dpo": "Train with direct preference optimisation on pairs.",
    "ipo": "Train with identity preference optimisation on pairs.",
    "kto": "Train with Kahneman-Tversky optimisation on answers marked good or bad.",
    "grpo": "Train with group relative policy optimisation on samples and rewards.",
    "ppo": "Train with proximal policy optimisation and a value model.",
}
ConfigOption = Annotated[Path, typer.Option("--config", metavar="FILE", help="The configuration file (TOML).")]
ResumeOption = Annotated[
    str | None,
    typer.Option(
        "--resume",
        metavar="RUN|snapshot:ID",
        help="Run to resume, as elsewhere, or snapshot to start a new run from.",
    ),
]


@app.callback(help="Train a model, with snapshots that resume to the byte.")
def group() -> None: ...


def _add(kind: Kind) -> None:
    text = HELP.format(
        details=_WHAT[kind],
        unit="segments",
        events=",\n`data_report` {as data-report.json}, `warning` {code, after_step, text}",
        rates="segments_per_s, note, step, steps, loss, lr,\ngrad_norm, tokens_per_s, eval_loss, eval_step, "
        "best_eval_loss, best_eval_step",
        exits="0 all steps are done, or it stopped early; 1 failed or killed",
    )

    @app.command(kind, help=text)
    @work_command(TrainConfig)
    def run(typed: Typed, config: ConfigOption, resume: ResumeOption = None) -> None:
        start = _snapshot_of(resume)
        words = (*typed.words("train", kind, config=config), *(("--resume", start) if start else ()))
        _train(typed, words, config, {"start.uri": start}, kind=kind, resume=None if start else resume)

    del run  # typer keeps it


for _kind in KINDS:
    _add(_kind)


def _snapshot_of(resume: str | None) -> str | None:
    """Return the snapshot that `resume` names, or None if it names a run or nothing."""
    if resume is None or resume.startswith("snapshot:"):
        return resume
    return f"snapshot:{resume}" if _SNAPSHOT_ID.fullmatch(resume) else None


def _train(
    typed: Typed,
    words: tuple[str, ...],
    config: Path,
    given: dict[str, Any],
    *,
    kind: Kind | None = None,
    resume: str | None = None,
) -> None:
    """Run the configuration. `kind` is the algorithm that the command requires, None for any."""
    settings = load_settings(TrainConfig, config, {**typed.given, **given})
    if kind is not None and settings.algorithm.kind != kind:
        raise ConfigError(
            f'{config}: algorithm.kind is "{settings.algorithm.kind}": use rollout train {settings.algorithm.kind}'
        )
    typed.shared["resume"] = resume
    typed.run(load("train"), settings, words, config)


@app.command("fork")
@work_command(TrainConfig, without=["resume"])
def fork(
    typed: Typed,
    run: RunArgument,
    step: Annotated[int, typer.Option("--step", min=1, metavar="N", help="Step at which a segment of RUN ended.")],
    config: ConfigOption,
) -> None:
    """Start another run from the state that RUN had after step N, with the settings of FILE.

    Algorithm, base model, optimiser, adapter shape and number of devices must be RUN's; the rest may differ. Steps
    count from N. With RUN's own settings the new run ends in the same bytes. RUN can be in another cluster, private or
    joined.

    Output, exit codes and --json are those of `rollout train sft`. The same command resumes.
    """
    words = typed.words("train", "fork", run, "--step", str(step), config=config)
    _train(typed, words, config, {"start.uri": f"run:{run}", "start.step": step})


@app.command("verify")
def verify(
    run: RunArgument,
    segment: Annotated[
        int, typer.Option("--segment", min=0, metavar="N", help="Segment, counted from 1; default: the last.")
    ] = 0,
    every: Annotated[bool, typer.Option("--all", help="All segments.")] = False,
    allow_different_hardware: Annotated[
        bool,
        typer.Option("--allow-different-hardware", help="Also verify on a worker with another fingerprint."),
    ] = False,
    coordinator: CoordinatorOption = None,
    tls_dir: TlsDirOption = None,
    workers: WorkersOption = None,
    json: JsonOption = False,
) -> None:
    """Execute segments of a training run again, and compare snapshots (to the byte) and metrics (except times).

    Another run in RUN's cluster starts from the newest kept snapshot before the segment, or the base model.

    Exit codes: 0 all are equal; 1 one differs or could not be executed; 2 hardware or versions differ.

    --json prints an object per line: `verifying` {run_id, verification, segments, from}, `segment` {segment,
    first_step, last_step, same, differs, committed, found, made_by, worker, failure?}, `note` {message} and `verified`
    {run_id, same, different, failed, different_hardware}. Keys are only ever added.
    """
    from rollout.cli.anywhere import places
    from rollout.cli.progress import display_for
    from rollout.workloads.train.commands.verifying import Verifying

    if every and segment:
        raise ConfigError("--segment and --all say different things: give one of them")
    display = display_for(json=json)
    where = places(coordinator, tls_dir, display.note)
    wanted = None if every else segment
    job = Verifying(
        where, run, wanted, display, workers=workers or 1, different_hardware=allow_different_hardware
    )  # fmt: skip
    raise typer.Exit(job.run())


@app.command("samples")
def samples(
    run: RunArgument,
    step: Annotated[
        int | None,
        typer.Option("--step", min=1, metavar="N", help="Step of the samples; default: the last, or all with --best."),
    ] = None,
    best: Annotated[
        int | None, typer.Option("--best", min=1, metavar="N", help="Show N samples with the highest reward.")
    ] = None,
    worst: Annotated[
        int | None, typer.Option("--worst", min=1, metavar="N", help="Show N samples with the lowest reward.")
    ] = None,
    coordinator: CoordinatorOption = None,
    tls_dir: TlsDirOption = None,
    json: JsonOption = False,
) -> None:
    """Show samples of a GRPO or PPO run with their rewards, as far as it is committed.

    --json prints an object per line, as in samples.jsonl: {step, group, number, prompt, completion, completion_ids,
    rewards, reward, advantage, policy_version, finish_reason, seed, reward_fault?}. Keys are only ever added.
    """
    from rollout.cli import show
    from rollout.cli.anywhere import work_at_run
    from rollout.cli.asking import tell
    from rollout.workloads.train.samples import sample_lines

    if best and worst:
        raise UsageError("--best and --worst say different things: give one of them")

    async def read(client: Runs, run_id: str) -> list[JsonObject]:
        from rollout.workloads.train.commands.samples import samples_of

        return await samples_of(client, run_id, step=step, best=best, worst=worst)

    for one in work_at_run(coordinator, tls_dir, run, read, tell):
        if json:
            show.print_json(one)
        else:
            typer.echo(visible("\n".join(sample_lines(one))))


@app.command("plot")
def plot(
    run: RunArgument,
    output: Annotated[
        Path, typer.Option("--output", metavar="FILE", help="File to write, of format .png, .svg or .pdf.")
    ] = Path("curves.png"),
    coordinator: CoordinatorOption = None,
    tls_dir: TlsDirOption = None,
    json: JsonOption = False,
) -> None:
    """Draw the metrics of a training run from its ledger; steps of failed segments are dashed.

    --json: `{"run_id", "file", "steps", "committed_steps"}`.
    """
    from rollout.cli import show
    from rollout.cli.anywhere import work_at_run
    from rollout.cli.asking import tell
    from rollout.model.ids import short
    from rollout.workloads.train.model_output import draw

    if not output.parent.is_dir():
        raise ConfigError(f"--output: there is no directory {output.parent}")

    async def read(client: Runs, run_id: str) -> tuple[TrainingRun, Figures]:
        from rollout.workloads.train.commands.snapshots import figures_of, training_run

        run = await training_run(client, run_id)
        return run, await figures_of(client, run)

    found, figures = work_at_run(coordinator, tls_dir, run, read, tell)
    if not draw(figures.metrics, figures.evaluations, output):
        raise ConfigError(f"run {short(found.run_id)} has no metrics yet: its first segment is not committed")
    steps, committed = figures.steps, figures.committed_steps
    if json:
        show.print_json({"run_id": found.run_id, "file": str(output), "steps": steps, "committed_steps": committed})
    else:
        left = f", {steps - committed:,} of them not committed" if committed < steps else ""
        typer.echo(f"{output}: {counted(steps, 'step')} of run {short(found.run_id)} ({found.status.spec.name}){left}")
