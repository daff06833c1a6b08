"""A coordinator whose database goes away while it starts."""

from __future__ import annotations

from pathlib import Path

import pytest
from coordinator_places import inprocess
from postgres_link import link_to
from rollout_coordinator import lifecycle


@pytest.mark.parametrize("step", [12, pytest.param(1, marks=pytest.mark.slow)])
async def test_it_waits_wherever_in_its_start_the_database_goes_away(
    tmp_path: Path, postgres_url: str, monkeypatch: pytest.MonkeyPatch, step: int
) -> None:
    monkeypatch.setattr(lifecycle, "OPEN_RETRY_S", 0.02)
    monkeypatch.setattr(lifecycle, "OPEN_RETRY_MAX_S", 0.1)
    async with link_to(postgres_url) as (link, through):
        storage = f'[storage]\nbackend = "postgres"\n[storage.postgres]\nurl = "{through}"\n'
        for breaks in (range(8, 100, 17), *(range(first, 100, 37) for first in range(3, 37, step))):
            link.messages, link.break_at = 0, set(breaks)
            async with inprocess(tmp_path, storage=storage) as (node, _):
                assert node.serving.is_set() and link.messages > 80
