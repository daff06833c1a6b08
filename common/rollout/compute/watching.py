"""What the watchers of notices share."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping
from typing import Any, TypeVar

from rollout.compute.port import Gpu, Host, Preemption
from rollout.model.errors import UnavailableError

TRIES, PAUSE_S = 3, 1.0
"""On a machine of a cloud, whose metadata service may be up later than this worker, or throttle."""

T = TypeVar("T")


async def tried(ask: Callable[[], Awaitable[T]]) -> T:
    """UnavailableError: of the last of `TRIES`."""
    for _ in range(TRIES - 1):
        try:
            return await ask()
        except UnavailableError:
            await asyncio.sleep(PAUSE_S)
    return await ask()


async def first(*watchers: Coroutine[Any, Any, Preemption]) -> Preemption:
    """The notice that comes first; the other watchers are ended."""
    tasks = [asyncio.create_task(watcher) for watcher in watchers]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        return done.pop().result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def labelled(host: Host, labels: Mapping[str, str]) -> Host:
    """`host` with those labels that say anything."""
    return Host(host.cpus, host.memory_mib, host.gpus, tuple(sorted((k, v) for k, v in labels.items() if v)))


def gpu_type(instance_type: str, families: Mapping[str, str], gpus: Iterable[Gpu]) -> str:
    """By the machine's family (the longest that `instance_type` begins with), else as the driver calls the first GPU:
    `nvidia-h100-80gb-hbm3`. Empty: it has none."""
    known = [family for family in families if instance_type.startswith(family)]
    if known:
        return families[max(known, key=len)]
    for gpu in gpus:
        return "-".join(gpu.name.lower().split())
    return ""
