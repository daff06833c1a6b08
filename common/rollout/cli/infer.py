"""`rollout infer ...`: batch inference."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rollout.cli.options import CoordinatorOption, TlsDirOption

app = typer.Typer(no_args_is_help=True)


@app.callback()
def _group() -> None:  # pyright: ignore[reportUnusedFunction]
    """Batch inference over JSONL: resumable, every row exactly once, in input order."""


@app.command("batch")
def batch(
    config: Annotated[Path, typer.Option("--config", metavar="FILE", help="The batch's configuration (TOML).")],
    coordinator: CoordinatorOption = None,
    tls_dir: TlsDirOption = None,
    resume: Annotated[
        str | None,
        typer.Option(
            "--resume", metavar="RUN_ID", help="Go on with this run. Default: the one in <output.dir>/run-id."
        ),
    ] = None,
    workers: Annotated[
        int | None, typer.Option("--workers", min=1, max=1024, help="Instead of workers.count in the file.")
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check configuration and every input row, then stop.")
    ] = False,
    detach: Annotated[
        bool, typer.Option("--detach", help="Submit all rows and leave; the same command collects later.")
    ] = False,
    json: Annotated[
        bool, typer.Option("--json", help="Progress and summary as JSON lines on standard output.")
    ] = False,
) -> None:
    """Run every row of the input through a model, exactly once, and write completions in input order.

    With no coordinator named (option, ROLLOUT_COORDINATOR, ./rollout.toml) it starts a coordinator and workers on this
    machine for as long as it runs. Interrupt or kill it at any time: the same command goes on where it was.

    Exit codes: 0 every row has its result, failed rows included (they are in errors.jsonl); 1 the run failed or was
    killed, or every row failed; 2 configuration or input; 130 interrupted.

    --json prints an object a line, told apart by `event`: `run_opened` {run_id, resumed, rows, address}, `progress`
    {rows, submitted, done, failed, committed, running, workers, rows_per_s, tokens_per_s, eta_s}, `note` {message},
    `dry_run` {model, rows, workers}, `interrupted` {run_id, committed, command}, `summary` {the content of
    summary.json, and files} and `error` {error: {code, message}}. Keys are only ever added.
    """
    from rollout.cli.batch import BatchOptions, run_batch

    options = BatchOptions(config, list(coordinator or []), tls_dir, resume, workers, dry_run, detach, json)
    raise typer.Exit(run_batch(options))
