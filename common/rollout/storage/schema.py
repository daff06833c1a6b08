"""Every table of the database, in PostgreSQL's dialect; SQLite has other names for a few types.

The hot tables (`item`, `result`, `assignment`) have narrow rows that are written once. Their key is (log, seq), which
grows; they have no other unique index, because random keys in a B-tree halve the throughput of inserts.

The SQL is text, so a coordinator starts without a library that would generate it. These are texts of published
migrations: they never change, and later changes are separate texts.
"""

from __future__ import annotations

from typing import Literal

DialectName = Literal["sqlite", "postgresql"]

SQLITE_WORDS = {"BIGINT": "INTEGER", "BYTEA": "BLOB", ' COLLATE "C"': ""}
"""SQLite's INTEGER has 64 bits, and only it can be the rowid. Text is always compared by UTF-8 bytes."""


def statements_of(sql: str, dialect: DialectName) -> list[str]:
    """Return the statements one by one, in `dialect`."""
    if dialect == "sqlite":
        for word, theirs in SQLITE_WORDS.items():
            sql = sql.replace(word, theirs)
    return [text for part in sql.split(";\n") if (text := part.strip())]


# The object tables may be there already: a store of objects can open the database first.
TABLES = """
CREATE TABLE IF NOT EXISTS lease (
    one BIGINT NOT NULL,  -- always 1
    holder TEXT NOT NULL,
    epoch BIGINT NOT NULL,
    batch BIGINT NOT NULL,
    beat BIGINT NOT NULL,
    released BIGINT DEFAULT 0 NOT NULL,
    address TEXT DEFAULT '' NOT NULL,
    PRIMARY KEY (one)
);

-- `next_log` after deletions, so that the number of a deleted log is never given out again.
CREATE TABLE IF NOT EXISTS counter (
    name TEXT NOT NULL,
    value BIGINT NOT NULL,
    PRIMARY KEY (name)
);

CREATE TABLE IF NOT EXISTS run (
    run_id TEXT NOT NULL,
    workload TEXT NOT NULL,
    name TEXT DEFAULT '' NOT NULL,
    state TEXT NOT NULL,
    reason TEXT DEFAULT '' NOT NULL,
    item_order TEXT NOT NULL,
    root_log BIGINT NOT NULL,
    priority BIGINT DEFAULT 0 NOT NULL,
    spec TEXT NOT NULL,  -- JSON, without `config`
    config BYTEA NOT NULL,  -- canonical JSON, byte for byte as submitted
    created_ms BIGINT DEFAULT 0 NOT NULL,
    updated_ms BIGINT DEFAULT 0 NOT NULL,
    ended_ms BIGINT DEFAULT 0 NOT NULL,
    stop_submitting BIGINT DEFAULT 0 NOT NULL,
    pausing_until_ms BIGINT DEFAULT 0 NOT NULL,
    survivors TEXT DEFAULT '[]' NOT NULL,
    PRIMARY KEY (run_id)
);
CREATE INDEX IF NOT EXISTS run_created ON run (created_ms);

CREATE TABLE IF NOT EXISTS log (
    log BIGINT NOT NULL,
    run_id TEXT NOT NULL,
    parent_log BIGINT DEFAULT 0 NOT NULL,
    parent_seq BIGINT DEFAULT 0 NOT NULL,
    submitted BIGINT DEFAULT 0 NOT NULL,
    sealed BIGINT DEFAULT 0 NOT NULL,
    cursor BIGINT DEFAULT 0 NOT NULL,
    done BIGINT DEFAULT 0 NOT NULL,
    failed BIGINT DEFAULT 0 NOT NULL,
    cancelled BIGINT DEFAULT 0 NOT NULL,
    skipped BIGINT DEFAULT 0 NOT NULL,
    attempts BIGINT DEFAULT 0 NOT NULL,
    retried BIGINT DEFAULT 0 NOT NULL,
    worker_lost BIGINT DEFAULT 0 NOT NULL,
    stale BIGINT DEFAULT 0 NOT NULL,
    units_in BIGINT DEFAULT 0 NOT NULL,
    units_out BIGINT DEFAULT 0 NOT NULL,
    extra TEXT DEFAULT '{}' NOT NULL,
    PRIMARY KEY (log)
);
CREATE INDEX IF NOT EXISTS log_run ON log (run_id);

-- Logs of deleted runs, whose rows go in chunks.
CREATE TABLE IF NOT EXISTS purge (
    log BIGINT NOT NULL,
    PRIMARY KEY (log)
);

CREATE TABLE IF NOT EXISTS lane (
    run_id TEXT NOT NULL,
    lane TEXT NOT NULL,
    done BIGINT DEFAULT 0 NOT NULL,
    failed BIGINT DEFAULT 0 NOT NULL,
    consecutive_failures BIGINT DEFAULT 0 NOT NULL,
    pruned_at BIGINT DEFAULT -1 NOT NULL,
    PRIMARY KEY (run_id, lane)
);

CREATE TABLE IF NOT EXISTS spec (
    run_id TEXT NOT NULL,
    idx BIGINT NOT NULL,
    body TEXT NOT NULL,
    PRIMARY KEY (run_id, idx)
);

CREATE TABLE IF NOT EXISTS item (
    log BIGINT NOT NULL,
    seq BIGINT NOT NULL,
    id BYTEA NOT NULL,
    spec BIGINT DEFAULT 0 NOT NULL,
    payload BYTEA,  -- either this
    object_id BYTEA,  -- or these three
    object_offset BIGINT,
    object_length BIGINT,
    PRIMARY KEY (log, seq)
);
CREATE INDEX IF NOT EXISTS item_object ON item (object_id) WHERE object_id IS NOT NULL;

CREATE TABLE IF NOT EXISTS result (
    log BIGINT NOT NULL,
    seq BIGINT NOT NULL,
    attempt BIGINT NOT NULL,
    outcome SMALLINT NOT NULL,
    data BYTEA,
    object_id BYTEA,
    object_offset BIGINT,
    object_length BIGINT,
    code TEXT,  -- NULL: no failure
    message TEXT,
    flags SMALLINT,  -- of the failure: 1 retryable, 2 worker_lost
    worker TEXT DEFAULT '' NOT NULL,
    duration_ms BIGINT DEFAULT 0 NOT NULL,
    units_in BIGINT DEFAULT 0 NOT NULL,
    units_out BIGINT DEFAULT 0 NOT NULL,
    accepted_ms BIGINT DEFAULT 0 NOT NULL,
    position BIGINT,  -- arrival order: place in the commit log
    pruned_at BIGINT,
    PRIMARY KEY (log, seq)
);
CREATE INDEX IF NOT EXISTS result_object ON result (object_id) WHERE object_id IS NOT NULL;
CREATE INDEX IF NOT EXISTS result_position ON result (log, position) WHERE position IS NOT NULL;

CREATE TABLE IF NOT EXISTS assignment (
    batch BIGINT NOT NULL,
    worker TEXT NOT NULL,
    at_ms BIGINT DEFAULT 0 NOT NULL,
    n BIGINT DEFAULT 0 NOT NULL,
    keys BYTEA NOT NULL,
    PRIMARY KEY (batch)
);

-- Ends of attempts that did not end their item. The usual end of an attempt is its result, and has no row here.
CREATE TABLE IF NOT EXISTS attempt (
    log BIGINT NOT NULL,
    seq BIGINT NOT NULL,
    attempt BIGINT NOT NULL,
    worker TEXT DEFAULT '' NOT NULL,
    ending TEXT NOT NULL,
    code TEXT DEFAULT '' NOT NULL,
    message TEXT DEFAULT '' NOT NULL,
    at_ms BIGINT DEFAULT 0 NOT NULL,
    not_before_ms BIGINT DEFAULT 0 NOT NULL,
    PRIMARY KEY (log, seq, attempt)
);

CREATE TABLE IF NOT EXISTS worker (
    incarnation TEXT NOT NULL,
    host_id TEXT DEFAULT '' NOT NULL,
    inventory TEXT DEFAULT '{}' NOT NULL,
    state TEXT NOT NULL,
    registered_ms BIGINT DEFAULT 0 NOT NULL,
    ended_ms BIGINT DEFAULT 0 NOT NULL,
    reason TEXT DEFAULT '' NOT NULL,
    PRIMARY KEY (incarnation)
);
CREATE INDEX IF NOT EXISTS worker_registered ON worker (registered_ms);

CREATE TABLE IF NOT EXISTS kv (
    namespace TEXT COLLATE "C" NOT NULL,
    "key" TEXT COLLATE "C" NOT NULL,
    value BYTEA NOT NULL,
    PRIMARY KEY (namespace, "key")
);

-- One row. Writers lock it, so revisions become visible in their order.
CREATE TABLE IF NOT EXISTS kv_head (
    one BIGINT NOT NULL,
    revision BIGINT DEFAULT 0 NOT NULL,
    PRIMARY KEY (one)
);

CREATE TABLE IF NOT EXISTS kv_change (
    revision BIGINT NOT NULL,
    idx BIGINT NOT NULL,
    namespace TEXT COLLATE "C" NOT NULL,
    "key" TEXT COLLATE "C" NOT NULL,
    value BYTEA,
    PRIMARY KEY (revision, idx)
);

CREATE TABLE IF NOT EXISTS object (
    object_id BYTEA NOT NULL,
    size BIGINT NOT NULL,
    created_ms BIGINT NOT NULL,
    PRIMARY KEY (object_id)
);

CREATE TABLE IF NOT EXISTS object_chunk (
    object_id BYTEA NOT NULL,
    idx BIGINT NOT NULL,
    data BYTEA NOT NULL,
    PRIMARY KEY (object_id, idx)
);

CREATE TABLE IF NOT EXISTS object_pin (
    object_id BYTEA NOT NULL,
    holder TEXT NOT NULL,
    expires_ms BIGINT NOT NULL,
    PRIMARY KEY (object_id, holder)
);
CREATE INDEX IF NOT EXISTS object_pin_holder ON object_pin (holder);

-- For people: `open` is pending, assigned or running (which attempts are in flight is packed in `assignment.keys`).
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
  LEFT JOIN result ON result.log = item.log AND result.seq = item.seq;

INSERT INTO kv_head (one, revision) VALUES (1, 0);
"""

