"""Items of a run and their attempts, for people and for programs.

The JSON of an item: `row, id, state` (pending, assigned, running, accepted, done, failed, cancelled, skipped),
`attempts` (that began), `worker, host, at` (when it ended, or since when it runs), `duration_ms, code, message`.

`item show` adds `run_id, from` (file:line), `input, output, children` (`{count, final}`, or null) and `history`, in
order: `[{attempt, worker, host, began_at, ended_at, ending, code, message}]`. Bytes, not text: `{"base64": ...}`. A
workload may add keys, such as `rendered` of an infer row (`Workload.item_parts`).

Keys are added over time, never renamed or removed. `row` is a number, or a text such as `43.2` for the second child of
row 43.
"""

from __future__ import annotations

import base64
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.text import Text

from rollout.cli.show import console, fields, row_of, table, timestamp
from rollout.cli.words import counted, first_line, took, when
from rollout.config.visible import visible
from rollout.model.ids import short
from rollout.wire.v1 import runs_pb2 as pb
from rollout.workloads.carrying import CARRIED
from rollout.workloads.digest import Part
from rollout.workloads.digest import Text as TextPart
from rollout.workloads.json_form import JsonObject
from rollout.workloads.port import UNEXPECTED
from rollout.workloads.registered import find

CUT = 2000
_HEADS = ("row", "state", "tries", "when", "took", "worker", "cause")
_TIME, _WORKER = len("14:03:07"), 8
_CAUSE_MIN = 8
"""Minimum width of a cause; less would tell nothing."""
_ENDED = {
    "done": "its result was taken",
    "failed": "it failed",
    "timeout": "it took too long",
    "worker_lost": "its worker was lost",
    "released": "it was given back",
    "revoked": "it went to an idle worker before it began",
    "paused": "it stopped for a pause",
    "dropped": "what it stood on changed",
    "running": "it is running",
    "assigned": "it waits at its worker",
}


def item_json(
    item: pb.ItemStatus, parent: Sequence[int] = (), hosts: Mapping[str, str] | None = None
) -> dict[str, Any]:
    return {
        "row": row_of([*parent, item.seq]) if parent else item.seq + 1,
        "id": item.id.hex(),
        "state": item.state,
        "attempts": item.attempts,
        "worker": item.worker,
        "host": (hosts or {}).get(item.worker, ""),
        "at": timestamp(item.at_ms),
        "duration_ms": item.duration_ms,
        "code": item.code,
        "message": item.message,
    }


class ItemLines:
    """Rows of a table with fixed column widths, so that pages can follow each other endlessly.

    On a terminal a cause takes the rest of its line; `item show` has all of it.
    """

    def __init__(self, parent: Sequence[int] = ()) -> None:
        self._parent = parent
        self._begun = False
        self._line = console().width if sys.stdout.isatty() else None
        self._widths = (0, 0)

    def add(self, page: pb.ItemsReply) -> None:
        for item in page.items:
            if not self._begun:
                self._begun = True
                hosts = max((len(host) for host in page.hosts.values()), default=0)
                times = max(len(when(one.at_ms)) for one in page.items)
                self._widths = (max(_TIME, times), max(_WORKER, _WORKER + 1 + hosts if hosts else 0))
                self._write(*_HEADS)
            cause = f"{item.code}: {first_line(item.message)}" if item.code else ""
            worker = f"{short(item.worker)} {page.hosts.get(item.worker, '')}"
            ended = item.state not in ("pending", "assigned", "running")
            row = row_of([*self._parent, item.seq])
            lasted = took(item.duration_ms) if ended and item.worker else ""
            self._write(row, item.state, str(item.attempts), when(item.at_ms), lasted, worker, cause)
        sys.stdout.flush()

    def _write(self, row: str, state: str, tries: str, at: str, lasted: str, worker: str, cause: str) -> None:
        time, who = self._widths
        line = f"{row:>7}  {state:<8}  {tries:>5}  {at:<{time}}  {lasted:>7}  {worker:<{who}}  {cause}".rstrip()
        if self._line and len(line) > self._line > len(line) - len(cause) + _CAUSE_MIN:
            line = line[: self._line - 1] + "…"
        sys.stdout.write(visible(line).replace("\n", "\\n") + "\n")  # a row is a line, whatever its worker calls itself


@dataclass(frozen=True, slots=True)
class Item:
    """One item in full. `input` and `output` are as in JSON; `output` is None if there is none yet."""

    status: pb.RunStatus
    place: Sequence[int]
    reply: pb.ItemReply
    payload: bytes
    input: Any
    origin: str
    output: Any

    def parts(self, payload: bytes | None, result: bytes | None) -> Sequence[Part]:
        """Return what its workload adds. Blocking; call it outside an event loop."""
        workload = find(self.status.spec.workload) if len(self.place) == 1 else None
        try:
            return () if workload is None else workload.item_parts(json.loads(self.status.spec.config), payload, result)
        except UNEXPECTED:
            return ()


