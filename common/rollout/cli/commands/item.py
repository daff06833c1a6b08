"""`rollout item`: one row of a run in full, and how to cancel it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from rollout.cli.commands.run import ReasonOption, RunArgument, ask
from rollout.cli.options import CoordinatorOption, JsonOption, TlsDirOption
from rollout.cli.program import new_app
from rollout.cli.references import resolve_run
from rollout.cli.rows import place_of
from rollout.model.ids import short

if TYPE_CHECKING:
    from rollout.cli.show_items import Item
    from rollout.client import Runs
    from rollout.wire.v1 import runs_pb2 as pb

app = new_app(help="Show or cancel a row of a run.")


@app.callback()
def _group() -> None: ...  # pyright: ignore[reportUnusedFunction]


RowArgument = Annotated[
    str, typer.Argument(metavar="ROW", help="The row, counted from 1, or its child item, such as 43.2.")
]


@app.command("show")
def show_item(
    run: RunArgument,
    row: RowArgument,
    coordinator: CoordinatorOption = None,
    tls_dir: TlsDirOption = None,
    full: Annotated[bool, typer.Option("--full", help="Show input and output in full.")] = False,
    json: JsonOption = False,
) -> None:
    """Show a row's input, output and attempts: where, when and how each ended.

    --json: one object, `{run_id, row, id, state, attempts, worker, host, at, duration_ms, code, message, from, input,
    output, children, history: [{attempt, worker, host, began_at, ended_at, ending, code, message}]}`. `attempts` counts
    those that began; `history` has all. Keys are only ever added.

    A row of `rollout infer` also has `rendered: {prompts: [{tokens, text}], limit, why}`, its prompt as the model reads
    it, if the tokenizer is on this host.
    """
    place = place_of(row)

    async def read(client: Runs) -> Item:
        from rollout.cli.show_items import carried_note, read_item

        run_id = await resolve_run(client, run)
        status = await client.get(run_id)
        if note := carried_note(status):
            typer.echo(note, err=True)
        reply = await client.item(run_id, place)
        payload, result = await client.item_bytes(run_id, reply)
        return read_item(status, place, reply, payload, result)

    item = ask(coordinator, tls_dir, read)
    from rollout.cli import show, show_items

    parts = item.parts(item.payload, None)
    if json:
        show.print_json(show_items.item_in_full(item, parts))
    else:
        show_items.print_item(item, parts, full=full)


@app.command("cancel")
def cancel_item(
    run: RunArgument,
    row: RowArgument,
    coordinator: CoordinatorOption = None,
    tls_dir: TlsDirOption = None,
    reason: ReasonOption = "",
    json: JsonOption = False,
) -> None:
    """End one row without a result, such as one that hangs; the others continue.

    Running work of the row stops, and its late results are rejected. errors.jsonl has it with code `cancelled`. --json:
    the item as in `run items --json`.
    """
    place = place_of(row)

    async def order(client: Runs) -> tuple[str, pb.ItemReply]:
        run_id = await resolve_run(client, run)
        return run_id, await client.cancel_item(run_id, place, reason=reason)

    run_id, reply = ask(coordinator, tls_dir, order)
    from rollout.cli import show, show_items

    if json:
        hosts = {one.worker: one.host for one in reply.attempts}
        show.print_json({"run_id": run_id, **show_items.item_json(reply.item, place[:-1], hosts)})
    else:
        typer.echo(f"row {row} of run {short(run_id)}: {reply.item.message}")
