"""`rollout run results`: writes the files of a run from its ledger."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rollout.cli.commands.run import RunArgument, ask
from rollout.cli.options import CoordinatorOption, JsonOption, TlsDirOption
from rollout.cli.progress import display_for
from rollout.cli.references import resolve_run

if TYPE_CHECKING:
    from rollout.client import Runs


def results(
    run: RunArgument,
    output: Annotated[Path, typer.Option("--output", metavar="DIR", help="Directory to write.")],
    options: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="KEY=VALUE",
            help="Override a key of [output], such as openai=false; repeatable.",
        ),
    ] = None,
    coordinator: CoordinatorOption = None,
    tls_dir: TlsDirOption = None,
    json: JsonOption = False,
) -> None:
    """Write the files of any run as its own command would: results, errors.jsonl, summary.json.

    It needs no input. For a running run it writes what is committed; the same command continues, and the run's own
    command can.

    Exit codes: 0 the run is complete and all rows are written; 1 rows are missing; 2 configuration or usage.

    --json prints an object per line: `note` {message} and `summary` {the content of summary.json, complete, files}.
    Keys are only ever added.
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
