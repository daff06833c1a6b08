"""Chooses the backend of `[cloud] provider` if its metadata service responds, else the local one."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Protocol

import structlog

from rollout.compute.local import LocalCompute
from rollout.compute.port import Compute, Host, Preemption
from rollout.compute.watching import PAUSE_S, TRIES
from rollout.model.errors import ConfigError

log = structlog.get_logger()

_VENDORS = {"ec2": "Amazon EC2", "gce": "Google"}
"""Vendor names in the firmware, by backend."""


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
            tries = TRIES if in_cloud(self._root) else 1
            why = await self._there.why_silent()
            while why and (tries := tries - 1) > 0:
                await asyncio.sleep(PAUSE_S)
                why = await self._there.why_silent()
            self._chosen = self._there
            if why:
                self._chosen = self._here
                tell = log.warning if in_cloud(self._root) else log.debug
                tell("compute_is_local", why=why)
        return self._chosen

    async def inventory(self) -> Host:
        """Return the host, without the cloud's labels if its service responded once and then fails: notices may still
        arrive."""
        chosen = await self._choose()
        try:
            return await chosen.inventory()
        except ConfigError as error:
            if chosen is self._here:
                raise
            log.warning("compute_has_no_labels", error=error.message)
            return await self._here.inventory()

    async def preemption(self) -> Preemption:
        return await (await self._choose()).preemption()

    async def close(self) -> None:
        await self._there.close()
        await self._here.close()


def in_cloud(root: Path = Path("/"), backend: str = "") -> bool:
    """Return whether the firmware, which containers can read too, is that of the cloud `backend`, or of any if it is
    ""."""
    try:
        vendor = (root / "sys/class/dmi/id/sys_vendor").read_text(errors="replace")
    except OSError:
        return False
    return vendor.startswith(_VENDORS[backend] if backend else tuple(_VENDORS.values()))
