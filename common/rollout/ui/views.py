"""The views: what each asks of the cluster, and the sections that show it."""

from __future__ import annotations

import asyncio
import json
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rollout.cli.commands.events import as_json
from rollout.cli.printed import Line, Reader, printed
from rollout.cli.show import description_json, run_json, worker_detail_json, worker_json
from rollout.cli.show_items import Item, item_in_full, item_json, read_item
from rollout.client import Runs
from rollout.model.errors import NotFoundError
from rollout.model.ids import short
from rollout.ui.cluster import Cluster
from rollout.ui.digests import Digests, broken
from rollout.ui.page import Page, Section, kind_of
from rollout.wire.v1 import runs_pb2
from rollout.workloads.digest import Part
from rollout.workloads.port import UNEXPECTED, Priced, Totals
from rollout.workloads.registered import find, unit_of

RUNS_MAX = 1_000
"""Maximum number of runs in a list, the newest first."""
PAGE = 50
"""Rows of a table on one page."""
_FAILURES = 200
_EVENTS = 100
_LINES = 300
_DIGITS = 16
"""Row numbers have fewer digits; the ledger has none beyond."""
_FRESH_LIST_S = 2.0
_FRESH_DETAILS_S = 600.0
"""Details depend on the input alone, and may have to load a tokenizer."""
STATES = ("running", "paused", "completed", "failed", "killed", "interrupted")
WHICH = ("all", "failed", "retried", "running", "pending")


@dataclass(frozen=True, slots=True)
class Reading:
    """The sources of all views."""

    cluster: Cluster
    digests: Digests


# ---- runs


async def runs_view(reading: Reading, *, text: str = "", state: str = "", workload: str = "", page: int = 1) -> Page:
    """List the runs whose id, name, workload or reason contains `text`."""

    async def ask(client: Runs) -> list[dict[str, Any]]:
        return [_run(status) for status in await client.list(limit=RUNS_MAX)]

    every = await reading.cluster.shared(("runs",), ask, _FRESH_LIST_S)
    found = [
        run
        for run in every
        if (not state or run["state"] == state)
        and (not workload or run["workload"] == workload)
        and (not text or text.casefold() in f"{run['run_id']} {run['name']} {run['reason']}".casefold())
    ]
    data = {**_paged("runs", found, page), "more": len(every) >= RUNS_MAX}
    filters = {
        "text": text,
        "state": state,
        "workload": workload,
        "states": STATES,
        "workloads": sorted({run["workload"] for run in every}),
    }
    return Page("Runs", [Section("filter", filters), Section("runs", data | filters)])


