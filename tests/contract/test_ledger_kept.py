"""Objects that results name in their data: referred to until they are let go, over SQLite and PostgreSQL."""

from __future__ import annotations

import dataclasses

import pytest
from ledger_rows import RUN, Writer, result_rows
from rollout.model.errors import FencedError
from rollout_coordinator.core.step import Writes
from rollout_coordinator.ledger import Ledger

ONE, TWO, THREE = (bytes([n]) * 32 for n in (1, 2, 3))


async def keep(writer: Writer) -> None:
    await writer.run(3)
    rows = dataclasses.replace(result_rows([0, 2]), keeps={0: (ONE,), 1: (TWO, THREE)})
    await writer.commit(Writes(results=[rows]))


async def test_they_are_listed_and_referred_to_until_they_are_let_go(writer: Writer, ledger: Ledger) -> None:
    await keep(writer)
    assert await ledger.kept(RUN) == [(0, ONE), (2, TWO), (2, THREE)]
    assert await ledger.referenced([ONE, TWO, THREE]) == {ONE, TWO, THREE}
    await writer.commit(Writes(let_go=[(1, 0)]))
    assert await ledger.kept(RUN) == [(2, TWO), (2, THREE)]
    await ledger.let_go(writer.fence.epoch, RUN, [2])
    assert await ledger.kept(RUN) == []
    assert await ledger.referenced([ONE, TWO, THREE]) == set()


async def test_who_leads_no_longer_lets_nothing_go(writer: Writer, ledger: Ledger) -> None:
    await keep(writer)
    with pytest.raises(FencedError):
        await ledger.let_go(writer.fence.epoch - 1, RUN, [0, 2])
    assert len(await ledger.kept(RUN)) == 3


async def test_a_deleted_run_refers_to_nothing(writer: Writer, ledger: Ledger) -> None:
    await keep(writer)
    await writer.commit(Writes(deleted_runs=[RUN]))
    assert await ledger.referenced([ONE, TWO, THREE]) == set()
