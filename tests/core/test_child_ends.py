"""The end of an attempt in a child process: what it left is removed, and its result is told."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from rollout.model.item import Key
from rollout_worker.executors.port import Done
from rollout_worker.processes.context import AttemptContext
from rollout_worker.processes.runner import Runner


async def test_a_scratch_of_any_depth_is_removed(tmp_path: Path) -> None:
    requests: Any = SimpleNamespace()
    context = AttemptContext(requests, tmp_path / "scratch", None, lambda _: None)
    fd = os.open(context.scratch, os.O_RDONLY)
    for _ in range(1500):
        os.mkdir("d", dir_fd=fd)
        inner = os.open("d", os.O_RDONLY, dir_fd=fd)
        os.close(fd)
        fd = inner
    os.close(fd)
    await context.close()
    assert list(tmp_path.iterdir()) == []


async def test_a_fault_in_cleaning_up_costs_no_result() -> None:
    async def run(attempt: Any, context: Any) -> Done:
        return Done(b"result")

    async def close() -> None:
        raise RecursionError("as any code may")

    runner: Any = Runner(0)
    context: Any = SimpleNamespace(close=close)
    attempt = SimpleNamespace(key=Key(1, 0), payload=b"", attempt=1)
    runner._executor = SimpleNamespace(run=run)
    runner._tasks[attempt.key] = runner._contexts[attempt.key] = context
    runner._flush_due = True  # there is nobody to send it to
    await runner._attempt(attempt, context)
    assert [one.data for one in runner._finished] == [b"result"]