ATTEMPTS_BEGAN = """
-- 0: it never began.
ALTER TABLE attempt ADD COLUMN began_ms BIGINT DEFAULT 0 NOT NULL;
-- Attempts that failed, or were lost, had begun; since when is not known any more.
UPDATE attempt SET began_ms = at_ms WHERE ending IN ('failed', 'timeout', 'worker_lost');

-- What people ask for: rows that failed, that were tried more than once, and what failed last. Each entry is of an end
-- that is unusual, so that a row which ends at the first try costs none.
CREATE INDEX IF NOT EXISTS log_parent ON log (parent_log, parent_seq) WHERE parent_log > 0;
CREATE INDEX IF NOT EXISTS result_failed ON result (log, seq) WHERE outcome = 2;
CREATE INDEX IF NOT EXISTS result_failed_at ON result (log, accepted_ms) WHERE outcome = 2;
CREATE INDEX IF NOT EXISTS attempt_began ON attempt (log, seq) WHERE began_ms > 0;
CREATE INDEX IF NOT EXISTS attempt_failed_at ON attempt (log, at_ms)
    WHERE ending IN ('failed', 'timeout', 'worker_lost');

-- `attempts` that began, and no longer all assignments.
DROP VIEW item_state;
CREATE VIEW item_state AS
SELECT log.run_id AS run_id, item.log AS log, item.seq AS seq,
       CASE result.outcome
            WHEN 1 THEN CASE WHEN COALESCE(result.position, result.seq) < log.cursor THEN 'done' ELSE 'accepted' END
            WHEN 2 THEN 'failed' WHEN 3 THEN 'cancelled' WHEN 4 THEN 'skipped'
            ELSE 'open' END AS state,
       (SELECT COUNT(*) FROM attempt
         WHERE attempt.log = item.log AND attempt.seq = item.seq AND attempt.began_ms > 0)
       + CASE WHEN result.attempt > 0 AND NOT EXISTS (
           SELECT 1 FROM attempt WHERE attempt.log = item.log AND attempt.seq = item.seq
              AND attempt.attempt = result.attempt) THEN 1 ELSE 0 END AS attempts,
       result.worker AS worker, result.code AS code, result.message AS message,
       result.duration_ms AS duration_ms, result.accepted_ms AS accepted_ms
  FROM item
  JOIN log ON log.log = item.log
  LEFT JOIN result ON result.log = item.log AND result.seq = item.seq;
"""

