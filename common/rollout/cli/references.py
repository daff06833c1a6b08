"""References to runs and workers: a whole id, a unique part of one, a name, or `@last`.

Ids made in succession begin alike and differ at the end, so users are shown the end (`short`). A reference may be the
beginning of the whole id or of what is shown.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from rollout.cli.options import same_cluster
from rollout.client.recent import recent_runs
from rollout.model.errors import ConfigError, NotFoundError
from rollout.model.ids import SHORT, is_ulid, means, short
from rollout.workloads.port import ABOUT

if TYPE_CHECKING:
    from rollout.client import Runs
    from rollout.wire.v1 import runs_pb2 as pb

LAST = "@last"
_SHOWN = 10
_NEWEST = 50

__all__ = ["LAST", "means", "resolve_run", "resolve_worker", "short"]


async def resolve_run(client: Runs, text: str) -> str:
    """Return the id of the run for `text`: an id or a unique part of one, a name (the newest run that has it), or
    `@last`.

    Raises NotFoundError, or ConfigError with the candidates if several match.
    """
    if is_ulid(text.upper()):
        return text.upper()
    if text == LAST:
        return await _last(client)
    if text.startswith("@") or not text:
        raise NotFoundError(
            f"{text!r} stands for no run: give an id or short id, a unique beginning of one, a name, or {LAST}; "
            f"{same_cluster('rollout run list')} lists the runs"
        )
    found = await client.find(text)
    named = [run for run in found if run.name == text]
    by_id = [run for run in found if means(run.run_id, text)]
    if not found:
        raise NotFoundError(
            f"there is no run {text!r}: it is no run's id, short id or name, nor the beginning of an id; "
            f"{same_cluster('rollout run list')} lists the runs"
        )
    if named and all(run in named for run in by_id):
        if len(named) > 1:
            _tell(f"note: {len(named)} runs are named {text!r}; this is about the newest, {short(named[0].run_id)}")
        return named[0].run_id
    if len(by_id) == 1 and not named:
        return by_id[0].run_id
    raise ConfigError(
        f"{text!r} may be any of {_count(found, 20)} runs: give the short id or the id of the one that is meant\n"
        + _lines(
            f"{'short id':<{SHORT}}  {'id':<26}  {'state':<11}  name",
            (f"{short(run.run_id)}  {run.run_id}  {run.state:<11}  {run.name or run.workload}" for run in found),
        )
    )


async def _last(client: Runs) -> str:
    """Return the run that was last submitted from here if the cluster knows it, else the newest."""
    submitted = recent_runs()
    for run_id in submitted:
        try:
            await client.get(run_id)
        except NotFoundError:
            continue  # of another cluster, or deleted
        return run_id
    newest = next((run for run in await client.list(limit=_NEWEST) if not _reports_on_other(run)), None)
    if newest is None:
        raise NotFoundError(f"{LAST}: this cluster has no run")
    run_id = newest.spec.run_id
    here = (
        f"none of the last {len(submitted)} runs submitted from here is"
        if submitted
        else "no run submitted from here is"
    )
    _tell(f"note: {here} of this cluster; {LAST} is its newest, {short(run_id)}")
    return run_id


def _reports_on_other(run: pb.RunStatus) -> bool:
    return bool(json.loads(run.spec.config or "{}").get(ABOUT))


async def resolve_worker(client: Runs, text: str) -> str:
    """Return the id of the worker for `text`: an id, a unique part of one, or the host where it runs alone.

    Connected workers take precedence. Raises NotFoundError, or ConfigError with the candidates if several match.
    """
    if is_ulid(text.upper()):
        return text.upper()
    known = (await client.workers(all=True)).workers if text else ()
    meant = [worker for worker in known if means(worker.incarnation, text) or worker.inventory.host == text]
    there = [worker for worker in meant if worker.state not in ("gone", "failed")]
    candidates = there or meant
    if not candidates:
        raise NotFoundError(
            f"there is no worker {text!r}: it is no worker's id, short id or host; "
            f"{same_cluster('rollout workers --all')} lists them, those that are gone too"
        )
    if len(candidates) > 1:
        raise ConfigError(
            f"{text!r} may be any of {len(candidates)} workers: give the short id or the id of the one that is meant\n"
            + _lines(
                f"{'short id':<{SHORT}}  {'id':<26}  {'state':<8}  host",
                (f"{short(w.incarnation)}  {w.incarnation}  {w.state:<8}  {w.inventory.host}" for w in candidates),
            )
        )
    return candidates[0].incarnation


def _lines(heading: str, all_of_them: Iterable[str]) -> str:
    lines = list(all_of_them)
    more = [f"  and {len(lines) - _SHOWN} more"] if len(lines) > _SHOWN else []
    return "\n".join([f"  {heading}", *(f"  {line}" for line in lines[:_SHOWN]), *more])


def _count(found: Sequence[pb.FoundRun], limit: int) -> str:
    return f"{len(found)}{' or more' if len(found) >= limit else ''}"


def _tell(text: str) -> None:
    sys.stderr.write(text + "\n")
