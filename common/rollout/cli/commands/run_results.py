"""`rollout run results`: the files of a run, from its ledger."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rollout.cli.commands.run import RunArgument, ask
from rollout.cli.options import CoordinatorOption, JsonLinesOption, TlsDirOption
from rollout.cli.progress import display_for
from rollout.cli.references import resolve_run

if TYPE_CHECKING:
    from rollout.client import Runs


def results(
    run: RunArgument,
    output: Annotated[Path, typer.Option("--output", metavar="DIR", help="Directory that the files go to.")],
    options: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="KEY=VALUE",
            help="A key of [output] as the run's configuration file may have it, such as openai=false; repeatable.",
        ),
    ] = None,
    coordinator: CoordinatorOption = None,
    tls_dir: TlsDirOption = None,
    json: JsonLinesOption = False,
) -> None:
    """Write the files of any run, as the command that made it would: results, errors.jsonl, summary.json.

    The input need not be here. Of a run that goes on: what is committed so far; the same command again goes on where
    it stopped. The directory is the run's from then on: with its configuration and input, the command that made the run
    goes on there too.

    Exit codes: 0 the run is completed and every row of it is in the files; 1 rows are missing, since the run goes on,
    failed or was killed; 2 configuration or usage.

    --json prints an object a line: `note` {message} and `summary` {the content of summary.json, complete, files}. Keys
    are only ever added.
    """
    display = display_for(json=json)

    async def fetch(client: Runs) -> int:
        from rollout.cli.results import ResultsOf

        run_id = await resolve_run(client, run)
        return await ResultsOf(client, run_id, output, display, options or []).write()

    try:
        code = ask(coordinator, tls_dir, fetch, patience_s=60.0)
    finally:
        display.close()
    raise typer.Exit(code)