ENDED_BY = """
-- Who ended it by a command; '': nobody did.
ALTER TABLE run ADD COLUMN ended_by TEXT DEFAULT '' NOT NULL;
"""

OUTPUT_AND_EVENTS = """
-- What children of a run printed, in chunks as workers shipped them.
CREATE TABLE IF NOT EXISTS output (
    run_id TEXT NOT NULL,
    position BIGINT NOT NULL,  -- bytes of the run's output up to its end
    size BIGINT NOT NULL,
    worker TEXT NOT NULL,
    lines BYTEA NOT NULL,
    PRIMARY KEY (run_id, position)
);

-- What happened, for people: the newest of it.
CREATE TABLE IF NOT EXISTS event (
    number BIGINT NOT NULL,
    at_ms BIGINT NOT NULL,
    event TEXT NOT NULL,
    level TEXT NOT NULL,
    run_id TEXT NOT NULL,
    fields TEXT NOT NULL,  -- JSON
    PRIMARY KEY (number)
);
"""

INVALID_ROWS = """
-- Of the failed: rows that could not be used.
ALTER TABLE log ADD COLUMN invalid BIGINT DEFAULT 0 NOT NULL;
CREATE INDEX IF NOT EXISTS event_run ON event (run_id, number);
"""

KEPT_OBJECTS = """
-- Objects that results name in their data, such as snapshots: they stay until they are let go, and are freed then.
CREATE TABLE IF NOT EXISTS kept (
    log BIGINT NOT NULL,
    seq BIGINT NOT NULL,
    object_id BYTEA NOT NULL,
    let_go SMALLINT DEFAULT 0 NOT NULL,
    PRIMARY KEY (log, seq, object_id)
);
CREATE INDEX IF NOT EXISTS kept_let_go ON kept (log, seq) WHERE let_go = 1;
CREATE INDEX IF NOT EXISTS kept_object ON kept (object_id);
"""

EVIDENCE = """
-- What an attempt left behind that failed: inline, or the slice of an object.
ALTER TABLE attempt ADD COLUMN data BYTEA;
ALTER TABLE attempt ADD COLUMN object_id BYTEA;
ALTER TABLE attempt ADD COLUMN object_offset BIGINT;
ALTER TABLE attempt ADD COLUMN object_length BIGINT;
ALTER TABLE attempt ADD COLUMN units_in BIGINT DEFAULT 0 NOT NULL;
ALTER TABLE attempt ADD COLUMN units_out BIGINT DEFAULT 0 NOT NULL;
CREATE INDEX IF NOT EXISTS attempt_object ON attempt (object_id) WHERE object_id IS NOT NULL;
-- The attempt that left the object behind; 0: the result of the item names it.
ALTER TABLE kept ADD COLUMN attempt BIGINT DEFAULT 0 NOT NULL;
"""

HELD_OBJECTS = """
-- Of an object that a parent keeps for its children (attempt -1): the worker that stored it.
ALTER TABLE kept ADD COLUMN worker TEXT DEFAULT '' NOT NULL;
"""
