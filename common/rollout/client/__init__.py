"""The client of a cluster: submits runs, reads their commit logs, and sends commands.

`Page` and `Runs` are imported on access, because importing grpc takes longer than `rollout --help`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rollout.client.runs import Page, Runs

__all__ = ["Page", "Runs"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from rollout.client import runs

    return getattr(runs, name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
