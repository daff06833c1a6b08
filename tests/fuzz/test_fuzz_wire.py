"""Generated calls of every service by every role, over mutual TLS, beside an innocent run."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest
from fuzz_budget import TIMES, budget
from hostile_messages import Feed
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from wire_scene import METHODS, ROLES, WireScene, close_scene, open_scene

FEED = 320
calls = st.lists(
    st.tuples(st.sampled_from(ROLES), st.integers(0, len(METHODS) - 1), st.binary(min_size=FEED, max_size=FEED)),
    min_size=4,
    max_size=12,
)


@pytest.fixture(scope="module")
def loop() -> Iterator[asyncio.Runner]:
    with asyncio.Runner() as runner:
        yield runner


@pytest.fixture(scope="module")
def scene(loop: asyncio.Runner, tmp_path_factory: pytest.TempPathFactory) -> Iterator[WireScene]:
    found = loop.run(open_scene(tmp_path_factory.mktemp("wire")))
    try:
        yield found
    finally:
        loop.run(close_scene(found))


@pytest.mark.timeout(300 * TIMES)
@settings(budget(8), phases=[Phase.explicit, Phase.generate])  # a campaign has memory: what it found is not shrunk
@given(calls)
def test_any_call_by_any_role(loop: asyncio.Runner, scene: WireScene, attacks: list[tuple[str, int, bytes]]) -> None:
    async def together() -> None:
        await asyncio.gather(
            scene.innocent(), *(scene.attack(role, method, Feed(data)) for role, method, data in attacks)
        )

    loop.run(together())
    scene.judge()


def test_every_method_by_every_role(loop: asyncio.Runner, scene: WireScene) -> None:
    """The empty message, a plausible one and garbage, to each of them."""
    feeds = (bytes(FEED), bytes(range(1, 161)) * 2, b"\xff" * FEED)

    async def together() -> None:
        for data in feeds:
            attacks = [scene.attack(role, at, Feed(data)) for role in ROLES for at in range(len(METHODS))]
            await asyncio.gather(scene.innocent(), *attacks)

    loop.run(together())
    scene.judge()
