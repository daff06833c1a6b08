"""Every query of the ledger, named and described, for both databases.

Parameters are `:name`, as in sqlite3; `for_postgres` numbers them. Sets are passed whole and differ by dialect: the
adapters fill in `{given}`, rows of (log, seq, attempt, n), `{batches}`, a condition, and others such as `{seqs}`, one
column each.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache

from rollout.model.item import AttemptEnd, Outcome
from rollout.model.run import ENDED
from rollout.model.worker import WorkerState

from rollout_coordinator.core.step import HELD

ENDED_STATES = ", ".join(f"'{state.value}'" for state in sorted(ENDED))
FAILURES = f"('{AttemptEnd.FAILED.value}', '{AttemptEnd.TIMEOUT.value}')"
LOST = f"'{AttemptEnd.WORKER_LOST.value}'"

_NAME = re.compile(r"(?<!:):([a-z_]+)")


@cache
def for_postgres(query: str) -> tuple[str, tuple[str, ...]]:
    """Return the query with $1, $2 ... and the names they stand for."""
    names: list[str] = []

    def number(match: re.Match[str]) -> str:
        name = match.group(1)
        if name not in names:
            names.append(name)
        return f"${names.index(name) + 1}"

    return _NAME.sub(number, query), tuple(names)


# ---- lease

READ_LEASE = "SELECT holder, epoch, batch, beat, released, address FROM lease WHERE one = 1"

# From absent only.
INSERT_LEASE = """
INSERT INTO lease (one, holder, epoch, batch, beat, released, address)
VALUES (1, :holder, :epoch, :batch, :beat, :released, :address) ON CONFLICT (one) DO NOTHING
"""

# Compare-and-swap over every field.
SWAP_LEASE = """
UPDATE lease SET holder = :holder, epoch = :epoch, batch = :batch, beat = :beat, released = :released,
                 address = :address
 WHERE one = 1 AND holder = :old_holder AND epoch = :old_epoch AND batch = :old_batch AND beat = :old_beat
   AND released = :old_released AND address = :old_address
"""

# PostgreSQL only, before a steal: ends the session in whose unfinished transaction the row is. Where the leader fell
# silent between two messages of one statement, neither statement_timeout nor idle_in_transaction_session_timeout ends
# it, and the row would stay locked until TCP gives up, hours later.
FREE_LEASE = """
SELECT pg_terminate_backend(activity.pid)
  FROM lease JOIN pg_stat_activity AS activity ON activity.backend_xid = lease.xmax
 WHERE lease.one = 1 AND activity.usename = current_user AND activity.pid <> pg_backend_pid()
"""

# Whatever the batch is: the leader commits while it renews.
RENEW_LEASE = """
UPDATE lease SET beat = beat + 1 WHERE one = 1 AND holder = :holder AND epoch = :epoch AND released = 0
"""

# The fence and the number of a transaction, in one statement.
FENCE = "UPDATE lease SET batch = batch + 1 WHERE epoch = :epoch AND batch = :batch"


# ---- bulk writes: what `Bulk` below fills in


@dataclass(frozen=True, slots=True)
class Bulk:
    """Rows of one table, inserted in few statements. `types` are PostgreSQL's, for unnest."""

    table: str
    columns: tuple[str, ...]
    types: tuple[str, ...]
    conflict: str = ""

    @property
    def insert(self) -> str:
        return f"INSERT INTO {self.table} ({', '.join(self.columns)})"

    @cache  # noqa: B019 - of the few constants below, with the few sets of columns there are
    def only(self, names: tuple[str, ...]) -> Bulk:
        """Return the same with some of its columns, in the order of `names`."""
        kinds = dict(zip(self.columns, self.types, strict=True))
        return Bulk(self.table, names, tuple(kinds[name] for name in names), self.conflict)


def _upsert(key: tuple[str, ...], columns: tuple[str, ...]) -> str:
    changes = ", ".join(f"{column} = excluded.{column}" for column in columns if column not in key)
    return f" ON CONFLICT ({', '.join(key)}) DO UPDATE SET {changes}"


