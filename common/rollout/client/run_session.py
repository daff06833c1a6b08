"""One run at its cluster, from its opening to its end: the same for every command, for the SDK and for a server."""

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
    """The result of `work`, which is cancelled when one of `others` fails before: that error is raised then."""
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
    """`failure`: of the cluster's own processes, where this one started them; it ends what is waited for. It is also
    what a writer asks beside the commit log (`rollout.workloads.port.Ledger`)."""

    def __init__(self, runs: Runs, run_id: str, failure: asyncio.Future[None] | None = None) -> None:
        self.runs = runs
        self.run_id = run_id
        self.failure = failure
        self.submitted = 0
        """Items that are durable."""

    async def remember(self, target: Target, directory: Path, name: str) -> None:
        """Later commands find the run: it is of `directory`, and at `target`."""
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
        """The number of items, once all are durable; `settle` hears of those that are. As `Runs.submit`."""

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
        """As `Runs.watch`. What ended `beside` is raised, if that fails."""
        async with aclosing(self.runs.watch(self.run_id, cursor, payloads=payloads, status_only=status_only)) as pages:
            while (page := await unless(anext(pages, None), beside, self.failure)) is not None:
                yield page

    async def log(self, cursor: int, end: int) -> AsyncGenerator[list[CommitEntry], None]:
        """The commit log from `cursor` up to `end`, with payloads: what is committed later is not waited for."""
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
        """What the run is like, as that changes, and whether it has ended with that."""
        async with aclosing(self.watch(status_only=True, beside=beside)) as pages:
            async for page in pages:
                if page.status is not None:
                    yield page.status, page.last

    async def pause(self, reason: str) -> None:
        """Nothing more of it is started. Nothing happens where it has ended, or is paused."""
        with suppress(StateError):
            await self.runs.command(self.run_id, "pause", reason=reason, own=True)

    async def kill(self, reason: str) -> None:
        """Nothing happens where it has ended."""
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
