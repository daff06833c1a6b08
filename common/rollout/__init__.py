"""Rollout's shared package: values, configuration, wire, stores, the client and the `rollout` command.

Programs use `connect`, `local` and `map` (`rollout.workloads.map.client.api`), imported when they are asked for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rollout.workloads.map.client.api import (
        AsyncCluster,
        AsyncRun,
        Cluster,
        Outcome,
        RowError,
        RowFailed,
        Run,
        RunEnded,
        RunState,
        connect,
        connect_async,
        local,
        local_async,
        map,
    )

__all__ = [
    "AsyncCluster",
    "AsyncRun",
    "Cluster",
    "Outcome",
    "RowError",
    "RowFailed",
    "Run",
    "RunEnded",
    "RunState",
    "connect",
    "connect_async",
    "local",
    "local_async",
    "map",
]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from rollout.workloads.map.client import api

    return getattr(api, name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