def _bulk(table: str, shape: str, key: tuple[str, ...] = (), ignore: bool = False) -> Bulk:
    pairs = [part.split() for part in shape.split(",")]
    columns = tuple(name for name, _ in pairs)
    conflict = " ON CONFLICT DO NOTHING" if ignore else _upsert(key, columns) if key else ""
    return Bulk(table, columns, tuple(kind for _, kind in pairs), conflict)


RUNS = _bulk(
    "run",
    "run_id text, workload text, name text, state text, reason text, item_order text, root_log bigint, priority bigint,"
    "spec text, config bytea, created_ms bigint, updated_ms bigint, ended_ms bigint, stop_submitting bigint,"
    "pausing_until_ms bigint, survivors text, ended_by text",
    key=("run_id",),
)
LOGS = _bulk(
    "log",
    "log bigint, run_id text, parent_log bigint, parent_seq bigint, submitted bigint, sealed bigint, cursor bigint,"
    "done bigint, failed bigint, cancelled bigint, skipped bigint, attempts bigint, retried bigint, worker_lost bigint,"
    "stale bigint, units_in bigint, units_out bigint, extra text, invalid bigint",
    key=("log",),
)
LANES = _bulk(
    "lane",
    "run_id text, lane text, done bigint, failed bigint, consecutive_failures bigint, pruned_at bigint",
    key=("run_id", "lane"),
)
SPECS = _bulk("spec", "run_id text, idx bigint, body text", key=("run_id", "idx"))
WORKERS = _bulk(
    "worker",
    "incarnation text, host_id text, inventory text, state text, registered_ms bigint, ended_ms bigint, reason text",
    key=("incarnation",),
)
ITEMS = _bulk(
    "item",
    "log bigint, seq bigint, id bytea, spec bigint, payload bytea, object_id bytea, object_offset bigint,"
    "object_length bigint",
)
# No conflict clause: a second result of an item is a fault and fails the transaction.
RESULTS = _bulk(
    "result",
    "log bigint, seq bigint, attempt bigint, outcome smallint, data bytea, object_id bytea, object_offset bigint,"
    "object_length bigint, code text, message text, flags smallint, worker text, duration_ms bigint, units_in bigint,"
    "units_out bigint, accepted_ms bigint, position bigint",
)
ASSIGNMENTS = _bulk("assignment", "batch bigint, worker text, at_ms bigint, n bigint, keys bytea")
# The first word on how an attempt ended stands.
ATTEMPTS = _bulk(
    "attempt",
    "log bigint, seq bigint, attempt bigint, worker text, ending text, code text, message text, at_ms bigint,"
    "not_before_ms bigint, began_ms bigint, units_in bigint, units_out bigint, data bytea, object_id bytea,"
    "object_offset bigint, object_length bigint",
    ignore=True,
)

SPARED = 2
"""Value of `kept.let_go`: never to be released. 1 means to be freed."""
KEPT_OF_RUN = """
SELECT kept.seq, kept.object_id, kept.attempt FROM kept JOIN log ON log.log = kept.log
 WHERE log.run_id = :run_id AND log.parent_log = 0 AND kept.let_go <> 1 AND kept.attempt >= 0
 ORDER BY kept.seq, kept.object_id
"""
LET_GO_OF_RUN = """
UPDATE kept SET let_go = 1 WHERE seq = :seq AND let_go = 0
   AND log IN (SELECT log FROM log WHERE run_id = :run_id AND parent_log = 0)
"""
LET_GO = "UPDATE kept SET let_go = 1 WHERE log = :log AND seq = :seq AND let_go = 0"
LET_GO_OF_ATTEMPT = f"{LET_GO} AND attempt = :attempt"
LET_GO_OF_HELD = f"{LET_GO} AND attempt = {HELD} AND object_id = :object_id"
TO_FREE = """
SELECT kept.log, kept.seq, kept.object_id, COALESCE(NULLIF(kept.worker, ''), attempt.worker, result.worker, '')
  FROM kept LEFT JOIN result ON result.log = kept.log AND result.seq = kept.seq
  LEFT JOIN attempt ON attempt.log = kept.log AND attempt.seq = kept.seq AND attempt.attempt = kept.attempt
 WHERE kept.let_go = 1 ORDER BY kept.log, kept.seq, kept.object_id LIMIT :n
"""
FREED = "DELETE FROM kept WHERE log = :log AND seq = :seq AND object_id = :object_id AND let_go = 1"
# What is named again is kept again.
KEPT = _bulk(
    "kept",
    "log bigint, seq bigint, object_id bytea, attempt bigint, let_go smallint, worker text",
    key=("log", "seq", "object_id"),
)

