"""Every table of the one database, as SQLAlchemy Core metadata; `migrations.py` turns it into DDL.

The hot tables (`item`, `result`, `assignment`) hold narrow rows that are written once. Their key is (log, seq), which
grows; no other unique index exists on them, because random keys in a B-tree halve the throughput of inserts.
`info={"since": n}` on a table, a column or an index names the migration that creates it.
"""

from __future__ import annotations

from typing import Any

from sqlalchemy import BigInteger, Column, Index, Integer, LargeBinary, MetaData, SmallInteger, Table, Text, text

METADATA = MetaData()

Int = BigInteger().with_variant(Integer(), "sqlite")
"""64 bits on both; SQLite gives an alias of the rowid only to INTEGER."""

BytewiseText = Text().with_variant(Text(collation="C"), "postgresql")
"""Compared by its UTF-8 bytes on both, whatever the database's locale."""


def _int(name: str, default: int | None = 0, **options: Any) -> Column[int]:
    server_default = None if default is None else text(str(default))
    return Column(name, Int, nullable=False, server_default=server_default, **options)


def _text(name: str, default: str | None = "", **options: Any) -> Column[str]:
    server_default = None if default is None else text(f"'{default}'")
    return Column(name, Text, nullable=False, server_default=server_default, **options)


def _key(name: str, kind: Any = Int) -> Column[Any]:
    return Column(name, kind, primary_key=True, autoincrement=False, nullable=False)


def _table(name: str, *parts: Any, since: int = 1) -> Table:
    return Table(name, METADATA, *parts, info={"since": since})


LEASE = _table(
    "lease",
    _key("one"),  # always 1
    _text("holder", None),
    _int("epoch", None),
    _int("batch", None),
    _int("beat", None),
    _int("released"),
    _text("address"),
)

COUNTER = _table("counter", _key("name", Text), _int("value", None))
"""`next_log` after deletions, so that the number of a deleted log is never given out again."""

RUN = _table(
    "run",
    _key("run_id", Text),
    _text("workload", None),
    _text("name"),
    _text("state", None),
    _text("reason"),
    _text("item_order", None),
    _int("root_log", None),
    _int("priority"),
    _text("spec", None),  # JSON, without `config`
    Column("config", LargeBinary, nullable=False),  # canonical JSON, byte for byte as submitted
    _int("created_ms"),
    _int("updated_ms"),
    _int("ended_ms"),
    _int("stop_submitting"),
    _int("pausing_until_ms"),
    _text("survivors", "[]"),
    _text("ended_by", info={"since": 3}),  # who ended it by a command; '': nobody did
)
Index("run_created", RUN.c.created_ms, info={"since": 1})

LOG = _table(
    "log",
    _key("log"),
    _text("run_id", None),
    _int("parent_log"),
    _int("parent_seq"),
    _int("submitted"),
    _int("sealed"),
    _int("cursor"),
    _int("done"),
    _int("failed"),
    _int("cancelled"),
    _int("skipped"),
    _int("attempts"),
    _int("retried"),
    _int("worker_lost"),
    _int("stale"),
    _int("units_in"),
    _int("units_out"),
    _text("extra", "{}"),
    _int("invalid", info={"since": 5}),  # of the failed: rows that could not be used
)
Index("log_run", LOG.c.run_id, info={"since": 1})

PURGE = _table("purge", _key("log"))
"""Logs of deleted runs, whose rows go in chunks."""

LANE = _table(
    "lane",
    _key("run_id", Text),
    _key("lane", Text),
    _int("done"),
    _int("failed"),
    _int("consecutive_failures"),
    _int("pruned_at", -1),
)

SPEC = _table("spec", _key("run_id", Text), _key("idx"), _text("body", None))

ITEM = _table(
    "item",
    _key("log"),
    _key("seq"),
    Column("id", LargeBinary, nullable=False),
    _int("spec"),
    Column("payload", LargeBinary),  # either this
    Column("object_id", LargeBinary),  # or these three
    Column("object_offset", Int),
    Column("object_length", Int),
)

RESULT = _table(
    "result",
    _key("log"),
    _key("seq"),
    _int("attempt", None),
    Column("outcome", SmallInteger, nullable=False),
    Column("data", LargeBinary),
    Column("object_id", LargeBinary),
    Column("object_offset", Int),
    Column("object_length", Int),
    Column("code", Text),  # NULL: no failure
    Column("message", Text),
    Column("flags", SmallInteger),  # of the failure: 1 retryable, 2 worker_lost
    _text("worker"),
    _int("duration_ms"),
    _int("units_in"),
    _int("units_out"),
    _int("accepted_ms"),
    Column("position", Int),  # arrival order: place in the commit log
    Column("pruned_at", Int),
)
_PLACED = text("position IS NOT NULL")
Index(
    "result_position",
    RESULT.c.log,
    RESULT.c.position,
    sqlite_where=_PLACED,
    postgresql_where=_PLACED,
    info={"since": 1},
)

for _hot in (ITEM, RESULT):
    _has_object = text("object_id IS NOT NULL")
    Index(
        f"{_hot.name}_object",
        _hot.c.object_id,
        sqlite_where=_has_object,
        postgresql_where=_has_object,
        info={"since": 1},
    )

ASSIGNMENT = _table(
    "assignment",
    _key("batch"),
    _text("worker", None),
    _int("at_ms"),
    _int("n"),
    Column("keys", LargeBinary, nullable=False),
)

