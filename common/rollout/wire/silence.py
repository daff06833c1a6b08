"""Reports an answer that does not come, before anything has failed."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Generator
from contextlib import contextmanager

from rollout.model.errors import RolloutError, UnavailableError

SILENCE_S = 2.0


@contextmanager
def telling(
    say: Callable[[RolloutError | None, float], None], address: str, owed: Callable[[], bool] = lambda: True
) -> Generator[None]:
    """Call `say(error, seconds)`, repeatedly, while the body waits longer than two seconds for an answer of `address`.

    Only time in which an answer is `owed` counts. `say` is called with None once it has come.
    """
    loop = asyncio.get_running_loop()
    began = loop.time()
    told = False

    def still() -> None:
        nonlocal began, told, timer
        if owed():
            told = True
            say(UnavailableError(f"{address} has not answered yet"), loop.time() - began)
        else:
            began = loop.time()
        timer = loop.call_later(SILENCE_S, still)

    timer = loop.call_later(SILENCE_S, still)
    try:
        yield
    finally:
        timer.cancel()
    if told:
        say(None, loop.time() - began)
