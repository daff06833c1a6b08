"""Two executors as a third party would bring them: `warm` runs in slots, `cold` in one engine. For test_executors.py.

A payload says in JSON what an item does: `effects` is a file that gets a line when it begins, `until` a file that it
waits for, `ask` the executor and the payloads of its children. The result is what the executor was told of the run, and
what its children returned.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, ClassVar, Literal

from blake3 import blake3
from rollout.model.item import ItemSpec, NewItem
from rollout_worker.executors.port import Attempt, Context, Done, Run


class Warm:
    placement: ClassVar[Literal["engine", "slot"]] = "slot"
    concurrency = 4

    @classmethod
    def engine_key(cls, run: Run) -> str:
        return cls.__name__

    @classmethod
    def environment(cls, run: Run) -> dict[str, str]:
        return {}

    async def start(self, run: Run, context: Context) -> None: ...

    async def close(self) -> None: ...

    async def run(self, attempt: Attempt, context: Context) -> Done:
        does: dict[str, Any] = json.loads(attempt.payload)
        with Path(does["effects"]).open("a") as file:
            file.write(f"{type(self).__name__.lower()} {os.getppid()}\n")
        while not Path(does.get("until", "/")).exists():  # noqa: ASYNC110 - another process makes the file
            await asyncio.sleep(0.02)
        executor, payloads = does.get("ask", ("", []))
        answers = [answer async for answer in self._ask(executor, payloads, attempt, context)] if payloads else []
        return Done(json.dumps({"told": attempt.run.config, "answers": answers}).encode())

    async def _ask(self, executor: str, payloads: list[Any], attempt: Attempt, context: Context) -> AsyncIterator[Any]:
        spec = ItemSpec(executor=executor, retry_backoff_ms=100)
        await context.spawn(
            [
                NewItem(blake3(b"%s %d" % (attempt.id, n)).digest(), json.dumps(payload).encode(), spec)
                for n, payload in enumerate(payloads)
            ]
        )
        async for child in context.children():
            yield child.failure.code if child.failure else json.loads(child.data)


class Cold(Warm):
    placement: ClassVar[Literal["engine", "slot"]] = "engine"
