"""`rollout train`: each algorithm with a configuration file; and what is done with their runs."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rollout.cli.commands.run import RunArgument
from rollout.cli.commands.standard import HELP
from rollout.cli.options import (
    CoordinatorOption,
    JsonLinesOption,
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

app = typer.Typer(no_args_is_help=True, rich_markup_mode=None)

_SNAPSHOT_ID = re.compile(r"[0-9a-f]{64}")
_WHAT: dict[Kind, str] = {
    "sft": "Supervised fine-tuning on texts, conversations or answers.",
    "rm": "A reward model from pairs of a better and a worse answer.",
    "dpo": "Direct preference optimisation on pairs.",
    "ipo": "Identity preference optimisation on pairs.",
    "kto": "Kahneman-Tversky optimisation on answers marked good or bad.",
    "grpo": "Group relative policy optimisation on samples and their rewards.",
    "ppo": "Proximal policy optimisation with a value model.",
}
ConfigOption = Annotated[Path, typer.Option("--config", metavar="FILE", help="The run's configuration (TOML).")]
ResumeOption = Annotated[
    str | None,
    typer.Option(
        "--resume",
        metavar="RUN|snapshot:ID",
        help="Go on with this run: its id, a unique beginning of it, its name, or @last (default: the one in "
        "<output.dir>/run-id). snapshot:ID: start a new run that goes on from this snapshot, wherever it is.",
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
        exits="0 all steps are done, or the run stopped early by its own rule; 1 it failed or was killed",
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
    """snapshot:ID where that is meant; None: it names a run, or nothing."""
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
    """`kind`: what the command says that the file is of; None: whatever it is of."""
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
    step: Annotated[int, typer.Option("--step", min=1, metavar="N", help="A step at which a segment of RUN ended.")],
    config: ConfigOption,
) -> None:
    """Start another run with the state that RUN had after step N.

    Its settings are those of FILE. Data, learning rate, schedule, seed, number of steps and the like may be others than
    those of RUN; algorithm, base model, kind of optimiser, shape of the adapter and number of devices may not. Steps
    are counted on from N. With RUN's own settings the new run ends in the same bytes as RUN. RUN may be in another
    cluster than the new one: a private one of this machine, or the one that was joined; its snapshot is brought along.

    Output, exit codes and --json are those of `rollout train sft`. The same command goes on where it was.
    """
    words = typed.words("train", "fork", run, "--step", str(step), config=config)
    _train(typed, words, config, {"start.uri": f"run:{run}", "start.step": step})


@app.command("verify")
def verify(
    run: RunArgument,
    segment: Annotated[
        int, typer.Option("--segment", min=0, metavar="N", help="This one, counted from 1. Default: the last.")
    ] = 0,
    every: Annotated[bool, typer.Option("--all", help="Every segment.")] = False,
    allow_different_hardware: Annotated[
        bool,
        typer.Option(
            "--allow-different-hardware", help="Also where the worker's fingerprint is another than the run's."
        ),
    ] = False,
    coordinator: CoordinatorOption = None,
    tls_dir: TlsDirOption = None,
    workers: WorkersOption = None,
    json: JsonLinesOption = False,
) -> None:
    """Execute segments of a training run again, and compare.

    In fresh processes, and with what was committed. It begins at the newest snapshot before the segment that is kept,
    or at the base model, and goes through what is between. Equal are the snapshot, to the byte, and the metrics but for
    the time they took. It runs in the cluster of RUN, as a run of its own; a private cluster is started again for it.

    Exit codes: 0 all are equal; 1 one differs, or could not be executed; 2 the worker's hardware or versions are others
    than the run's.

    --json prints an object a line: `verifying` {run_id, verification, segments, from}, `segment` {segment, first_step,
    last_step, same, differs, committed, found, made_by, worker, failure?}, `note` {message} and `verified` {run_id,
    same, different, failed, different_hardware}. Keys are only ever added.
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
        typer.Option("--step", min=1, metavar="N", help="Of this step. Default: the last one, or all with --best."),
    ] = None,
    best: Annotated[
        int | None, typer.Option("--best", min=1, metavar="N", help="So many, of the highest reward first.")
    ] = None,
    worst: Annotated[
        int | None, typer.Option("--worst", min=1, metavar="N", help="So many, of the lowest reward first.")
    ] = None,
    coordinator: CoordinatorOption = None,
    tls_dir: TlsDirOption = None,
    json: JsonLinesOption = False,
) -> None:
    """Show samples of a GRPO or PPO run with their rewards, so far.

    Samples are read from the ledger, as the segments of the run are committed: `samples.jsonl` has the same.

    --json prints an object a line, as in samples.jsonl: {step, group, number, prompt, completion, completion_ids,
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
        Path, typer.Option("--output", metavar="FILE", help="Its ending says the format: .png, .svg or .pdf.")
    ] = Path("curves.png"),
    coordinator: CoordinatorOption = None,
    tls_dir: TlsDirOption = None,
    json: JsonOption = False,
) -> None:
    """Draw the metrics of a training run, so far, from its ledger.

    Steps of a segment that failed are dashed: no snapshot holds them, and they show what went wrong.

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
