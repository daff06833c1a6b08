"""Numbered migrations, applied one after the other in one transaction, the same list on both databases."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal

from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.schema import CreateColumn, CreateIndex, CreateTable

from rollout.model.errors import SchemaVersionError
from rollout.storage.schema import ITEM_STATE_VIEW, ITEM_STATE_VIEW_2, METADATA

DialectName = Literal["sqlite", "postgresql"]

VERSION_TABLE = "CREATE TABLE IF NOT EXISTS schema_version (version INTEGER PRIMARY KEY, name TEXT NOT NULL)"
READ_VERSION = "SELECT COALESCE(MAX(version), 0) FROM schema_version"


@dataclass(frozen=True, slots=True)
class Migration:
    """`statements` gives the DDL of one dialect. A published migration never changes."""

    number: int
    name: str
    statements: Callable[[DialectName], Iterable[str]]


def tables_since(number: int, dialect: DialectName) -> list[str]:
    """DDL of every table, column and index that came with migration `number`."""
    compiler = sqlite.dialect() if dialect == "sqlite" else postgresql.dialect()
    statements: list[str] = []
    for table in METADATA.sorted_tables:
        since = table.info["since"]
        if since == number:
            # The object tables may be there already: a store of objects can open the database first.
            create = CreateTable(table, if_not_exists=True)
            create.columns = [CreateColumn(c) for c in table.columns if c.info.get("since", since) == number]
            statements.append(str(create.compile(dialect=compiler)))
        else:
            statements += [
                f"ALTER TABLE {table.name} ADD COLUMN {CreateColumn(column).compile(dialect=compiler)}"
                for column in table.columns
                if column.info.get("since", since) == number
            ]
        indexes = sorted(table.indexes, key=lambda index: str(index.name))
        statements += [
            str(CreateIndex(index, if_not_exists=True).compile(dialect=compiler))
            for index in indexes
            if index.info["since"] == number
        ]
    return statements


def _first(dialect: DialectName) -> list[str]:
    return [*tables_since(1, dialect), ITEM_STATE_VIEW, "INSERT INTO kv_head (one, revision) VALUES (1, 0)"]


def _began(dialect: DialectName) -> list[str]:
    # Attempts that failed, or were lost, had begun; since when is not known any more.
    known = "UPDATE attempt SET began_ms = at_ms WHERE ending IN ('failed', 'timeout', 'worker_lost')"
    added = tables_since(2, dialect)
    columns = [statement for statement in added if statement.startswith("ALTER TABLE")]
    return [*columns, known, *added[len(columns) :], "DROP VIEW item_state", ITEM_STATE_VIEW_2]


MIGRATIONS: tuple[Migration, ...] = (
    Migration(1, "ledger, key-value and object tables", _first),
    Migration(2, "since when attempts ran, and indexes for looking into runs", _began),
    Migration(3, "who ended a run", lambda dialect: tables_since(3, dialect)),
    Migration(4, "what children of a run printed, and what happened", lambda dialect: tables_since(4, dialect)),
    Migration(5, "how many rows could not be used, and events by run", lambda dialect: tables_since(5, dialect)),
)


def plan(stored: int, dialect: DialectName, where: str, migrations: tuple[Migration, ...] = MIGRATIONS) -> list[str]:
    """Statements that bring a database from version `stored` to the newest.

    SchemaVersionError when `stored` is newer than the newest migration.
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
            statements += migration.statements(dialect)
            name = migration.name.replace("'", "''")
            statements.append(f"INSERT INTO schema_version (version, name) VALUES ({migration.number}, '{name}')")
    return statements
