"""The time limit of a try, on both sides: the executor imports no more than this."""

from __future__ import annotations

from rollout.model.item import ItemSpec

BACKSTOP_S = 30.0
"""The worker's own limit on a try is later by so much: the executor keeps the time, and can say where a row hung."""


def try_limit_s(spec: ItemSpec) -> float:
    """Of one try at an item; 0: none."""
    return spec.timeout_ms / 1000 - BACKSTOP_S if spec.timeout_ms else 0.0
