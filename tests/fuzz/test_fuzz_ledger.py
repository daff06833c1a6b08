"""A damaged row of the ledger is an error that says so: no crash with a bare exception, and no row that vanishes."""

from __future__ import annotations

import asyncio
import sqlite3
from pathlib import Path
from typing import Any

import pytest
from ledger_rows import RUN, Writer, assignment, result_rows
from rollout.model.errors import StorageDamagedError, StorageError
from rollout_coordinator.core.step import LoadPending, LoadResults, Writes
from rollout_coordinator.ledger.sqlite import SqliteLedger

DAMAGE = [
    ("run", "spec", "{"),
    ("run", "spec", "[1]"),
    ("run", "spec", '{"order": "sideways"}'),
    ("run", "state", "dreaming"),
    ("run", "survivors", "nothing"),
    ("spec", "body", "\x00"),
    ("spec", "body", "[]"),
    ("assignment", "keys", b"\x01\x02\x03"),
    ("assignment", "keys", b"\xff" * 40),
    ("result", "outcome", 99),
]


async def filled(path: Path) -> None:
    ledger = SqliteLedger(path)
    await ledger.open()
    writer = Writer(ledger)
    await writer.lead()
    await writer.run(6)
    await writer.commit(Writes(results=[result_rows([0, 1])], assignments=[assignment(1, (1, [2, 3], 1))]))
    await ledger.close()


async def read_all(path: Path) -> list[BaseException]:
    """Everything that reads; what each raised."""
    ledger = SqliteLedger(path)
    await ledger.open()
    found: list[BaseException] = []
    reads: list[Any] = [
        ledger.snapshot(),
        ledger.run_snapshot(RUN),
        ledger.run_views((), 10),
        ledger.commit_log(1, 0, 100, 1 << 20, True),
        ledger.results(LoadResults(1, 1, 0, 10, True)),
        ledger.pending(LoadPending(1, 1, 0, 100, 1 << 20)),
        ledger.workers(10),
    ]
    for read in reads:
        try:
            await read
        except StorageError as error:
            found.append(error)
    await ledger.close()
    return found


@pytest.mark.parametrize(("table", "column", "value"), DAMAGE)
def test_a_damaged_row_is_told(tmp_path: Path, table: str, column: str, value: Any) -> None:
    path = tmp_path / "l.db"
    asyncio.run(filled(path))
    assert asyncio.run(read_all(path)) == []
    with sqlite3.connect(path) as db:
        assert db.execute(f"UPDATE {table} SET {column} = ?", (value,)).rowcount
    db.close()
    found = asyncio.run(read_all(path))
    assert any(isinstance(error, StorageDamagedError) and "damaged" in error.message for error in found), found
