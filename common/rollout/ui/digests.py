"""Digests of the runs being viewed, fed from their commit logs."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

import structlog

from rollout.cli.show import figures_of
from rollout.client import Runs
from rollout.model.errors import RolloutError
from rollout.ui.cluster import Cluster
from rollout.wire.v1 import runs_pb2 as pb
from rollout.workloads.digest import Digest, Part, Text
from rollout.workloads.json_form import JsonObject
from rollout.workloads.port import UNEXPECTED
from rollout.workloads.registered import find

log = structlog.get_logger()
_RUNS = 16
"""Maximum number of digests in memory: one of a job with 100,000 trials takes about 50 MiB."""
_IDLE_S = 60.0
_AGAIN_S = 2.0


@dataclass(slots=True)
class _Followed:
    digest: Digest | None
    task: asyncio.Task[None] | None = None
    broken: str = ""
    """Why part of it is missing: its configuration, or a result, does not belong to this workload."""
    cursor: int = 0
    looked: float = 0.0
    """Time of the last view by the loop's clock."""


class Digests:
    """Digests by run. Call `close` at the end."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._followed: OrderedDict[str, _Followed] = OrderedDict()

    async def close(self) -> None:
        tasks = [task for one in self._followed.values() if (task := _stop(one)) is not None]
        await asyncio.gather(*tasks, return_exceptions=True)

    def parts(self, status: pb.RunStatus, config: JsonObject) -> tuple[Sequence[Part], int]:
        """Return the parts of a run read so far, and the number of commit log entries they cover."""
        now = asyncio.get_running_loop().time()
        run_id = status.spec.run_id
        followed = self._followed.get(run_id)
        if followed is None:
            followed = _begun(status, config)
            if followed is None:
                return (), 0
            self._followed[run_id] = followed
        followed.looked = now
        if (followed.task is None or followed.task.done()) and followed.cursor < status.cursor and not followed.broken:
            followed.task = asyncio.create_task(self._follow(run_id, followed))
        self._followed.move_to_end(run_id)
        while len(self._followed) > _RUNS:
            _stop(self._followed.popitem(last=False)[1])
        parts: list[Part] = []
        if followed.digest is not None:
            try:
                parts += followed.digest.parts(figures_of(status))
            except UNEXPECTED as error:
                followed.broken = broken(error)
        if followed.broken:
            parts.append(Text("Results", f"Not all of them are shown: {followed.broken}"))
        return parts, followed.cursor

    def read(self, run_id: str) -> int:
        """Return the number of commit log entries that the run's digest covers."""
        return self._followed[run_id].cursor if run_id in self._followed else 0

    def is_read(self, status: pb.RunStatus) -> bool:
        """Return whether the digest covers everything that `status` reports."""
        followed = self._followed.get(status.spec.run_id)
        return followed is None or bool(followed.broken) or followed.cursor >= status.cursor

    async def _follow(self, run_id: str, followed: _Followed) -> None:
        """Follow the run until it has ended or has no viewers; what was read is kept."""
        while True:
            try:
                await self._cluster.ask(lambda client: self._read(client, run_id, followed))
                return
            except RolloutError as error:
                log.debug("results_not_read", run_id=run_id, error=error.message)
                await asyncio.sleep(_AGAIN_S)

    async def _read(self, client: Runs, run_id: str, followed: _Followed) -> None:
        loop = asyncio.get_running_loop()
        async for page in client.watch(run_id, followed.cursor, payloads=True):
            for entry in page.entries:
                if followed.digest is not None:
                    try:
                        followed.digest.add(entry)
                    except UNEXPECTED as error:
                        followed.broken = broken(error)
                        log.warning("result_not_shown", run_id=run_id, error=followed.broken)
                        return
                followed.cursor += 1
            read = page.status is not None and followed.cursor >= page.status.cursor
            if page.last or (read and (self._cluster.at_rest or loop.time() - followed.looked > _IDLE_S)):
                return


def broken(error: Exception) -> str:
    """Return, in words, why a workload cannot read its data."""
    return error.message if isinstance(error, RolloutError) else f"{type(error).__name__}: {error}"


def _begun(status: pb.RunStatus, config: JsonObject) -> _Followed | None:
    """Start a digest. Returns None if its workload has none, or is not installed here."""
    workload = find(status.spec.workload)
    try:
        digest = workload.digest(config) if workload is not None else None
    except UNEXPECTED as error:
        return _Followed(None, broken=broken(error))
    return None if digest is None else _Followed(digest)


def _stop(followed: _Followed) -> asyncio.Task[None] | None:
    if followed.task is not None:
        followed.task.cancel()
    return followed.task
