"""The schema of both databases: made from nothing, kept when there, refused when newer."""

from __future__ import annotations

import asyncio
import re
import sqlite3
from pathlib import Path
from typing import Any

import asyncpg
import pytest
from ledger_rows import Writer, result_rows
from rollout.config.settings import EmbeddedStorage, StorageSection
from rollout.model.errors import ConfigError, SchemaVersionError
from rollout.storage import migrations, open_storage
from rollout.storage.migrations import Migration
from rollout_coordinator.core.step import Writes
from rollout_coordinator.ledger import open_ledger

NEWEST = migrations.MIGRATIONS[-1].number


async def query(section: StorageSection, statement: str) -> list[Any]:
    if section.backend == "postgres":
        connection = await asyncpg.connect(section.postgres.url)
        try:
            return [tuple(row) for row in await connection.fetch(statement)]
        finally:
            await connection.close()
    with sqlite3.connect(section.embedded.path) as db:
        rows = db.execute(statement).fetchall()
    db.close()
    return rows


async def open_and_close(section: StorageSection) -> None:
    storage = open_storage(section)
    await storage.open()
    await storage.close()


async def columns(section: StorageSection, table: str) -> set[str]:
    if section.backend == "postgres":
        statement = f"SELECT column_name FROM information_schema.columns WHERE table_name = '{table}'"
    else:
        statement = f"SELECT name FROM pragma_table_info('{table}')"
    return {row[0] for row in await query(section, statement)}


async def test_from_nothing_to_the_newest(storage_section: StorageSection) -> None:
    await open_and_close(storage_section)
    assert await query(storage_section, "SELECT MAX(version) FROM schema_version") == [(NEWEST,)]
    for table, column in (("item", "payload"), ("attempt", "began_ms"), ("run", "ended_by"), ("event", "fields")):
        assert column in await columns(storage_section, table)


async def test_opening_again_changes_nothing(storage_section: StorageSection) -> None:
    await open_and_close(storage_section)
    await open_and_close(storage_section)
    assert await query(storage_section, "SELECT COUNT(*) FROM schema_version") == [(len(migrations.MIGRATIONS),)]


async def test_several_at_once(storage_section: StorageSection) -> None:
    stores = [open_storage(storage_section) for _ in range(3)]
    await asyncio.gather(*(store.open() for store in stores))
    await asyncio.gather(*(store.close() for store in stores))
    assert await query(storage_section, "SELECT COUNT(*) FROM schema_version") == [(len(migrations.MIGRATIONS),)]


async def test_each_later_migration_is_applied_once(
    storage_section: StorageSection, monkeypatch: pytest.MonkeyPatch
) -> None:
    await open_and_close(storage_section)
    added = Migration(NEWEST + 1, "add a note's table", "CREATE TABLE note (text TEXT);\n")
    later = Migration(NEWEST + 2, "fill it", "INSERT INTO note (text) VALUES ('x');\n")
    known = (*migrations.MIGRATIONS, added, later)
    monkeypatch.setattr(migrations.plan, "__defaults__", (known,))
    await open_and_close(storage_section)
    await open_and_close(storage_section)
    assert len(await query(storage_section, "SELECT text FROM note")) == 1
    assert await query(storage_section, "SELECT MAX(version) FROM schema_version") == [(NEWEST + 2,)]


async def test_a_failed_migration_leaves_the_version(
    storage_section: StorageSection, monkeypatch: pytest.MonkeyPatch
) -> None:
    await open_and_close(storage_section)
    bad = Migration(NEWEST + 1, "break", "CREATE TABLE half (n INTEGER);\nSELECT no_such_thing FROM nowhere;\n")
    monkeypatch.setattr(migrations.plan, "__defaults__", ((*migrations.MIGRATIONS, bad),))
    with pytest.raises(Exception, match="nowhere"):
        await open_and_close(storage_section)
    assert await query(storage_section, "SELECT MAX(version) FROM schema_version") == [(NEWEST,)]
    assert await columns(storage_section, "half") == set()


async def test_a_newer_schema_is_refused(storage_section: StorageSection) -> None:
    await open_and_close(storage_section)
    statement = "INSERT INTO schema_version (version, name) VALUES (99, 'future') RETURNING version"
    await query(storage_section, statement)
    for opened in (open_storage(storage_section), open_ledger(storage_section)):
        with pytest.raises(SchemaVersionError, match=rf"version 99.*up to {NEWEST}.*install"):
            await opened.open()
        await opened.close()


async def test_item_states_for_people(storage_section: StorageSection) -> None:
    ledger = open_ledger(storage_section)
    await ledger.open()
    writer = Writer(ledger)
    await writer.lead()
    await writer.run(4)
    await writer.commit(Writes(results=[result_rows([0, 2])]))
    rows = await query(storage_section, "SELECT seq, state FROM item_state ORDER BY seq")
    assert rows == [(0, "accepted"), (1, "open"), (2, "accepted"), (3, "open")]
    await ledger.close()


@pytest.mark.parametrize(
    "content", [b"this is no database, it is a text file\n" * 50, b"SQLite format 3\x00" + b"\xff" * 4000]
)
async def test_a_file_that_is_no_database(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "rollout.db"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=re.escape(str(path))):
        await open_and_close(StorageSection(embedded=EmbeddedStorage(path=str(path))))
    assert path.read_bytes() == content


async def test_paths_that_cannot_hold_a_database(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    for path in (tmp_path, tmp_path / "file" / "rollout.db"):
        with pytest.raises(ConfigError, match="path"):
            await open_and_close(StorageSection(embedded=EmbeddedStorage(path=str(path))))


@pytest.mark.parametrize("url", ["postgresql://u@127.0.0.1:notaport/x", "nonsense"])
async def test_urls_that_are_none(url: str) -> None:
    section = StorageSection.model_validate({"backend": "postgres", "postgres": {"url": url}})
    with pytest.raises(ConfigError, match="url"):
        await open_and_close(section)


async def test_a_database_that_the_server_does_not_know(postgres_url: str) -> None:
    section = StorageSection.model_validate({"backend": "postgres", "postgres": {"url": f"{postgres_url}_absent"}})
    with pytest.raises(ConfigError, match="does not exist"):
        await open_and_close(section)