OUTPUTS = _bulk("output", "run_id text, position bigint, size bigint, worker text, lines bytea")
EVENTS = _bulk("event", "number bigint, at_ms bigint, event text, level text, run_id text, fields text")

RUN_COLUMNS = ", ".join(f"run.{column}" for column in RUNS.columns)
LOG_COLUMNS = ", ".join(f"log.{column}" for column in LOGS.columns)
LANE_COLUMNS = ", ".join(f"lane.{column}" for column in LANES.columns)
WORKER_COLUMNS = ", ".join(WORKERS.columns)

# Accepted results behind a lane's prune point, of which {given} has the position: they stay as evidence.
PRUNE = """
UPDATE result SET outcome = :outcome, pruned_at = given.attempt
  FROM {given} AS given WHERE result.log = given.log AND result.seq = given.seq
"""
RETIRE = "DELETE FROM assignment WHERE batch {batches}"

# ---- deletion: the run is gone at once, its rows go later in chunks

# Remember the highest log number, so that a deleted one is never given out again.
KEEP_NEXT_LOG = """
INSERT INTO counter (name, value) SELECT 'next_log', COALESCE(MAX(log), 0) + 1 FROM log WHERE TRUE
ON CONFLICT (name) DO UPDATE SET value = CASE WHEN excluded.value > counter.value
                                              THEN excluded.value ELSE counter.value END
"""
MARK_PURGE = "INSERT INTO purge (log) SELECT log FROM log WHERE run_id = :run_id ON CONFLICT DO NOTHING"
DELETE_RUN = tuple(f"DELETE FROM {table} WHERE run_id = :run_id" for table in ("log", "lane", "spec", "run", "output"))

NEXT_PURGE = "SELECT log FROM purge ORDER BY log LIMIT 1"
PURGE_ROWS = tuple(
    f"DELETE FROM {table} WHERE log = :log AND seq IN (SELECT seq FROM {table} WHERE log = :log ORDER BY seq LIMIT :n)"
    for table in ("result", "item", "attempt", "kept")
)
END_PURGE = "DELETE FROM purge WHERE log = :log"
# By the index on registered_ms: of rows as old as that, all but those of long-lived workers are to go. The conditions
# once more for the row that is deleted, which may have come back to life meanwhile (PostgreSQL).
_FORGETTABLE = "ended_ms > 0 AND ended_ms < :before AND incarnation NOT IN (SELECT worker FROM assignment)"
FORGET_WORKERS = f"""
DELETE FROM worker WHERE {_FORGETTABLE} AND incarnation IN (
  SELECT incarnation FROM worker WHERE registered_ms < :before AND {_FORGETTABLE} ORDER BY registered_ms LIMIT :n)
"""

# ---- replay

# An ended run is alive while attempts of its are not known to be over.
LIVE = f"(run.state NOT IN ({ENDED_STATES}) OR run.survivors <> '[]')"
LIVE_RUNS = f"SELECT {RUN_COLUMNS} FROM run WHERE {LIVE} ORDER BY created_ms, run_id"

