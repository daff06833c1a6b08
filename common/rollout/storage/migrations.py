"""Numbered migrations, applied in order in one transaction, the same list on both databases."""

from __future__ import annotations

from dataclasses import dataclass

from rollout.model.errors import SchemaVersionError
from rollout.storage.schema import (
    ATTEMPTS_BEGAN,
    ENDED_BY,
    EVIDENCE,
    HELD_OBJECTS,
    INVALID_ROWS,
    KEPT_OBJECTS,
    OUTPUT_AND_EVENTS,
    TABLES,
    DialectName,
    statements_of,
)

VERSION_TABLE = "CREATE TABLE IF NOT EXISTS schema_version (version INTEGER PRIMARY KEY, name TEXT NOT NULL)"
READ_VERSION = "SELECT COALESCE(MAX(version), 0) FROM schema_version"


@dataclass(frozen=True, slots=True)
class Migration:
    """A published migration never changes."""

    number: int
    name: str
    sql: str


MIGRATIONS: tuple[Migration, ...] = (
    Migration(1, "ledger, key-value and object tables", TABLES),
    Migration(2, "since when attempts ran, and indexes for looking into runs", ATTEMPTS_BEGAN),
    Migration(3, "who ended a run", ENDED_BY),
    Migration(4, "what children of a run printed, and what happened", OUTPUT_AND_EVENTS),
    Migration(5, "how many rows could not be used, and events by run", INVALID_ROWS),
    Migration(6, "objects that results name", KEPT_OBJECTS),
    Migration(7, "what attempts left behind that failed", EVIDENCE),
    Migration(8, "objects that parents keep for their children", HELD_OBJECTS),
)


def plan(stored: int, dialect: DialectName, where: str, migrations: tuple[Migration, ...] = MIGRATIONS) -> list[str]:
    """Return the statements that bring a database from version `stored` to the newest.

    Raises SchemaVersionError if `stored` is newer than the newest migration.
    """
    known = migrations[-1].number
    if stored > known:
        raise SchemaVersionError(
            f"{where} has schema version {stored}, but this program knows versions up to {known}: install the release "
            "that wrote it (or a later one), or point [storage] at another database; nothing was changed",
            stored=stored,
            known=known,
        )
    statements: list[str] = []
    for migration in migrations:
        if migration.number > stored:
            statements += statements_of(migration.sql, dialect)
            name = migration.name.replace("'", "''")
            statements.append(f"INSERT INTO schema_version (version, name) VALUES ({migration.number}, '{name}')")
    return statements
