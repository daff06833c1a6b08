"""Memory that all bodies share."""

from __future__ import annotations

import asyncio

from rollout.objects.budget import Budget


async def test_shares_wait_their_turn_and_nobody_overtakes() -> None:
    budget = Budget(10)
    taken: list[str] = []
    go = asyncio.Event()

    async def hold(name: str, size: int) -> None:
        async with budget.share(size):
            taken.append(name)
            await go.wait()

    first = asyncio.create_task(hold("first", 8))
    large, given_up, small = (
        asyncio.create_task(hold(n, s)) for n, s in (("large", 99), ("given up", 1), ("small", 1))
    )
    await asyncio.sleep(0)
    assert taken == ["first"] and not budget.try_take(1), "others wait"
    given_up.cancel()
    await asyncio.gather(given_up, return_exceptions=True)
    go.set()
    await asyncio.gather(first, large, small)
    assert taken == ["first", "large", "small"] and budget.try_take(10) and not budget.try_take(1)
