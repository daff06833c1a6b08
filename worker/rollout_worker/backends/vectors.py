"""Normalises embeddings, identically for every engine."""

from __future__ import annotations

import math

from rollout.model.errors import AttemptError


def unit(vector: list[float], dimensions: int | None = None) -> list[float]:
    """Return the first `dimensions` numbers, normalised. Raises AttemptError (bad_request) if there are fewer."""
    if dimensions is not None and dimensions > len(vector):
        message = f"the model's vectors have {len(vector)} dimensions, and the row wants {dimensions}"
        raise AttemptError(message, code="bad_request", retry=False)
    kept = vector[:dimensions]
    length = math.sqrt(math.fsum(value * value for value in kept))
    return [value / length for value in kept] if length else kept
