"""A run at its cluster, from its opening to its end: shared by all commands, the SDK and servers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable
from contextlib import aclosing, suppress
from pathlib import Path
from typing import Any, TypeVar

from rollout.client.origin import keep_origin
from rollout.client.private import PrivateRun, remember_private_run
from rollout.client.recent import remember_run
from rollout.client.runs import Page, Runs
from rollout.client.target import Target
from rollout.model.errors import NotFoundError, StateError
from rollout.model.item import NewItem
from rollout.model.run import RunSpec
from rollout.wire.v1 import runs_pb2 as pb
from rollout.workloads.commit import CommitEntry
from rollout.workloads.port import FailedTry

T = TypeVar("T")
_LOST = "worker_lost"
_FAILED_TRIES = ("failed", "timeout", _LOST)


async def unless(work: Awaitable[T], *others: asyncio.Future[Any] | None) -> T:
    """Return the result of `work`. If one of `others` fails first, cancel `work` and raise that error."""
    task = asyncio.ensure_future(work)
    watched = {one for one in others if one is not None}
    try:
        while not task.done():
            await asyncio.wait({task, *watched}, return_when=asyncio.FIRST_COMPLETED)
            for one in [one for one in watched if one.done()]:
                watched.discard(one)
                if not one.cancelled():
                    one.result()
        return task.result()
    finally:
        if not task.done():
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


class RunSession:
    """`failure` is that of the cluster's own processes, if this process started them; it ends all waiting. A writer
    uses the session for access besides the commit log (`rollout.workloads.port.Ledger`)."""

    def __init__(self, runs: Runs, run_id: str, failure: asyncio.Future[None] | None = None) -> None:
        self.runs = runs
        self.run_id = run_id
        self.failure = failure
        self.submitted = 0
        """Number of durable items."""

    async def remember(self, target: Target, directory: Path, name: str) -> None:
        """Record for later commands that the run belongs to `directory` and is at `target`."""
        if target.private is None:
            keep_origin(directory, self.run_id, target, self.runs.addresses)
        await asyncio.to_thread(remember_run, self.run_id)
        if target.private is not None:
            state = target.private.resolve()
            await asyncio.to_thread(remember_private_run, PrivateRun(self.run_id, name, state))

    async def submit(
        self,
        spec: RunSpec,
        items: Callable[[int], Iterable[NewItem | None]],
        settle: Callable[[int], None] = lambda durable: None,
    ) -> int:
        """Submit all items, and return their number once they are durable; `settle` is called as they become so. Raises
        the errors of `Runs.submit`."""

        def durable(count: int) -> None:
            self.submitted = max(self.submitted, count)
            settle(count)

        count = await self.runs.submit(spec, items, progress=durable)
        self.submitted = max(self.submitted, count)
        return count

    async def watch(
        self,
        cursor: int = 0,
        *,
        payloads: bool = False,
        status_only: bool = False,
        beside: asyncio.Future[Any] | None = None,
    ) -> AsyncGenerator[Page, None]:
        """Watch the run as `Runs.watch` does. Raises the error of `beside`, if that fails."""
        async with aclosing(self.runs.watch(self.run_id, cursor, payloads=payloads, status_only=status_only)) as pages:
            while (page := await unless(anext(pages, None), beside, self.failure)) is not None:
                yield page

    async def log(self, cursor: int, end: int) -> AsyncGenerator[list[CommitEntry], None]:
        """Yield the commit log from `cursor` up to `end`, with payloads, without waiting for later commits."""
        if cursor >= end:
            return
        async with aclosing(self.watch(cursor, payloads=True)) as pages:
            async for page in pages:
                entries = [entry for entry in page.entries if entry.position < end]
                if entries:
                    yield entries
                    cursor = entries[-1].position + 1
                if cursor >= end:
                    return

    async def statuses(self, beside: asyncio.Future[Any] | None = None) -> AsyncGenerator[tuple[pb.RunStatus, bool]]:
        """Yield the run's status as it changes, and whether it has ended."""
        async with aclosing(self.watch(status_only=True, beside=beside)) as pages:
            async for page in pages:
                if page.status is not None:
                    yield page.status, page.last

    async def pause(self, reason: str) -> None:
        """Pause the run, so that nothing more starts. Has no effect if it has ended or is paused."""
        with suppress(StateError):
            await self.runs.command(self.run_id, "pause", reason=reason, own=True)

    async def kill(self, reason: str) -> None:
        """Kill the run. Has no effect if it has ended."""
        with suppress(StateError):
            await self.runs.command(self.run_id, "kill", reason=reason, own=True)

    # ---- what a writer asks

    async def fetch(self, object_id: bytes, path: Path) -> None:
        await self.runs.download(self.run_id, object_id, path)

    async def failed_tries(self, seq: int) -> list[FailedTry]:
        reply = await self.runs.item(self.run_id, [seq])
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
            (data,) = await self.runs.attempt_bytes(self.run_id, [attempt])
        except NotFoundError:
            return b""
        return data
