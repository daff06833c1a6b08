"""Restores trial directories that someone changed or deleted, from what the cluster keeps of them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path

from rollout.workloads.job.placing import Placed, place
from rollout.workloads.job.result_files import PLACED
from rollout.workloads.port import Fetch


async def mend(fetch: Fetch, job: Path, tell: Callable[[str], None]) -> list[str]:
    """Check every file of every trial in `job`, and return the directories that were restored."""
    made: list[str] = []
    for placed in await asyncio.to_thread(_read, job):
        if not await asyncio.to_thread(placed.differs, job):
            continue
        again, why = await place(job, placed.directory, placed.parts, fetch)
        if why:
            tell(f"warning: {why}")
        if again.files == placed.files:
            made.append(str(job / placed.directory))
    return made


def _read(job: Path) -> list[Placed]:
    try:
        lines = (job / PLACED).read_bytes().splitlines()
    except FileNotFoundError:
        return []
    return [Placed.from_json(json.loads(line)) for line in lines]