# Logs of some runs. A child log is over when its parent has a result and everything in it is committed.
_LOGS_OF = f"""
SELECT {LOG_COLUMNS}, run.item_order FROM log JOIN run ON run.run_id = log.run_id
 WHERE {{runs}}
   AND (log.parent_log = 0 OR log.cursor < log.submitted
        OR NOT EXISTS (SELECT 1 FROM result
                        WHERE result.log = log.parent_log AND result.seq = log.parent_seq))
 ORDER BY log.log
"""
LIVE_LOGS = _LOGS_OF.format(runs=LIVE)
LOGS_OF_RUN = _LOGS_OF.format(runs="run.run_id = :run_id")
LIVE_LANES = f"""
SELECT {LANE_COLUMNS} FROM lane JOIN run ON run.run_id = lane.run_id
 WHERE {LIVE} ORDER BY lane.run_id, lane.lane
"""
LIVE_SPECS = f"""
SELECT spec.run_id, spec.idx, spec.body FROM spec JOIN run ON run.run_id = spec.run_id
 WHERE {LIVE} ORDER BY spec.run_id, spec.idx
"""
SPECS_OF_RUN = "SELECT run_id, idx, body FROM spec WHERE run_id = :run_id ORDER BY idx"
LIVE_WORKERS = f"SELECT {WORKER_COLUMNS} FROM worker WHERE ended_ms = 0 ORDER BY registered_ms, incarnation"
# The next leader keeps them out too: the newest, the oldest of these first.
QUARANTINED_WORKERS = f"""
SELECT {WORKER_COLUMNS} FROM (
  SELECT {WORKER_COLUMNS} FROM worker WHERE state = '{WorkerState.QUARANTINED.value}'
  ORDER BY ended_ms DESC, incarnation DESC LIMIT :n) AS newest
ORDER BY ended_ms, incarnation
"""
LIVE_ASSIGNMENTS = "SELECT batch, worker, keys FROM assignment ORDER BY batch"

# Gaps and islands: within a contiguous range seq minus its rank is constant. Reads the key's index only.
# {given} is (log, seq, attempt, n): ranges of `log` from `seq` on.
ACCEPTED_RANGES = """
SELECT log, MIN(seq), MAX(seq)
  FROM (SELECT result.log AS log, result.seq AS seq,
               result.seq - ROW_NUMBER() OVER (PARTITION BY result.log ORDER BY result.seq) AS island
          FROM {given} AS given CROSS JOIN result
         WHERE result.log = given.log AND result.seq >= given.seq) AS numbered
 GROUP BY log, island ORDER BY 1, 2
"""

# Who won the groups: the first item of each spec that was done, of those that are committed.
WON = f"""
SELECT item.spec, MIN(result.seq) FROM result JOIN item ON item.log = result.log AND item.seq = result.seq
 WHERE result.log = :log AND result.seq < :before AND result.outcome = {int(Outcome.DONE)}
 GROUP BY item.spec ORDER BY item.spec
"""

# Which of the attempts {given}, of items without a result, are open: those without an `attempt` row of that number.
# CROSS JOIN makes SQLite walk `given` and look the items up, never the other way.
OPEN_ATTEMPTS = f"""
SELECT given.n, item.spec,
       (SELECT COUNT(*) FROM attempt
         WHERE attempt.log = given.log AND attempt.seq = given.seq AND ending IN {FAILURES}),
       (SELECT COUNT(*) FROM attempt
         WHERE attempt.log = given.log AND attempt.seq = given.seq AND ending = {LOST}),
       COALESCE(last.worker, ''), COALESCE(last.code, '')
  FROM {{given}} AS given CROSS JOIN item
  LEFT JOIN attempt AS last
    ON given.attempt > 1 AND last.log = given.log AND last.seq = given.seq AND last.attempt = (
       SELECT MAX(attempt.attempt) FROM attempt
        WHERE attempt.log = given.log AND attempt.seq = given.seq AND attempt.ending IN {FAILURES})
 WHERE item.log = given.log AND item.seq = given.seq
   AND NOT EXISTS (SELECT 1 FROM attempt
                    WHERE attempt.log = given.log AND attempt.seq = given.seq AND attempt.attempt = given.attempt)
"""

NEXT_LOG = """
SELECT MAX(value) FROM (SELECT COALESCE(MAX(log), 0) + 1 AS value FROM log
                        UNION ALL SELECT value FROM counter WHERE name = 'next_log') AS known
"""
NEXT_BATCH = "SELECT COALESCE(MAX(batch), 0) + 1 FROM assignment"

# ---- reads of the core

