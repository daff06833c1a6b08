"""`rollout run items`: the rows of a run and the state of each."""

from __future__ import annotations

import sys
from contextlib import aclosing
from typing import TYPE_CHECKING, Annotated

import typer

from rollout.cli.commands.run import RunArgument, ask
from rollout.cli.options import CoordinatorOption, JsonOption, TlsDirOption
from rollout.cli.references import resolve_run
from rollout.cli.rows import place_of
from rollout.model.errors import ConfigError

if TYPE_CHECKING:
    from rollout.client import Runs

LIMIT = 100


def items(
    run: RunArgument,
    coordinator: CoordinatorOption = None,
    tls_dir: TlsDirOption = None,
    failed: Annotated[bool, typer.Option("--failed", help="Only rows that failed finally.")] = False,
    running: Annotated[bool, typer.Option("--running", help="Only rows that a worker runs now.")] = False,
    retried: Annotated[bool, typer.Option("--retried", help="Only rows with an unsuccessful attempt.")] = False,
    pending: Annotated[bool, typer.Option("--pending", help="Only rows that no worker has.")] = False,
    children_of: Annotated[
        str, typer.Option("--children-of", metavar="ROW", help="Only child items of this row or child (43.2).")
    ] = "",
    start: Annotated[int, typer.Option("--from", metavar="ROW", min=1, help="First row.")] = 1,
    limit: Annotated[int, typer.Option("--limit", min=0, help="Maximum number of rows; 0: all.")] = LIMIT,
    json: JsonOption = False,
) -> None:
    """List the rows of a run in order: state, attempts, worker, times and causes.

    --json: an object per line, `{row, id, state, attempts, worker, host, at, duration_ms, code, message}`. `attempts`
    counts those that began. Keys are only ever added.
    """
    chosen = {"failed": failed, "running": running, "retried": retried, "pending": pending}
    named = [which for which, wanted in chosen.items() if wanted]
    if len(named) > 1:
        raise ConfigError(f"--{named[0]} and --{named[1]}: choose one of them")
    parent = place_of(children_of) if children_of else []

    async def show(client: Runs) -> bool:
        from rollout.cli.show import print_json
        from rollout.cli.show_items import ItemLines, item_json

        lines, shown, more = ItemLines(parent), 0, False
        run_id = await resolve_run(client, run)
        pages = client.items(run_id, named[0] if named else "all", parent=parent, from_seq=start - 1, limit=limit)
        async with aclosing(pages):
            async for page in pages:
                if json:
                    for item in page.items:
                        print_json(item_json(item, parent, page.hosts))
                else:
                    lines.add(page)
                shown, more = shown + len(page.items), not page.end
        if not shown and not json:
            typer.echo(f"no {named[0]} rows" if named else "no rows")
        return more

    if ask(coordinator, tls_dir, show):
        sys.stderr.write(f"there may be more than these {limit}: --limit N shows more, --limit 0 every one\n")
