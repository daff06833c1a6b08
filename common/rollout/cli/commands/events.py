"""`rollout events`: what happened, in sentences."""

from __future__ import annotations

import asyncio
import json as json_module
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Protocol

import typer

from rollout.cli.asking import tell_all_is_said
from rollout.cli.commands.run import ask
from rollout.cli.completion import complete_run
from rollout.cli.options import CoordinatorOption, JsonOption, TlsDirOption
from rollout.cli.references import resolve_run
from rollout.cli.streams import json_line
from rollout.config.sentences import marked, sentence_of
from rollout.config.visible import visible
from rollout.workloads.json_form import timestamp

if TYPE_CHECKING:
    from rollout.client import Runs
    from rollout.wire.v1 import history_pb2 as pb

NEWEST = 200
EVERY_S = 1.0
FOLLOW_PATIENCE_S = 30.0
"""Seconds to wait for the coordinator; a change of leaders takes less."""

OptionalRun = Annotated[
    str,
    typer.Argument(
        metavar="[RUN]",
        help="Only events of this RUN and of the cluster during it.",
        autocompletion=complete_run,
    ),
]
FollowOption = Annotated[bool, typer.Option("--follow", "-f", help="Print new lines until the run ends.")]


def events(
    run: OptionalRun = "",
    coordinator: CoordinatorOption = None,
    tls_dir: TlsDirOption = None,
    follow: FollowOption = False,
    limit: Annotated[int, typer.Option("--limit", min=0, max=500, help="Newest events to show; 0: all.")] = NEWEST,
    json: JsonOption = False,
) -> None:
    """List events: workers that join, fail and leave, leaders, steals, states of runs, commands.

    They include the first failed row of each cause, 20 per run. A cluster keeps its newest 10,000 events, and 1,000 of
    each run.

    --json: an object per line, `{time, event, level, run_id?, worker_id?, message, fields}`. Keys are only ever added.
    """

    seen = Seen()

    async def show(client: Runs, *, follow: bool) -> None:
        run_id = await resolve_run(client, run) if run else ""
        async for event in happened(client, run_id, seen, follow=follow, limit=limit):
            told = as_json(event)
            if json:
                sys.stdout.write(json_line(told))
            elif told["message"]:
                sys.stdout.write(f"{moment(event.at_ms)}  {visible(marked(told['message'], event.level))}\n")
            sys.stdout.flush()

    follow_or_ask(coordinator, tls_dir, show, follow=follow)


class Following(Protocol):
    """Function that prints what there is, or with `follow` all that comes. A second call continues where the first
    ended."""

    async def __call__(self, client: Runs, *, follow: bool) -> None: ...


def follow_or_ask(coordinator: list[str] | None, tls_dir: Path | None, show: Following, *, follow: bool) -> None:
    patience_s = FOLLOW_PATIENCE_S if follow else 15.0

    async def at_rest(client: Runs, state: Path) -> None:
        await show(client, follow=False)
        tell_all_is_said()

    question = partial(show, follow=follow)
    ask(coordinator, tls_dir, question, patience_s=patience_s, at_rest=at_rest if follow else None)


@dataclass(slots=True)
class Seen:
    """Position in the events. `after` is the number of the last event shown, or 0."""

    after: int = 0


async def happened(
    client: Runs, run_id: str, seen: Seen, *, follow: bool, limit: int
) -> AsyncIterator[pb.HappenedEvent]:
    """Yield events in order after `seen`; with `follow`, until the run has ended and all are read."""
    if seen.after:
        reply, limit = await client.events(run_id, after=seen.after), 0
    else:
        reply = await client.events(run_id, newest=limit)
    ending = False
    while True:
        for event in reply.events:
            seen.after = event.number
            yield event
        if reply.end or limit:
            if not follow or ending:
                return
            ending = reply.run_ended  # once more: what it ended with is written a moment later
            await asyncio.sleep(EVERY_S)
        limit = 0
        reply = await client.events(run_id, after=seen.after)


def as_json(event: pb.HappenedEvent) -> dict[str, Any]:
    fields: dict[str, Any] = json_module.loads(event.fields)
    message = sentence_of(event.event, fields)
    told: dict[str, Any] = {"time": timestamp(event.at_ms), "event": event.event, "level": event.level}
    if "run_id" in fields:
        told["run_id"] = fields["run_id"]
    if "worker" in fields:
        told["worker_id"] = fields["worker"]
    known = message if message is not None else f"{event.event} {event.fields.decode()}"
    return told | {"message": known, "fields": fields}


def moment(unix_ms: int) -> str:
    """Return the local time, with the date unless it is today's."""
    local = datetime.fromtimestamp(unix_ms / 1000)
    return local.strftime("%H:%M:%S" if local.date() == datetime.now().date() else "%Y-%m-%d %H:%M:%S")
