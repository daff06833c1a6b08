"""Work that accompanies the collecting of a run, such as sending its results to a queue."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod


class Beside(ABC):
    """Call `start`, whose task is `job` and whose error ends the command; `finish` when all results are in the files;
    `check` last; and `save` always."""

    _job: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._job = asyncio.create_task(self._run())

    @property
    def job(self) -> asyncio.Task[None]:
        """The task. Whoever awaits it gets its exception."""
        assert self._job is not None, "start() first"
        return self._job

    @abstractmethod
    async def _run(self) -> None: ...

    def flushed(self, count: int) -> None:
        """Note that `count` results are durable in the files."""
        return

    async def finish(self, count: int) -> None:
        """Do what is left, within a time limit: the files have all `count` results."""
        return

    def check(self) -> None:
        """Raise RolloutError if something is left to do."""
        return

    def save(self) -> None:
        """Save the progress, so that the next command does not repeat it. Raises StorageError. Blocking."""
        return
