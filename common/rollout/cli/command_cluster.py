"""Cluster of a command that works: a named one, or its own for as long as it runs."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager

from rollout.cli.waits import Waits
from rollout.cli.work import Work
from rollout.client.embedded import Embedded
from rollout.client.private import remember_command, state_of
from rollout.client.runs import Runs
from rollout.client.target import Target, connected
from rollout.workloads.port import cloud_of


class CommandCluster:
    """`prepared`, and `reached` within. Its own has as many workers as `work` says, with several `engines` at once
    each."""

    def __init__(self, work: Work, *, engines: int = 1) -> None:
        self.target = work.target
        self.is_own = work.is_private
        self.had_ledger = False
        """Whether the ledger of the command's own cluster existed before."""
        self._work = work
        self._display = work.display
        self._engines = engines
        self._waits = Waits(self._display.note)
        if not self.is_own:
            self._waits = Waits(self._display.note, work.target.asked, self.tell)
        self._embedded: Embedded | None = None
        self._runs: Runs | None = None

    @property
    def failure(self) -> asyncio.Future[None] | None:
        """Future that is done when the command's own processes cannot continue."""
        return self._embedded.failure if self._embedded is not None else None

    @property
    def address(self) -> str:
        """Address of the coordinator that answers; empty before the cluster was reached."""
        return self._runs.address if self._runs is not None else ""

    @property
    def addresses(self) -> Sequence[str]:
        """Addresses of all coordinators once the cluster was reached; empty for the command's own, which does not
        outlive it."""
        return self._runs.addresses if self._runs is not None and not self.is_own else ()

    def tell(self) -> None:
        """Say which cluster is used, and why. A named one that has not answered yet is announced when it does."""
        target = self.target
        self._display.event(
            "cluster",
            f"using {target}",
            cluster=target.cluster,
            addresses=target.addresses,
            private=str(target.private) if target.private is not None else None,
            why=target.why,
        )
        self._waits = Waits(self._display.note)

    @asynccontextmanager
    async def prepared(self, tidies: Callable[[], bool] = lambda: False) -> AsyncGenerator[None]:
        """Start the command's own processes, which load their modules and wait for `reached`; end them afterwards.

        `tidies` says whether what nobody needs any more is deleted then.
        """
        if self.target.private is None:
            yield
            return
        work = self._work
        embedded = self._embedded = Embedded(
            self.target.private,
            workers=work.options.workers or work.workload.workers(work.settings),
            report=self._display.note,
            engines=self._engines,
            executors=work.workload.executors,
            cloud=cloud_of(work.settings),
        )
        try:
            await embedded.prepare()
            yield
        finally:
            await asyncio.shield(embedded.stop())
            if tidies():
                await asyncio.to_thread(embedded.tidy)

    @asynccontextmanager
    async def reached(self, patience_s: float, command: str = "", slots: int = 1) -> AsyncGenerator[Runs]:
        """Yield a client of the cluster.

        `command` continues the work; the command's own cluster records it. `slots` is the number for each of its own
        workers.
        """
        target, embedded = self.target, self._embedded
        if embedded is not None and target.private is not None:
            if not embedded.address:
                self._display.step("starting a coordinator and workers on this machine")
                embedded.slots = slots
                self.had_ledger = state_of(target.private) is not None
                if command:
                    remember_command(target.private, command)
                await embedded.start()
            target = Target([embedded.address], embedded.tls_dir, "rollout", explicit=True)
        waits = self._waits
        async with connected(
            target, patience_s=patience_s, on_trouble=waits.trouble, on_answer=waits.answered
        ) as self._runs:
            yield self._runs

    def kill(self) -> None:
        """Kill the command's own processes at once."""
        if self._embedded is not None:
            self._embedded.kill()
