"""`rollout item show`: one row of a run, in full."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from rollout.cli.commands.run import RunArgument, ask
from rollout.cli.options import CoordinatorOption, JsonOption, TlsDirOption
from rollout.cli.program import new_app
from rollout.cli.references import resolve_run
from rollout.cli.rows import place_of

if TYPE_CHECKING:
    from rollout.cli.show_items import Item
    from rollout.client import Runs

app = new_app(help="Single rows of a run.")


@app.callback()
def _group() -> None: ...  # pyright: ignore[reportUnusedFunction]


@app.command("show")
def show_item(
    run: RunArgument,
    row: Annotated[
        str, typer.Argument(metavar="ROW", help="Counted from 1; a child item behind its parent: 43.2 is its second.")
    ],
    coordinator: CoordinatorOption = None,
    tls_dir: TlsDirOption = None,
    full: Annotated[bool, typer.Option("--full", help="All of input and output, however long.")] = False,
    json: JsonOption = False,
) -> None:
    """Input, output and every attempt of a row: where, when, and how it ended.

    --json: one object, `{run_id, row, id, state, attempts, worker, host, at, duration_ms, code, message, from, input,
    output, children, history: [{attempt, worker, host, began_at, ended_at, ending, code, message}]}`. `attempts` counts
    those that began; `history` has those too that were given back before they began. Keys are only ever added.
    """
    place = place_of(row)

    async def read(client: Runs) -> Item:
        from rollout.cli.show_items import read_item

        run_id = await resolve_run(client, run)
        status, reply = await client.get(run_id), await client.item(run_id, place)
        payload, result = await client.item_bytes(run_id, reply)
        return read_item(status, place, reply, payload, result)

    item = ask(coordinator, tls_dir, read)
    from rollout.cli import show, show_items

    if json:
        show.print_json(show_items.item_in_full(item))
    else:
        show_items.print_item(item, full=full)