# Rows without a result, in order. PostgreSQL does not unite a subquery that has an OFFSET with the query around it, so
# each row looks its result up by key. Left to choose, with statistics of an hour ago or none, it makes a hash of every
# result there is, or compares each row with all results of the range. Without `to_seq` it sorts the whole log.
PENDING = """
SELECT item.seq, item.id, item.spec, item.payload, item.object_id, item.object_offset, item.object_length
  FROM item
 WHERE item.log = :log AND item.seq >= :from_seq AND item.seq < :to_seq
   AND NOT EXISTS (SELECT 1 FROM result WHERE result.log = item.log AND result.seq = item.seq LIMIT 1 OFFSET 0)
 ORDER BY item.seq LIMIT :n
"""
LAST_SEQ = "SELECT MAX(seq) FROM item WHERE log = :log"
IDS = "SELECT id FROM item WHERE log = :log AND seq >= :from_seq AND seq < :to_seq ORDER BY seq"
ITEMS_AT = """
SELECT item.seq, item.id, item.spec, item.payload, item.object_id, item.object_offset, item.object_length
  FROM item WHERE item.log = :log AND item.seq IN ({seqs}) ORDER BY item.seq
"""


# History of the attempts that ended without ending their item, with where and by what the last failed.
def _history(chosen: str) -> str:
    return f"""
SELECT tried.seq, attempts, failures, losses, tried.not_before_ms, delay_ms, COALESCE(last.worker, ''),
       COALESCE(last.code, '')
  FROM (SELECT seq, MAX(attempt) AS attempts, SUM(CASE WHEN ending IN {FAILURES} THEN 1 ELSE 0 END) AS failures,
               SUM(CASE WHEN ending = {LOST} THEN 1 ELSE 0 END) AS losses, MAX(not_before_ms) AS not_before_ms,
               MAX(CASE WHEN not_before_ms > 0 THEN not_before_ms - at_ms ELSE 0 END) AS delay_ms,
               MAX(CASE WHEN ending IN {FAILURES} THEN attempt END) AS failed
          FROM attempt WHERE log = :log AND {chosen} GROUP BY seq) AS tried
  LEFT JOIN attempt AS last ON last.log = :log AND last.seq = tried.seq AND last.attempt = tried.failed
"""


HISTORY_BETWEEN = _history("seq >= :from_seq AND seq <= :to_seq")
HISTORY_AT = _history("seq IN ({seqs})")

_RESULT = """result.seq, result.attempt, result.outcome, result.data, result.object_id, result.object_offset,
       result.object_length, result.code, result.message, result.flags"""
RESULTS_BETWEEN = f"""
SELECT {_RESULT}, item.spec
  FROM result JOIN item ON item.log = result.log AND item.seq = result.seq
 WHERE result.log = :log AND result.seq >= :from_seq AND result.seq < :to_seq ORDER BY result.seq
"""

# ---- the commit log

LOG_CURSOR = "SELECT cursor FROM log WHERE log = :log"

# Results of a run in arrival order carry their place.
IS_PLACED = "SELECT position IS NOT NULL FROM result WHERE log = :log LIMIT 1"

# Tries at an item with a result: attempts that began. Most have one, and cost no look-up. An attempt that never began
# and yet ended its item (its group was won, say) has a row of its number in `attempt`.
_TRIES = """CASE WHEN result.attempt > 1 OR result.outcome > 2 THEN
       (SELECT COUNT(*) FROM attempt
         WHERE attempt.log = result.log AND attempt.seq = result.seq AND attempt.began_ms > 0)
       + CASE WHEN result.attempt > 0 AND NOT EXISTS (
           SELECT 1 FROM attempt WHERE attempt.log = result.log AND attempt.seq = result.seq
              AND attempt.attempt = result.attempt) THEN 1 ELSE 0 END
       ELSE result.attempt END"""

_PAGE = f"""
SELECT {_RESULT}, result.duration_ms, result.accepted_ms, result.worker, result.units_in, result.units_out, {_TRIES}"""
_PAGE_ITEM = ", item.id, item.payload, item.object_id, item.object_offset, item.object_length"
_JOIN_ITEM = " JOIN item ON item.log = result.log AND item.seq = result.seq"


def commit_page(placed: bool, payloads: bool) -> str:
    """Return a query for results at positions [from_pos, to_pos), in commit order, with their items if `payloads`."""
    place = "result.position" if placed else "result.seq"
    return (
        f"{_PAGE}{_PAGE_ITEM if payloads else ''}\n  FROM result{_JOIN_ITEM if payloads else ''}\n"
        f" WHERE result.log = :log AND {place} >= :from_pos AND {place} < :to_pos ORDER BY {place}"
    )


