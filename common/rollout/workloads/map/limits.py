"""The time limit of an attempt, for client and worker: the executor imports only this."""

from __future__ import annotations

from rollout.model.item import ItemSpec

BACKSTOP_S = 30.0
"""Extra time before the worker enforces the limit itself: the executor is first, because it can say where a row
hung."""


def try_limit_s(spec: ItemSpec) -> float:
    """Return the time limit of one attempt at an item; 0 means none."""
    return spec.timeout_ms / 1000 - BACKSTOP_S if spec.timeout_ms else 0.0