ATTEMPT = _table(
    "attempt",
    _key("log"),
    _key("seq"),
    _key("attempt"),
    _text("worker"),
    _text("ending", None),
    _text("code"),
    _text("message"),
    _int("at_ms"),
    _int("not_before_ms"),
    _int("began_ms", info={"since": 2}),  # 0: it never began
)
"""Ends of attempts that did not end their item. The usual end of an attempt is its result, and has no row here."""

# What people ask for: rows that failed, that were tried more than once, and what failed last. Each entry is of an end
# that is unusual, so that a row which ends at the first try costs none.
_FAILED = text("outcome = 2")
_BEGAN = text("began_ms > 0")
_CAUSED = text("ending IN ('failed', 'timeout', 'worker_lost')")
for _name, _columns, _where in (
    ("result_failed", (RESULT.c.log, RESULT.c.seq), _FAILED),
    ("result_failed_at", (RESULT.c.log, RESULT.c.accepted_ms), _FAILED),
    ("attempt_began", (ATTEMPT.c.log, ATTEMPT.c.seq), _BEGAN),
    ("attempt_failed_at", (ATTEMPT.c.log, ATTEMPT.c.at_ms), _CAUSED),
    ("log_parent", (LOG.c.parent_log, LOG.c.parent_seq), text("parent_log > 0")),
):
    Index(_name, *_columns, sqlite_where=_where, postgresql_where=_where, info={"since": 2})

WORKER = _table(
    "worker",
    _key("incarnation", Text),
    _text("host_id"),
    _text("inventory", "{}"),
    _text("state", None),
    _int("registered_ms"),
    _int("ended_ms"),
    _text("reason"),
)
Index("worker_registered", WORKER.c.registered_ms, info={"since": 1})

KV = _table(
    "kv",
    _key("namespace", BytewiseText),
    _key("key", BytewiseText),
    Column("value", LargeBinary, nullable=False),
)

KV_HEAD = _table("kv_head", _key("one"), _int("revision"))
"""One row. Writers lock it, so revisions become visible in their order."""

KV_CHANGE = _table(
    "kv_change",
    _key("revision"),
    _key("idx"),
    Column("namespace", BytewiseText, nullable=False),
    Column("key", BytewiseText, nullable=False),
    Column("value", LargeBinary),
)

OBJECT = _table("object", _key("object_id", LargeBinary), _int("size", None), _int("created_ms", None))
OBJECT_CHUNK = _table(
    "object_chunk", _key("object_id", LargeBinary), _key("idx"), Column("data", LargeBinary, nullable=False)
)
OBJECT_PIN = _table("object_pin", _key("object_id", LargeBinary), _key("holder", Text), _int("expires_ms", None))
Index("object_pin_holder", OBJECT_PIN.c.holder, info={"since": 1})

OUTPUT = _table(
    "output",
    _key("run_id", Text),
    _key("position"),  # bytes of the run's output up to its end
    _int("size", None),
    _text("worker", None),
    Column("lines", LargeBinary, nullable=False),
    since=4,
)
"""What children of a run printed, in chunks as workers shipped them."""

EVENT = _table(
    "event",
    _key("number"),
    _int("at_ms", None),
    _text("event", None),
    _text("level", None),
    _text("run_id", None),
    _text("fields", None),  # JSON
    since=4,
)
"""What happened, for people: the newest of it."""
Index("event_run", EVENT.c.run_id, EVENT.c.number, info={"since": 5})

ITEM_STATE_VIEW = """
CREATE VIEW item_state AS
SELECT log.run_id AS run_id, item.log AS log, item.seq AS seq,
       CASE result.outcome
            WHEN 1 THEN CASE WHEN COALESCE(result.position, result.seq) < log.cursor THEN 'done' ELSE 'accepted' END
            WHEN 2 THEN 'failed' WHEN 3 THEN 'cancelled' WHEN 4 THEN 'skipped'
            ELSE 'open' END AS state,
       COALESCE(result.attempt, (SELECT MAX(attempt.attempt) FROM attempt
                                  WHERE attempt.log = item.log AND attempt.seq = item.seq), 0) AS attempts,
       result.worker AS worker, result.code AS code, result.message AS message,
       result.duration_ms AS duration_ms, result.accepted_ms AS accepted_ms
  FROM item
  JOIN log ON log.log = item.log
  LEFT JOIN result ON result.log = item.log AND result.seq = item.seq
"""
"""For people: `open` is pending, assigned or running (which attempts are in flight is packed in `assignment.keys`)."""

ITEM_STATE_VIEW_2 = ITEM_STATE_VIEW.replace(
    """       COALESCE(result.attempt, (SELECT MAX(attempt.attempt) FROM attempt
                                  WHERE attempt.log = item.log AND attempt.seq = item.seq), 0) AS attempts,
""",
    """       (SELECT COUNT(*) FROM attempt
         WHERE attempt.log = item.log AND attempt.seq = item.seq AND attempt.began_ms > 0)
       + CASE WHEN result.attempt > 0 AND NOT EXISTS (
           SELECT 1 FROM attempt WHERE attempt.log = item.log AND attempt.seq = item.seq
              AND attempt.attempt = result.attempt) THEN 1 ELSE 0 END AS attempts,
""",
)
"""`attempts` that began, and no longer all assignments."""
