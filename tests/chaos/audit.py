"""Plain SQL that the campaign adds to the database under test: triggers that write down what the engine does to it.

Sampling sees a hundred states; a trigger sees each change, with the epoch and number of the transaction that made it
and, on PostgreSQL, the connection it came from. The engine knows nothing of them.
"""

from __future__ import annotations

TABLES = {
    "chaos_result": "log BIGINT, seq BIGINT, attempt BIGINT, worker TEXT, epoch BIGINT, batch BIGINT, port BIGINT",
    "chaos_assignment": "worker TEXT, keys {blob}, epoch BIGINT, batch BIGINT, port BIGINT",
    "chaos_cursor": "log BIGINT, before BIGINT, after BIGINT, epoch BIGINT, batch BIGINT, port BIGINT",
    "chaos_lease": "before BIGINT, after BIGINT, batch_before BIGINT, batch_after BIGINT, address TEXT, port BIGINT",
    "chaos_tamper": "what TEXT, log BIGINT, seq BIGINT, port BIGINT",
}
"""Audit tables: columns after `n`, the order of insertion."""

# (trigger, table, event, condition, audit table, values). OLD and NEW are the row; {epoch}, {batch}, {port} are filled in.
_TRIGGERS = (
    ("result_in", "result", "INSERT", "", "chaos_result",
     "NEW.log, NEW.seq, NEW.attempt, NEW.worker, {epoch}, {batch}, {port}"),
    ("assigned", "assignment", "INSERT", "", "chaos_assignment", "NEW.worker, NEW.keys, {epoch}, {batch}, {port}"),
    ("cursor", "log", "UPDATE", "NEW.cursor <> OLD.cursor", "chaos_cursor",
     "NEW.log, OLD.cursor, NEW.cursor, {epoch}, {batch}, {port}"),
    ("epoch", "lease", "UPDATE", "NEW.epoch <> OLD.epoch OR NEW.batch < OLD.batch", "chaos_lease",
     "OLD.epoch, NEW.epoch, OLD.batch, NEW.batch, NEW.address, {port}"),
    ("lease_gone", "lease", "DELETE", "", "chaos_tamper", "'lease deleted', 0, 0, {port}"),
    ("result_changed", "result", "UPDATE", "", "chaos_tamper", "'result changed', OLD.log, OLD.seq, {port}"),
    ("result_gone", "result", "DELETE", "", "chaos_tamper", "'result deleted', OLD.log, OLD.seq, {port}"),
    ("item_changed", "item", "UPDATE", "", "chaos_tamper", "'item changed', OLD.log, OLD.seq, {port}"),
    ("item_gone", "item", "DELETE", "", "chaos_tamper", "'item deleted', OLD.log, OLD.seq, {port}"),
    ("attempt_gone", "attempt", "DELETE", "", "chaos_tamper", "'attempt deleted', OLD.log, OLD.seq, {port}"),
)  # fmt: skip

_EPOCH = "(SELECT epoch FROM lease WHERE one = 1)"
_BATCH = "(SELECT batch FROM lease WHERE one = 1)"


def statements(database: str) -> list[str]:
    """DDL for `sqlite` or `postgres`, to be run once the schema is there."""
    return _sqlite() if database == "sqlite" else _postgres()


def _columns(table: str) -> str:
    return ", ".join(part.split()[0] for part in TABLES[table].split(", "))


def _sqlite() -> list[str]:
    made = [
        f"CREATE TABLE {table} (n INTEGER PRIMARY KEY AUTOINCREMENT, {columns.format(blob='BLOB')})"
        for table, columns in TABLES.items()
    ]
    for name, table, event, condition, audit, values in _TRIGGERS:
        when = f" WHEN {condition}" if condition else ""
        filled = values.format(epoch=_EPOCH, batch=_BATCH, port="0")
        made.append(
            f"CREATE TRIGGER chaos_{name} AFTER {event} ON {table}{when} "
            f"BEGIN INSERT INTO {audit} ({_columns(audit)}) VALUES ({filled}); END"
        )
    made.append(
        f"INSERT INTO chaos_lease ({_columns('chaos_lease')}) SELECT -1, epoch, 0, batch, address, 0 FROM lease"
    )
    return made


def _postgres() -> list[str]:
    made = [
        f"CREATE TABLE {table} (n BIGSERIAL PRIMARY KEY, {columns.format(blob='BYTEA')})"
        for table, columns in TABLES.items()
    ]
    for name, table, event, condition, audit, values in _TRIGGERS:
        when = f" WHEN ({condition})" if condition else ""
        filled = values.format(epoch=_EPOCH, batch=_BATCH, port="COALESCE(inet_client_port(), 0)")
        made += [
            f"CREATE FUNCTION chaos_{name}() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN "
            f"INSERT INTO {audit} ({_columns(audit)}) VALUES ({filled}); RETURN NULL; END $$",
            f"CREATE TRIGGER chaos_{name} AFTER {event} ON {table} FOR EACH ROW{when} EXECUTE FUNCTION chaos_{name}()",
        ]
    made.append(
        f"INSERT INTO chaos_lease ({_columns('chaos_lease')}) SELECT -1, epoch, 0, batch, address, 0 FROM lease"
    )
    return made
