"""The backend of `[cloud] provider` where its metadata service answers, else the local one: found out when asked."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Protocol

import structlog

from rollout.compute.local import LocalCompute
from rollout.compute.port import Compute, Host, Preemption

log = structlog.get_logger()

TRIES, PAUSE_S = 3, 1.0
"""On a machine of that cloud by its firmware, where the service may be up later than this worker."""
_VENDORS = ("Amazon EC2", "Google")


class CloudCompute(Compute, Protocol):
    async def why_silent(self) -> str: ...


class AutoCompute:
    def __init__(self, there: CloudCompute, here: LocalCompute, root: Path = Path("/")) -> None:
        self._there = there
        self._here = here
        self._root = root
        self._chosen: Compute | None = None

    async def _choose(self) -> Compute:
        if self._chosen is None:
            tries = TRIES if _in_cloud(self._root) else 1
            why = await self._there.why_silent()
            while why and (tries := tries - 1) > 0:
                await asyncio.sleep(PAUSE_S)
                why = await self._there.why_silent()
            self._chosen = self._there
            if why:
                self._chosen = self._here
                tell = log.warning if _in_cloud(self._root) else log.debug
                tell("compute_is_local", why=why)
        return self._chosen

    async def inventory(self) -> Host:
        return await (await self._choose()).inventory()

    async def preemption(self) -> Preemption:
        return await (await self._choose()).preemption()

    async def close(self) -> None:
        await self._there.close()
        await self._here.close()


def _in_cloud(root: Path) -> bool:
    try:
        vendor = (root / "sys/class/dmi/id/sys_vendor").read_text(errors="replace")
    except OSError:
        return False
    return vendor.startswith(_VENDORS)