def read_item(status: pb.RunStatus, place: Sequence[int], reply: pb.ItemReply, payload: bytes, result: bytes) -> Item:
    """Return the item with its bytes as the workload decodes them; those of children may be another executor's."""
    workload = find(status.spec.workload) if len(place) == 1 else None
    given, origin, output = None, "", None
    try:
        given, origin = workload.item_input(payload) if workload is not None else (json.loads(payload), "")
    except UNEXPECTED:
        given = _raw(payload)
    if reply.has_result and reply.item.state in ("done", "accepted"):
        try:
            output = workload.item_output(result) if workload is not None else json.loads(result)
        except UNEXPECTED:
            output = _raw(result)
    return Item(status, place, reply, payload, given, origin, output)


def carried_note(status: pb.RunStatus) -> str:
    """Return which rows a run carries over from another that it extends or retries; empty for other runs."""
    config: JsonObject = json.loads(status.spec.config or b"{}")
    if not config.get(CARRIED):
        return ""
    run, before = short(status.spec.run_id), short(config[CARRIED]["run_id"])
    return (
        f"note: run {run} has only the rows that it ran itself, counted from 1: {counted(status.submitted, 'row')}; "
        f"those that it took over are in run {before}"
    )


def _raw(data: bytes) -> Any:
    try:
        return data.decode()
    except UnicodeDecodeError:
        return {"base64": base64.b64encode(data).decode()}


def item_in_full(item: Item, parts: Sequence[Part] = ()) -> dict[str, Any]:
    reply = item.reply
    hosts = {one.worker: one.host for one in reply.attempts}
    return {
        "run_id": item.status.spec.run_id,
        **item_json(reply.item, item.place[:-1], hosts),
        "from": item.origin,
        "input": item.input,
        "output": item.output,
        "children": {"count": reply.children, "final": reply.children_final} if reply.children else None,
        "history": [fields(one, "attempt worker host began_at ended_at ending code message") for one in reply.attempts],
        **{one.key: one.value for one in parts if isinstance(one, TextPart) and one.key},
    }


def print_item(item: Item, parts: Sequence[Part] = (), *, full: bool) -> None:
    out, reply = console(), item.reply
    state, row = reply.item, row_of(item.place)
    origin = f" ({item.origin})" if item.origin else ""
    tries = f", {counted(state.attempts, 'attempt')}" if state.attempts else ""
    out.print(Text(f"row {row} of run {short(item.status.spec.run_id)}{origin}: {state.state}{tries}"), soft_wrap=True)
    _block("input", _shown(item.input), full=full)
    for one in (one for one in parts if isinstance(one, TextPart)):
        _block(one.title, one.text, full=full)
    if item.output is not None:
        _block("output", _shown(item.output), full=full)
    elif state.code:
        _block(f"no result: {state.code}", state.message, full=full)
    if reply.children:
        done = f"{reply.children_final:,} of {counted(reply.children, 'child item')} are final"
        out.print(
            Text(f"\n{done}: rollout run items {short(item.status.spec.run_id)} --children-of {row}"), soft_wrap=True
        )
    if reply.attempts:
        out.print(Text("\nattempts", style="bold"))
        out.print(_history(reply.attempts))


def _block(title: str, text: str, *, full: bool) -> None:
    out = console()
    out.print(Text(f"\n{title}", style="bold"))
    cut = text if full or len(text) <= CUT else text[:CUT]
    out.print(Text(visible(cut)), soft_wrap=True)
    if len(cut) < len(text):
        out.print(Text(f"... {len(text) - len(cut):,} characters more: --full shows them"))


def _shown(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, indent=2)


def _history(attempts: Sequence[pb.AttemptStatus]) -> Any:
    found = table("#", "worker", "host", "began", "ended", "took", "how it ended")
    for one in attempts:
        lasted = took(max(0, one.ended_ms - one.began_ms)) if one.began_ms and one.ended_ms else ""
        how = _ENDED.get(one.ending, one.ending)
        if one.ending == "released" and not one.began_ms:
            how += " before it began"
        why = f": {one.code}: {first_line(one.message)}" if one.code and one.ending != "done" else ""
        began = when(one.began_ms) or "never" if one.ended_ms else when(one.began_ms)
        found.add_row(str(one.attempt), short(one.worker), one.host, began, when(one.ended_ms), lasted, Text(how + why))
    return found
