"""Time for which a worker gathers messages: batches under load, no delay without. Pure."""

from __future__ import annotations

LINGER_S = 0.002
LINGER_FED_S = 0.1
LINGER_MAX_S = 1.0
SLOW_S = 0.2
"""Answer time in seconds above which a coordinator is busy, with its disk or with hundreds of workers.

Fewer and larger messages cost it less, and gathering for half the answer time makes a turn longer by a third.
"""
ENOUGH = 32
"""Starts and endings in one message above which waiting saves no more: a message costs the coordinator some 60 µs."""


def linger(fed: bool, answer_s: float, news: int) -> float:
    """Return the seconds from the first event until the message is sent.

    `fed` says that only engines work here and hold rows beyond those they run, so that nothing waits for one report.
    """
    least = LINGER_FED_S if fed else LINGER_S
    if answer_s < SLOW_S or news >= ENOUGH:
        return least
    return max(least, min(answer_s / 2, LINGER_MAX_S))