# ---- views for the service

RUN_BY_ID = f"SELECT {RUN_COLUMNS} FROM run WHERE run_id = :run_id"
LOG_BY_NUMBER = f"SELECT {LOG_COLUMNS} FROM log WHERE log = :log"
LANES_OF_RUN = f"SELECT {LANE_COLUMNS} FROM lane WHERE run_id = :run_id ORDER BY lane"
NEWEST_RUNS = f"""
SELECT {RUN_COLUMNS} FROM run WHERE :any_state = 1 OR state IN ({{states}})
 ORDER BY created_ms DESC, run_id DESC LIMIT :n
"""

# What a person types for a run. `begins` and `shown` are patterns of an id's characters, which are no wildcards.
FIND_RUNS = """
SELECT run_id, workload, name, state, created_ms FROM run
 WHERE run_id LIKE :begins OR run_id LIKE :shown OR (name <> '' AND substr(name, 1, :name_length) = :name)
 ORDER BY created_ms DESC, run_id DESC LIMIT :n
"""
NEWEST_WORKERS = f"SELECT {WORKER_COLUMNS} FROM worker ORDER BY registered_ms DESC, incarnation DESC LIMIT :n"

# ---- looking into a run: bounded pages, by indexes that hold what is unusual

# Rows that failed for good, from a seq on.
FAILED_SEQS = """
SELECT seq FROM result WHERE log = :log AND outcome = 2 AND seq >= :from_seq ORDER BY seq LIMIT :n
"""
# Rows of which an attempt began and came to nothing.
RETRIED_SEQS = """
SELECT DISTINCT seq FROM attempt WHERE log = :log AND began_ms > 0 AND seq >= :from_seq ORDER BY seq LIMIT :n
"""
# Rows without a result; as PENDING, without their payloads.
OPEN_SEQS = """
SELECT item.seq FROM item
 WHERE item.log = :log AND item.seq >= :from_seq AND item.seq < :to_seq
   AND NOT EXISTS (SELECT 1 FROM result WHERE result.log = item.log AND result.seq = item.seq LIMIT 1 OFFSET 0)
 ORDER BY item.seq LIMIT :n
"""

_STATE = f"""
SELECT item.seq, item.id, result.outcome,
       CASE WHEN COALESCE(result.position, result.seq) < log.cursor THEN 1 ELSE 0 END,
       CASE WHEN result.seq IS NULL THEN
         (SELECT COUNT(*) FROM attempt
           WHERE attempt.log = item.log AND attempt.seq = item.seq AND attempt.began_ms > 0)
       ELSE {_TRIES} END,
       result.worker, result.accepted_ms, result.duration_ms, result.code, SUBSTR(result.message, 1, 4000)"""
STATES_AT = (
    _STATE
    + """
  FROM item JOIN log ON log.log = item.log
  LEFT JOIN result ON result.log = item.log AND result.seq = item.seq
 WHERE item.log = :log AND item.seq IN ({seqs}) ORDER BY item.seq
"""
)
ITEM_AT = (
    _STATE
    + """, item.spec, item.payload, item.object_id, item.object_offset, item.object_length,
       result.data, result.object_id, result.object_offset, result.object_length, result.attempt, result.units_in,
       result.units_out
  FROM item JOIN log ON log.log = item.log
  LEFT JOIN result ON result.log = item.log AND result.seq = item.seq
 WHERE item.log = :log AND item.seq = :seq
"""
)
_ENDED = """
attempt, worker, ending, code, SUBSTR(message, 1, 4000), began_ms, at_ms, units_in, units_out, data, object_id,
       object_offset, object_length"""