def _paged(name: str, rows: Sequence[dict[str, Any]], page: int) -> dict[str, Any]:
    pages = max(1, -(-len(rows) // PAGE))
    page = min(page, pages)
    return {name: rows[(page - 1) * PAGE : page * PAGE], "count": len(rows), "page": page, "pages": pages}


def _run(status: runs_pb2.RunStatus) -> dict[str, Any]:
    unit, measure = unit_of(status.spec.workload)
    workload = find(status.spec.workload)
    run = run_json(status)
    final = run["done"] + run["failed"] + run["cancelled"] + run["skipped"]
    share = 100 * final / run["submitted"] if run["submitted"] else 0.0
    return run | {
        "unit": unit,
        "measure": measure,
        "final": final,
        "share": share,
        "endless": workload is not None and workload.endless,
        "created_ms": status.created_ms,
        "ended_ms": status.ended_ms,
    }


async def run_view(reading: Reading, run_id: str) -> Page:
    """Show a run. Raises NotFoundError."""

    asked = reading.cluster.shared(("run", run_id), lambda client: client.describe(run_id, failures=_FAILURES))
    reply, events = await asyncio.gather(asked, events_of(reading, run_id, newest=10))
    status = reply.status
    config = json.loads(status.spec.config or b"{}")
    run: dict[str, Any] = _run(status) | {"cost": _cost(status, config)}
    run |= {key: value for key, value in description_json(reply).items() if key in ("on", "failures")}
    parts, read = reading.digests.parts(status, config)
    sections = [Section("run", {"run": run, "config": config})]
    if run["failures"]:
        sections.append(Section("failures", {"run": run, "groups": grouped(run["failures"])}))
    if parts and read < status.cursor and not run["ended_at"]:
        sections.append(Section("reading", {"read": read, "of": status.cursor}))
    for number, part in enumerate(parts):
        sections.append(Section(kind_of(part), {"part": part, "run": run}, str(number)))
    if run["on"]:
        sections.append(Section("workers_of_run", {"run": run}))
    sections.append(Section("events", {"events": events, "run": run, "all": False}))
    return Page(run["name"] or short(run_id), sections, [("Runs", "/")], live=not run["ended_at"])


def _cost(status: runs_pb2.RunStatus, config: dict[str, Any]) -> str:
    workload = find(status.spec.workload)
    if not isinstance(workload, Priced):
        return ""
    try:
        return workload.cost(config, Totals(done=status.done, units_in=status.units_in, units_out=status.units_out))
    except UNEXPECTED as error:
        return f"not known: {broken(error)}"


def grouped(failures: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Group failures by code and the first line of the message without numbers, the most frequent first."""
    counts: Counter[tuple[str, str]] = Counter()
    examples: dict[tuple[str, str], dict[str, Any]] = {}
    for one in failures:
        first = str(one["message"]).partition("\n")[0]
        cause = (str(one["code"]), re.sub(r"\d+", "0", first))
        counts[cause] += 1
        examples.setdefault(cause, one)
    return [examples[cause] | {"count": count} for cause, count in counts.most_common()]


async def events_of(reading: Reading, run_id: str = "", *, newest: int = _EVENTS) -> list[dict[str, Any]]:
    """Return events, the newest first."""
    reply = await reading.cluster.shared(
        ("events", run_id, newest), lambda client: client.events(run_id, newest=newest)
    )
    told = [as_json(event) | {"at_ms": event.at_ms} for event in reversed(reply.events)]
    return [event for event in told if event["message"]]


async def events_view(reading: Reading, run_id: str = "") -> Page:
    events = await events_of(reading, run_id)
    trail = [("Runs", "/"), (short(run_id), f"/runs/{run_id}")] if run_id else []
    return Page("Events", [Section("events", {"events": events, "run": None, "all": True})], trail)


# ---- rows


async def items_view(
    reading: Reading, run_id: str, *, which: str = "all", start: int = 0, parent: tuple[int, ...] = ()
) -> Page:
    """List rows from seq `start` on, of the run or of a row's children. Raises NotFoundError."""

    async def ask(client: Runs) -> runs_pb2.ItemsReply:
        found = runs_pb2.ItemsReply(end=True, next_seq=start)
        async for page in client.items(run_id, which, parent=parent, from_seq=start, limit=PAGE):
            found.items.extend(page.items)
            found.hosts.update(page.hosts)
            found.end, found.next_seq = page.end, page.next_seq
        return found

    status = await status_of(reading, run_id)
    page = await reading.cluster.shared(("items", run_id, which, parent, start), ask)
    hosts = dict(page.hosts)
    rows = [item_json(item, parent, hosts) | {"place": [*parent, item.seq], "at_ms": item.at_ms} for item in page.items]
    data = {
        "rows": rows,
        "which": which,
        "kinds": WHICH,
        "run_id": run_id,
        "parent": ".".join(str(seq + 1) for seq in parent),
        "start": start,
        "next": None if page.end else page.next_seq,
        "of": status.submitted,
    }
    trail = [("Runs", "/"), (status.spec.name or short(run_id), f"/runs/{run_id}")]
    return Page("Rows", [Section("items", data)], trail)


async def item_view(reading: Reading, run_id: str, place: tuple[int, ...]) -> Page:
    """Show a row. Raises NotFoundError."""

    async def ask(client: Runs) -> tuple[Item, Sequence[Part]]:
        status, reply = await client.get(run_id), await client.item(run_id, place)
        payload, result = await client.item_bytes(run_id, reply)
        item = read_item(status, place, reply, payload, result)
        return item, item.parts(None, result) if reply.has_result else ()

    async def ask_details(client: Runs) -> Sequence[Part]:
        return await asyncio.to_thread(found.parts, found.payload, None)

    status = await status_of(reading, run_id)
    found, parts = await reading.cluster.shared(("item", run_id, place), ask)
    item = item_in_full(found)
    parts = [*await reading.cluster.shared(("details", run_id, place), ask_details, _FRESH_DETAILS_S), *parts]
    trail = [
        ("Runs", "/"),
        (status.spec.name or short(run_id), f"/runs/{run_id}"),
        ("Rows", f"/runs/{run_id}/items"),
    ]
    ended = item["state"] in ("done", "failed", "cancelled", "skipped")
    sections = [Section("item", {"item": item, "run_id": run_id})]
    sections += [
        Section(kind_of(part), {"part": part, "run": {"run_id": run_id}}, str(n)) for n, part in enumerate(parts)
    ]
    sections.append(Section("attempts", {"item": item, "run_id": run_id}))
    return Page(f"Row {item['row']}", sections, trail, live=not ended)


async def status_of(reading: Reading, run_id: str) -> runs_pb2.RunStatus:
    return await reading.cluster.shared(("status", run_id), lambda client: client.get(run_id))


async def output_view(reading: Reading, run_id: str) -> Page:
    """Show the newest lines that processes of the run printed. Raises NotFoundError."""

    async def ask(client: Runs) -> list[Line]:
        lines: list[Line] = []
        async for line in printed(client, run_id, Reader(), follow=False):
            lines.append(line)
            del lines[:-_LINES]
        return lines

    status = await status_of(reading, run_id)
    lines = await reading.cluster.shared(("output", run_id), ask)
    trail = [("Runs", "/"), (status.spec.name or short(run_id), f"/runs/{run_id}")]
    data = {"lines": lines, "most": _LINES}
    return Page("Output", [Section("output", data)], trail, live=not status.ended_ms)


# ---- workers


async def workers_view(reading: Reading, *, everyone: bool = False, page: int = 1) -> Page:
    async def ask(client: Runs) -> tuple[list[dict[str, Any]], str]:
        reply = await client.workers(all=everyone)
        return [worker_json(one) for one in reply.workers if everyone or one.state != "gone"], reply.leader

    workers, leader = await reading.cluster.shared(("workers", everyone), ask, _FRESH_LIST_S)
    data = {**_paged("workers", workers, page), "leader": leader, "everyone": everyone}
    return Page("Workers", [Section("workers", data)])


async def worker_view(reading: Reading, incarnation: str) -> Page:
    """Show a worker. Raises NotFoundError."""
    found = await reading.cluster.shared(("worker", incarnation), lambda client: client.worker(incarnation))
    worker = worker_detail_json(found)
    return Page(f"Worker {short(incarnation)}", [Section("worker", {"worker": worker})], [("Workers", "/workers")])


def place_from(text: str) -> tuple[int, ...]:
    """Parse `43.2` to (42, 1). Raises NotFoundError if it is not a row."""
    parts = text.split(".")
    if not all(part.isascii() and part.isdecimal() and len(part) < _DIGITS and int(part) for part in parts):
        raise NotFoundError(f"{text[:40]!r} is no row: rows count from 1")
    return tuple(int(part) - 1 for part in parts)
