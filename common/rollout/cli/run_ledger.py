"""What a writer asks of the cluster of a run, beside its commit log: `rollout.workloads.port.Ledger`."""

from __future__ import annotations

from pathlib import Path

from rollout.client.runs import Runs
from rollout.model.errors import NotFoundError
from rollout.wire.v1 import runs_pb2 as pb
from rollout.workloads.port import FailedTry

_LOST = "worker_lost"
_FAILED_TRIES = ("failed", "timeout", _LOST)


class RunLedger:
    def __init__(self, runs: Runs, run_id: str) -> None:
        self._runs = runs
        self._run_id = run_id

    async def fetch(self, object_id: bytes, path: Path) -> None:
        await self._runs.download(self._run_id, object_id, path)

    async def failed_tries(self, seq: int) -> list[FailedTry]:
        reply = await self._runs.item(self._run_id, [seq])
        failed = [one for one in reply.attempts if one.ending in _FAILED_TRIES and one.began_ms]
        if reply.item.state == "failed":
            failed = failed[:-1]  # that ended it
        return [
            FailedTry(
                one.attempt,
                one.code or one.ending,
                one.message,
                await self._evidence(one),
                one.worker,
                one.began_ms,
                one.ended_ms,
                one.ending == _LOST,
            )
            for one in failed
        ]

    async def _evidence(self, attempt: pb.AttemptStatus) -> bytes:
        try:
            (data,) = await self._runs.attempt_bytes(self._run_id, [attempt])
        except NotFoundError:
            return b""
        return data
