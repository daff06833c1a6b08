"""A python plugin: plain functions, marked as rewards."""

from __future__ import annotations

from rollout.plugins import reward


@reward
def exact(completion: str, answer: str) -> float:
    """Return 1.0 if the completion is the answer, ignoring white space."""
    return float(completion.strip() == answer.strip())


@reward
async def brevity(completion: str, limit: int = 200) -> dict[str, float | int]:
    """Return a reward that falls from 1.0 to 0.0 over `limit` characters, and the length."""
    return {"reward": max(0.0, 1.0 - len(completion) / limit), "characters": len(completion)}
