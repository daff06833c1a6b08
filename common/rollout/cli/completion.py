"""Shell completion of runs and workers: asks the cluster, takes about a second at most, and never fails."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from rollout.cli.boundary import begin_logging
from rollout.cli.options import chosen
from rollout.cli.references import LAST, means, short
from rollout.model.errors import RolloutError

if TYPE_CHECKING:
    from rollout.client import Runs

PATIENCE_S = 1.0
RUNS_MAX = 100
Offer = tuple[str, str]
"""Completion: the word, and its description."""


def complete_run(context: typer.Context, incomplete: str) -> list[Offer]:
    """Complete a run by name or id, newest first."""

    async def ask(client: Runs) -> list[Offer]:
        newest = await client.list(limit=RUNS_MAX)
        known = {status.spec.run_id: (status.spec.name, str(status.state)) for status in newest}
        for run in await client.find(incomplete, complete=True, limit=RUNS_MAX) if incomplete else ():
            known.setdefault(run.run_id, (run.name, run.state))
        offers: list[Offer] = []
        names: set[str] = set()
        for run_id, (name, state) in known.items():
            about = f"{state} {name}".rstrip()
            if name and name not in names and name.startswith(incomplete):
                names.add(name)
                offers.append((name, f"{state} {short(run_id)}"))
            elif typed := _typed(run_id, incomplete):
                offers.append((typed, about))
        return offers

    offers = _asked(context, ask)
    return [(LAST, "the last run submitted from here"), *offers] if LAST.startswith(incomplete) else offers


def complete_worker(context: typer.Context, incomplete: str) -> list[Offer]:
    """Complete the id of a connected worker."""

    async def ask(client: Runs) -> list[Offer]:
        workers = (await client.workers()).workers
        return list(_offers(((w.incarnation, f"{w.state} {w.inventory.host}") for w in workers), incomplete))

    return _asked(context, ask)


def _offers(known: Iterable[tuple[str, str]], incomplete: str) -> Iterator[Offer]:
    for identifier, about in known:
        if typed := _typed(identifier, incomplete):
            yield typed, about


def _typed(identifier: str, incomplete: str) -> str:
    """Return the part of an id that continues `incomplete`, or an empty string."""
    if not means(identifier, incomplete):
        return ""
    shown = short(identifier)
    found = shown if shown.startswith(incomplete.upper()) else identifier
    return incomplete + found[len(incomplete) :]


def _asked(context: typer.Context, question: Callable[[Runs], Awaitable[list[Offer]]]) -> list[Offer]:
    from rollout.client.target import connected, need_target, owned  # a shell completes other words without

    async def asking() -> list[Offer]:
        async with asyncio.timeout(PATIENCE_S), connected(target, patience_s=PATIENCE_S) as client:
            return await question(client)

    begin_logging()
    given: dict[str, Any] = context.params
    tls_dir = given.get("tls_dir")
    with suppress(RolloutError, OSError, TimeoutError):
        target = need_target(given.get("coordinator"), Path(tls_dir) if tls_dir else None, chosen().selector)
        if target.private is not None:
            target = owned(target)
        return asyncio.run(asking())
    return []
