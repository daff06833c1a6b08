"""Runs tests of frameworks that take a command per batch (`Framework.command`), and reads the outcome."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from uuid import uuid4

from rollout.workloads.test.cases import Batch, Outcome, Try
from rollout.workloads.test.frames import Kept
from rollout.workloads.test.frameworks.port import Ended, Framework
from rollout.workloads.test.run_config import GroupConfig

from rollout_worker.testing.host import Doing
from rollout_worker.testing.place import Place, Stream, TestProcess

GRACE_S = 10.0
"""Seconds by which our limit is later than the framework's own, which can say where a test hung."""


class CommandHost:
    """Runs one batch at a time like a `Host`: a test that ends or hangs its command costs only itself."""

    def __init__(self, place: Place, framework: Framework, group: str, config: GroupConfig) -> None:
        self._place = place
        self._framework = framework
        self._group = group
        self._config = config
        self._turn = asyncio.Lock()

    async def run(
        self,
        ids: Sequence[str],
        limit_s: float,
        doing: Callable[[Doing], None],
        tries: dict[str, Try],
        *,
        last: bool = False,
    ) -> None:
        """Add a try for each test to `tries`. Cancellation ends the command. `last` says that no process stays."""
        async with self._turn:
            now = Doing(len(ids))
            parts = [list(ids)]
            while parts:
                part = parts.pop(0)
                now.id, now.began, now.done = part[0], time.monotonic(), len(tries)
                doing(now)
                began = time.time()
                made, ended = await self._run(part, limit_s)
                tries.update(made)
                left = [one for one in part if one not in tries]
                if left and len(part) == 1:
                    tries[part[0]] = _lost(ended, began)
                elif left and ended.code is None:  # one of these hangs
                    half = (len(left) + 1) // 2
                    parts[:0] = [left[:half], left[half:]] if half < len(left) else [left]
                elif left:
                    parts[:0] = [left] if made else [[one] for one in left]
            now.id, now.done = "", len(tries)
            doing(now)

    async def _run(self, ids: Sequence[str], limit_s: float) -> tuple[dict[str, Try], Ended]:
        batch = Batch(group=self._group, ids=tuple(ids), limit_s=limit_s)
        said: dict[Stream, Kept] = {"stdout": Kept(), "stderr": Kept()}
        async with self._place.directory() as directory:
            command = self._framework.command(batch, self._config, directory.name)
            began = time.time()
            try:
                process = await self._place.start(command.words, lambda stream, data: said[stream].add(data))
            except OSError as error:
                why = f"{command.words[0]} cannot be run: {error.strerror or error}"
                return {one: Try(outcome=Outcome.ERROR, message=why, started=began) for one in ids}, Ended(1)
            process.close_input()
            code = await _code(process, command.limit_s)
            ended = Ended(code, said["stdout"].text(), said["stderr"].text())
            files = await directory.bring()
            found = await asyncio.to_thread(self._framework.results, batch, self._config, files, ended)
        name = uuid4().hex[:8]
        tries = {one.id: one.tries[-1] for one in found.cases}
        for id, made in tries.items():
            tries[id] = made.model_copy(update={"process": name, "started": made.started or began})
        return tries, ended

    async def close(self) -> str:
        return ""


async def _code(process: TestProcess, limit_s: float) -> int | None:
    """Return the exit code, or None if the process was ended at its time limit."""
    waiting = asyncio.create_task(process.wait())
    try:
        done, _ = await asyncio.wait([waiting], timeout=limit_s + GRACE_S if limit_s else None)
    except asyncio.CancelledError:
        await process.kill()
        raise
    if not done:
        await process.kill()
    await waiting
    return process.code if done else None


def _lost(ended: Ended, began: float) -> Try:
    if ended.code is None:
        outcome, message = Outcome.TIMEOUT, "the test command was ended at its time limit"
    else:
        outcome = Outcome.CRASHED if ended.code < 0 else Outcome.ERROR
        message = f"the test command ended with {ended.code}, and with no result of this test"
    return Try(
        outcome=outcome,
        seconds=max(time.time() - began, 0.0),
        started=began,
        message=message,
        stdout=ended.stdout,
        stderr=ended.stderr,
        process=uuid4().hex[:8],
    )