# The newest, for there can be many that were given back unstarted.
ATTEMPTS_AT = f"SELECT {_ENDED} FROM attempt WHERE log = :log AND seq = :seq ORDER BY attempt DESC LIMIT :n"
# Those that began and came to nothing, of all rows.
ATTEMPTS_AFTER = f"""
SELECT {_ENDED}, seq FROM attempt
 WHERE log = :log AND began_ms > 0 AND seq >= :seq AND (seq > :seq OR attempt > :attempt)
 ORDER BY seq, attempt LIMIT :n
"""
CHILD_LOG = "SELECT log, submitted, cursor FROM log WHERE parent_log = :log AND parent_seq = :seq AND parent_log > 0"
_FAILURE = "seq, attempt, code, SUBSTR(message, 1, 4000), worker,"
LAST_FAILED = f"""
SELECT {_FAILURE} accepted_ms, 1 FROM result WHERE log = :log AND outcome = 2 ORDER BY accepted_ms DESC LIMIT :n
"""
LAST_FAILED_ATTEMPTS = f"""
SELECT {_FAILURE} at_ms, 0 FROM attempt
 WHERE log = :log AND ending IN ('failed', 'timeout', 'worker_lost') ORDER BY at_ms DESC LIMIT :n
"""
WORKERS_AT = f"SELECT {WORKER_COLUMNS} FROM worker WHERE incarnation IN ({{workers}})"

# ---- history, for people

EPOCH = "SELECT epoch FROM lease WHERE one = 1"
IS_RUN = "SELECT 1 FROM run WHERE run_id = :run_id"
LAST_POSITION = "SELECT COALESCE(MAX(position), 0) FROM output WHERE run_id = :run_id"
# Whole chunks: those of the beginning end below `head`, those of the end begin above `tail`.
CUT_OUTPUT = "DELETE FROM output WHERE run_id = :run_id AND position > :head AND position <= :tail"
OUTPUT_AFTER = """
SELECT position, size, worker, lines FROM output WHERE run_id = :run_id AND position > :after ORDER BY position LIMIT :n
"""
LAST_EVENT = "SELECT COALESCE(MAX(number), 0) FROM event"
OUTPUT_BY_RUN = "SELECT run_id, SUM(size), MAX(position) FROM output GROUP BY run_id ORDER BY run_id"
DROP_OUTPUT = "DELETE FROM output WHERE run_id = :run_id AND position < :last"
# The last chunk stays, empty: by its position a reader knows how much there was.
EMPTY_OUTPUT = "UPDATE output SET size = 0, lines = :nothing WHERE run_id = :run_id AND position = :last"
CUT_EVENTS = "DELETE FROM event WHERE number <= :last"
CUT_EVENTS_OF_RUN = """
DELETE FROM event WHERE run_id = :run_id
   AND number <= (SELECT number FROM event WHERE run_id = :run_id ORDER BY number DESC LIMIT 1 OFFSET :kept)
"""
_EVENTS_OF = """
SELECT number, at_ms, event, level, fields FROM event
 WHERE number > :after
   AND (:every = 1 OR run_id = :run_id OR (run_id = '' AND at_ms >= :from_ms AND at_ms <= :to_ms))
"""
EVENTS_AFTER = f"{_EVENTS_OF} ORDER BY number LIMIT :n"
NEWEST_EVENTS = f"{_EVENTS_OF} ORDER BY number DESC LIMIT :n"

# ---- objects: rows of deleted runs count no longer, though they may still be there

REFERENCED = """
SELECT DISTINCT object_id FROM item WHERE object_id IN ({ids}) AND log NOT IN (SELECT log FROM purge)
UNION
SELECT DISTINCT object_id FROM result WHERE object_id IN ({ids}) AND log NOT IN (SELECT log FROM purge)
UNION
SELECT DISTINCT object_id FROM attempt WHERE object_id IN ({ids}) AND log NOT IN (SELECT log FROM purge)
UNION
SELECT DISTINCT object_id FROM kept WHERE object_id IN ({ids}) AND let_go <> 1 AND log NOT IN (SELECT log FROM purge)
"""
RUN_OBJECTS = """
SELECT DISTINCT item.object_id FROM item JOIN log ON log.log = item.log
 WHERE log.run_id = :run_id AND item.object_id IS NOT NULL
UNION
SELECT DISTINCT result.object_id FROM result JOIN log ON log.log = result.log
 WHERE log.run_id = :run_id AND result.object_id IS NOT NULL
UNION
SELECT DISTINCT attempt.object_id FROM attempt JOIN log ON log.log = attempt.log
 WHERE log.run_id = :run_id AND attempt.object_id IS NOT NULL
UNION
SELECT DISTINCT kept.object_id FROM kept JOIN log ON log.log = kept.log WHERE log.run_id = :run_id
"""
