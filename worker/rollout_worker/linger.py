"""How long a worker's news waits for company: batches where there is load, no delay where there is none. Pure."""

from __future__ import annotations

LINGER_S = 0.002
LINGER_FED_S = 0.1
LINGER_MAX_S = 1.0
SLOW_S = 0.2
"""A coordinator that answers later than this is busy, with its disk or with the messages of hundreds of workers. Fewer
and larger ones cost it less, and news that waits for half the time of an answer makes a turn longer by a third."""
ENOUGH = 32
"""Starts and endings in one message, to save no more by waiting: some 60 µs of the coordinator's for each message."""


def linger(fed: bool, answer_s: float, news: int) -> float:
    """Seconds from the first of the news until it is told. `fed`: only engines work here, and have rows in hand beyond
    those they run, so that nothing waits for the news of one."""
    least = LINGER_FED_S if fed else LINGER_S
    if answer_s < SLOW_S or news >= ENOUGH:
        return least
    return max(least, min(answer_s / 2, LINGER_MAX_S))
