"""`rollout train`: sft, rm, dpo, ipo and kto, each with a configuration file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rollout.cli.commands.standard import HELP
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
from rollout.workloads.registered import load
from rollout.workloads.train.config import KINDS, Kind

app = typer.Typer(no_args_is_help=True, rich_markup_mode=None)

_WHAT: dict[Kind, str] = {
    "sft": "Supervised fine-tuning on texts, conversations or answers.",
    "rm": "A reward model from pairs of a better and a worse answer.",
    "dpo": "Direct preference optimisation on pairs.",
    "ipo": "Identity preference optimisation on pairs.",
    "kto": "Kahneman-Tversky optimisation on answers that are marked good or bad.",
}


@app.callback(help="Train a model, with snapshots that resume to the byte.")
def group() -> None: ...


def _add(kind: Kind) -> None:
    text = HELP.format(details=_WHAT[kind], unit="segments", rates="segments_per_s, tokens_per_s")

    @app.command(kind, help=text)
    def run(
        config: Annotated[Path, typer.Option("--config", metavar="FILE", help="The run's configuration (TOML).")],
        name: NameOption = "",
        coordinator: CoordinatorOption = None,
        tls_dir: TlsDirOption = None,
        resume: ResumeOption = None,
        workers: WorkersOption = None,
        allow_different_hardware: Annotated[
            bool,
            typer.Option(
                "--allow-different-hardware",
                help="Go on where the same input would not give the same bytes; summary.json says from which step on.",
            ),
        ] = False,
        dry_run: DryRunOption = False,
        detach: DetachOption = False,
        json: JsonLinesOption = False,
    ) -> None:
        from rollout.cli.session import Options, run_workload  # brings grpc

        workload = load("train")
        settings = load_settings(
            workload.settings,
            config,
            {"workers.count": workers, "run.allow_different_hardware": allow_different_hardware or None},
        )
        if settings.algorithm.kind != kind:
            raise ConfigError(
                f'{config}: algorithm.kind is "{settings.algorithm.kind}": use rollout train {settings.algorithm.kind}'
            )
        options = Options(
            words=("rollout", "train", kind, "--config", str(config)),
            name=name,
            coordinators=tuple(coordinator or ()),
            tls_dir=tls_dir,
            resume=resume,
            workers=workers,
            dry_run=dry_run,
            detach=detach,
            json=json,
        )
        with located(config, workload.settings):
            raise typer.Exit(run_workload(workload, settings, options))

    del run  # typer keeps it


for _kind in KINDS:
    _add(_kind)
