"""Whose an incarnation is: one host's, however many coordinators sell certificates, until these are long over."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator

import pytest
from rollout.config.settings import StorageSection
from rollout.model.errors import AuthError
from rollout.model.ids import make_ulid
from rollout.security import claims
from rollout.security.claims import KEEP_S, claim_incarnation, forget_claims
from rollout.storage import open_storage
from rollout.storage.port import Storage

NOW = time.time()
LIFE_S = 4 * 3600.0
W = make_ulid(1_700_000_000_000, b"0123456789")
HOSTS = [make_ulid(1, bytes([n] * 10)) for n in range(8)]


@pytest.fixture
async def two(storage_section: StorageSection) -> AsyncIterator[tuple[Storage, Storage]]:
    """The storages of two coordinators on one database."""
    pair = (open_storage(storage_section), open_storage(storage_section))
    for one in pair:
        await one.open()
    yield pair
    for one in pair:
        await one.close()


async def test_the_first_host_keeps_it_at_every_coordinator(two: tuple[Storage, Storage]) -> None:
    a, b = HOSTS[:2]
    await claim_incarnation(two[0], W, a, NOW + LIFE_S)
    for storage in two:
        with pytest.raises(AuthError, match=f"belongs to host {a}.*not to {b}; start this process anew"):
            await claim_incarnation(storage, W, b, NOW + LIFE_S)
        await claim_incarnation(storage, W, a, NOW + LIFE_S)


async def test_of_many_that_buy_at_once_one_gets_it(two: tuple[Storage, Storage]) -> None:
    tries = [claim_incarnation(two[n % 2], W, host, NOW + LIFE_S) for n, host in enumerate(HOSTS)]
    ended = await asyncio.gather(*tries, return_exceptions=True)
    assert sorted(type(one).__name__ for one in ended) == ["AuthError"] * 7 + ["NoneType"]


async def test_renewals_read_and_seldom_write(two: tuple[Storage, Storage]) -> None:
    written = []
    for n in range(25):  # two days of renewals at half life
        before = await two[0].revision()
        await claim_incarnation(two[0], W, HOSTS[0], NOW + n * LIFE_S / 2 + LIFE_S)
        written.append(await two[0].revision() - before)
    assert written[0] == 1 and sum(written) == 5


async def test_a_claim_that_is_renewed_stays(two: tuple[Storage, Storage]) -> None:
    for n in range(25):
        at = NOW + n * LIFE_S / 2
        await claim_incarnation(two[0], W, HOSTS[0], at + LIFE_S)
        assert await forget_claims(two[1], lambda at=at: at + LIFE_S + KEEP_S / 2 - 1) == 0


async def test_claims_go_long_after_the_last_certificate(
    two: tuple[Storage, Storage], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(claims, "PAGE", 3)
    short, long = [[make_ulid(n << 9, bytes([kind] * 10)) for n in range(20)] for kind in (1, 2)]
    for one in short:
        await claim_incarnation(two[0], one, HOSTS[0], NOW)
    for one in long:
        await claim_incarnation(two[0], one, HOSTS[0], NOW + LIFE_S)
    assert await forget_claims(two[1], lambda: NOW + KEEP_S - 1) == 0
    assert await forget_claims(two[1], lambda: NOW + KEEP_S + 1) == 20
    left = [key for key, _ in await two[0].scan("security", claims.PREFIX)]
    assert left == [claims.PREFIX + one for one in sorted(long)]
    with pytest.raises(AuthError):
        await claim_incarnation(two[0], long[0], HOSTS[1], NOW)
    await claim_incarnation(two[0], short[0], HOSTS[1], NOW)
