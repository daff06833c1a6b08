"""Durations and failure rates of tests from earlier runs, in an SQLite file of the project.

Durations follow the public tool: P75 of the newest passed and of the newest failed tries, weighted by how often the
test fails; then the mean of the group; then a default.
"""

from __future__ import annotations

import json
import sqlite3
from collections import defaultdict
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

from rollout.model.errors import ConfigError
from rollout.workloads.test.cases import GOOD, Case, CaseResult, Status

RESERVOIR = 20
"""Samples kept of a test: the newest passed tries, as many failed ones, and the newest runs."""

DEFAULT_S = 1.0
_BUSY_S = 60.0
_RUNS_OF_PASSED = 200
"""Number of runs after which a passed result is dropped, unless it was used meanwhile."""
_SCHEMA = """
CREATE TABLE IF NOT EXISTS run (number INTEGER PRIMARY KEY, id TEXT NOT NULL UNIQUE, at REAL NOT NULL);
CREATE TABLE IF NOT EXISTS test (
  "group" TEXT NOT NULL, id TEXT NOT NULL,
  tries INTEGER NOT NULL, failures INTEGER NOT NULL,
  passed_s TEXT NOT NULL, failed_s TEXT NOT NULL,  -- JSON: seconds of the newest tries, the newest last
  runs TEXT NOT NULL,  -- JSON: [number of the run, status] of the newest
  PRIMARY KEY ("group", id)
) WITHOUT ROWID;
-- Tests that passed: a hash of all that the result depends on, the run it is of, and the last that looked for it.
CREATE TABLE IF NOT EXISTS passed (key BLOB PRIMARY KEY, "in" TEXT NOT NULL, seen INTEGER NOT NULL) WITHOUT ROWID;
"""
_READ = 'SELECT "group", id, tries, failures, passed_s, failed_s, runs FROM test'
_READ_DURATIONS = _READ.replace("runs", "'[]'")
_WRITE = "INSERT OR REPLACE INTO test VALUES (?, ?, ?, ?, ?, ?, ?)"
_Row = tuple[str, str, int, int, str, str, str]


@dataclass(frozen=True, slots=True)
class TestHistory:
    """The history of a test. `statuses` are those of its newest runs by number of the run, the newest last."""

    __test__ = False

    group: str
    id: str
    tries: int = 0
    failures: int = 0
    passed_s: tuple[float, ...] = ()
    failed_s: tuple[float, ...] = ()
    statuses: tuple[tuple[int, Status], ...] = ()

    @property
    def failure_rate(self) -> float:
        return self.failures / self.tries if self.tries else 0.0

    @property
    def flaky(self) -> int:
        """Number of the newest runs in which the test was flaky."""
        return sum(status is Status.FLAKY for _, status in self.statuses)

    @property
    def expected_s(self) -> float:
        """P75 of the durations, weighted by failures."""
        if not self.passed_s or not self.failed_s:
            return _p75(self.passed_s or self.failed_s)
        rate = self.failure_rate
        return (1 - rate) * _p75(self.passed_s) + rate * _p75(self.failed_s)

    def after(self, run: int, result: CaseResult, keep: int) -> TestHistory:
        passed = tuple(round(one.seconds, 6) for one in result.tries if one.outcome in GOOD)
        failed = tuple(round(one.seconds, 6) for one in result.tries if one.outcome not in GOOD)
        return TestHistory(
            self.group,
            self.id,
            self.tries + len(result.tries),
            self.failures + len(failed),
            (self.passed_s + passed)[-keep:],
            (self.failed_s + failed)[-keep:],
            (*self.statuses, (run, result.status))[-keep:],
        )


