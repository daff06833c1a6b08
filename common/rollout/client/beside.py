"""What goes on beside the collecting of a run, such as sending its results to a queue as well."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod


class Beside(ABC):
    """`start`, and `job` is its task, whose error ends the command; `finish` when all results are in the files; `check`
    last; `save` always."""

    _job: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._job = asyncio.create_task(self._run())

    @property
    def job(self) -> asyncio.Task[None]:
        """What it raises is for whoever awaits it."""
        assert self._job is not None, "start() first"
        return self._job

    @abstractmethod
    async def _run(self) -> None: ...

    def flushed(self, count: int) -> None:
        """The files have `count` results for good."""
        return

    async def finish(self, count: int) -> None:
        """They have `count`, and will have no more: do what is left, within a time."""
        return

    def check(self) -> None:
        """RolloutError: something is left to do."""
        return

    def save(self) -> None:
        """What was done is not done again by the next command. Blocking. StorageError."""
        return
