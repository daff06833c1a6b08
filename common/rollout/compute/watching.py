"""Shared parts of the watchers for notices."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping
from typing import Any, TypeVar

from rollout.compute.port import Gpu, Host, Preemption
from rollout.model.errors import UnavailableError

TRIES, PAUSE_S = 3, 1.0
"""Tries on a cloud machine, whose metadata service may start later than this worker, or throttle."""

T = TypeVar("T")


async def tried(ask: Callable[[], Awaitable[T]]) -> T:
    """Ask with retries. Raises the last UnavailableError after `TRIES`."""
    for _ in range(TRIES - 1):
        try:
            return await ask()
        except UnavailableError:
            await asyncio.sleep(PAUSE_S)
    return await ask()


async def first(*watchers: Coroutine[Any, Any, Preemption]) -> Preemption:
    """Return the first notice, and end the other watchers."""
    tasks = [asyncio.create_task(watcher) for watcher in watchers]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        return done.pop().result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def labelled(host: Host, labels: Mapping[str, str]) -> Host:
    """Return `host` with the non-empty labels."""
    return Host(host.cpus, host.memory_mib, host.gpus, tuple(sorted((k, v) for k, v in labels.items() if v)))


def gpu_type(instance_type: str, families: Mapping[str, str], gpus: Iterable[Gpu]) -> str:
    """Return the GPU type of the machine's family (the longest prefix of `instance_type`), else the driver's name for
    the first GPU, as `nvidia-h100-80gb-hbm3`, or "" without a GPU."""
    known = [family for family in families if instance_type.startswith(family)]
    if known:
        return families[max(known, key=len)]
    for gpu in gpus:
        return "-".join(gpu.name.lower().split())
    return ""