class History:
    """The file at `path`, created by the first record. Several processes may use it at once.

    All methods that read or write raise ConfigError if the file cannot be used.
    """

    def __init__(self, path: Path, *, reservoir: int = RESERVOIR, default_s: float = DEFAULT_S) -> None:
        self.path = path
        self._keep = max(reservoir, 1)
        self._default_s = default_s

    def expected(self) -> Callable[[Case], float]:
        """Return a function that estimates the duration of a try, in seconds."""
        known = {(test.group, test.id): test.expected_s for test in self._read(_READ_DURATIONS)}
        of_group = defaultdict[str, list[float]](list)
        for (group, _), seconds in known.items():
            of_group[group].append(seconds)
        means = {group: sum(values) / len(values) for group, values in of_group.items()}
        return lambda case: known.get((case.group, case.id), means.get(case.group, self._default_s))

    def record(
        self, run_id: str, at: float, results: Iterable[CaseResult], keys: Mapping[tuple[str, str], bytes] = {}
    ) -> bool:
        """Record a run. `at` is in Unix seconds. `keys`, by group and id, are those under which `passed` finds passed
        tests. Returns False if the run is already recorded."""
        with self._open() as db, db:
            db.execute("BEGIN IMMEDIATE")
            added = db.execute("INSERT OR IGNORE INTO run (id, at) VALUES (?, ?)", (run_id, at))
            if not added.rowcount or added.lastrowid is None:
                return False
            known = {(test.group, test.id): test for test in _tests(db.execute(_READ))}
            for result in results:
                key = (result.group, result.id)
                if result.status is Status.PASSED and key in keys:
                    row = (keys[key], result.tries[-1].cached or run_id, added.lastrowid)
                    db.execute("INSERT OR REPLACE INTO passed VALUES (?, ?, ?)", row)
                if result.tries[-1].cached:
                    continue
                known[key] = test = known.get(key, TestHistory(*key)).after(added.lastrowid, result, self._keep)
                db.execute(_WRITE, _row(test))
            db.execute("DELETE FROM passed WHERE seen <= ?", (added.lastrowid - _RUNS_OF_PASSED,))
        return True

    def passed(self) -> dict[bytes, str]:
        """Return, by key, the run in which a test passed."""
        if not self.path.exists():
            return {}
        with self._open() as db:
            return dict(db.execute('SELECT key, "in" FROM passed'))

    def tests(self) -> list[TestHistory]:
        """Return all known tests by group and id; empty if there is no file."""
        return self._read(_READ)

    def _read(self, query: str) -> list[TestHistory]:
        if not self.path.exists():
            return []
        with self._open() as db:
            return list(_tests(db.execute(query)))

    def runs(self) -> dict[str, int]:
        """Return the numbers of the runs by id, the oldest first."""
        if not self.path.exists():
            return {}
        with self._open() as db:
            return dict(db.execute("SELECT id, number FROM run ORDER BY number"))

    @contextmanager
    def _open(self) -> Generator[sqlite3.Connection]:
        try:
            with closing(sqlite3.connect(self.path, timeout=_BUSY_S, isolation_level=None)) as db:
                db.execute("PRAGMA journal_mode = WAL")
                db.executescript(_SCHEMA)
                yield db
        except (sqlite3.Error, ValueError) as error:
            raise ConfigError(
                f"{self.path}: the history of tests cannot be used ({error}). Move the file away to begin a new one, "
                f'or name another one: [history] path = "FILE"'
            ) from None


def _tests(rows: Iterable[_Row]) -> Iterator[TestHistory]:
    for group, id, tries, failures, passed_s, failed_s, runs in rows:
        statuses = tuple((number, Status(status)) for number, status in json.loads(runs))
        yield TestHistory(
            group, id, tries, failures, tuple(json.loads(passed_s)), tuple(json.loads(failed_s)), statuses
        )


def _row(test: TestHistory) -> _Row:
    return (
        test.group,
        test.id,
        test.tries,
        test.failures,
        json.dumps(test.passed_s),
        json.dumps(test.failed_s),
        json.dumps(test.statuses),
    )


def _p75(seconds: Sequence[float]) -> float:
    ordered = sorted(seconds)
    return ordered[round(0.75 * (len(ordered) - 1))] if ordered else DEFAULT_S
