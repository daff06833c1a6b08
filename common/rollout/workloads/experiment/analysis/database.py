"""A DuckDB database of the facts of runs, which can only answer queries.

It is created from the JSON Lines at each access: the files are the truth, and nothing is cached. Once created, nothing
outside it can be read or written (`enable_external_access`), no setting can be changed (`lock_configuration`), and each
query is one SELECT in a read-only transaction.
"""

from __future__ import annotations

import importlib
import json
import math
import os
import threading
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from rollout.model.errors import ConfigError, InputError
from rollout.workloads.experiment.analysis.columns import FACTS
from rollout.workloads.experiment.analysis.doubts import doubts
from rollout.workloads.experiment.analysis.load import load_sql
from rollout.workloads.experiment.analysis.sources import Pair, Source
from rollout.workloads.experiment.analysis.view_sets import ViewSet
from rollout.workloads.json_form import parse_json

MEMORY = "2GB"
TIME_LIMIT_S = 60.0
_GRACE_S = 5.0
_BATCH = 1_000
_SETTINGS = {
    "autoinstall_known_extensions": False,
    "autoload_known_extensions": False,
    "allow_community_extensions": False,
    "python_enable_replacements": False,
    "memory_limit": MEMORY,
    "temp_directory": "",
    "threads": 1,  # sums of several threads differ in their last digit from one time to the next
}
_LOCK = "SET enable_external_access = false; SET lock_configuration = true;"


class QueryError(InputError):
    """The query cannot be answered."""


class QueryTimeoutError(QueryError):
    """The query took longer than its time limit."""

    code = "query_timeout"


@dataclass(frozen=True, slots=True)
class Answer:
    """The columns of a query by name with their DuckDB types, and its rows as they are read."""

    columns: tuple[str, ...]
    types: tuple[str, ...]
    rows: Iterator[tuple[Any, ...]]


class Database:
    """The database. `notes` say which facts were left out, and why."""

    def __init__(self, connection: Any, view_set: ViewSet, notes: Sequence[str]) -> None:
        self._connection = connection
        self.view_set = view_set
        self.notes = tuple(notes)

    def rows(self, sql: str, values: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
        """Run a statement of our own."""
        return self._connection.execute(sql, list(values)).fetchall()

    def batches(self, sql: str, values: Sequence[Any] = ()) -> Iterator[tuple[Any, ...]]:
        """Run a statement of our own, with one batch in memory at a time; no other statement may run meanwhile."""
        found = self._connection.execute(sql, list(values))
        while batch := found.fetchmany(_BATCH):
            yield from batch

    def views(self) -> list[str]:
        return [name for (name,) in self.rows("SELECT view_name FROM duckdb_views() WHERE NOT internal ORDER BY ALL")]

    @contextmanager
    def query(
        self, sql: str, *, time_limit_s: float = TIME_LIMIT_S, stuck: Callable[[], object] | None = None
    ) -> Generator[Answer]:
        """Answer one read-only statement. `stuck` is called, in a thread of its own, if the statement cannot be
        interrupted within a few seconds of the time limit.

        Raises QueryError if it is something else, is wrong, or needs too much memory, and QueryTimeoutError.
        """
        duckdb = _duckdb()
        self._check(sql)
        with _deadline(self._connection, time_limit_s, stuck):
            try:
                self._connection.execute("BEGIN TRANSACTION READ ONLY")
                cursor = self._connection.execute(sql)
                names = tuple(str(one[0]) for one in cursor.description)
                types = tuple(str(one[1]) for one in cursor.description)
                yield Answer(names, types, self._fetched(cursor))
            except duckdb.InterruptException as error:
                raise QueryTimeoutError(f"the query was stopped: it took longer than {time_limit_s:g} s") from error
            except (duckdb.Error, MemoryError) as error:
                raise QueryError(_message(error)) from error
            finally:
                with suppress(duckdb.Error):
                    self._connection.execute("ROLLBACK")

    def _fetched(self, cursor: Any) -> Iterator[tuple[Any, ...]]:
        while batch := cursor.fetchmany(_BATCH):
            yield from batch

    def _check(self, sql: str) -> None:
        """Raise QueryError if it is not a single read-only statement."""
        duckdb = _duckdb()
        try:
            statements = self._connection.extract_statements(sql)
        except duckdb.Error as error:
            raise QueryError(_message(error)) from error
        if len(statements) != 1:
            raise QueryError(f"the query must be one statement, not {len(statements)}")
        kind = statements[0].type.name
        if kind not in ("SELECT", "EXPLAIN"):
            raise QueryError(
                f"{kind} is refused: a query reads, with SELECT, WITH, FROM, VALUES, EXPLAIN, SHOW, DESCRIBE or "
                "SUMMARIZE"
            )

    def close(self) -> None:
        self._connection.close()


@contextmanager
def open_database(
    sources: Sequence[Source],
    pairs: Sequence[Pair],
    view_set: ViewSet,
    *,
    only: bool = False,
    keep: Path | None = None,
) -> Generator[Database]:
    """Yield a database. `only` is that of `load_sql`. `keep` is a file to keep a copy in; it is replaced atomically, so
    readers of the old one are not disturbed. If no file can be written, a note says so.

    Raises ConfigError if DuckDB is not installed, InputError if the facts are damaged.
    """
    duckdb = _duckdb()
    notes: list[str] = []
    made = None if keep is None else keep.with_name(f".{keep.name}.{os.getpid()}")
    connection: Any = None
    if made is not None and (connection := _file(made, notes)) is not None:
        try:
            left_out = _load(connection, sources, pairs, view_set, only=only)
            connection.execute("CHECKPOINT")
        except (duckdb.Error, InputError) as error:  # perhaps the disk is full; in memory the facts are another matter
            connection.close()
            _remove(made)
            notes.append(f"{made.parent}: the database is not kept: {_message(error)}")
            connection = None
        else:
            notes += left_out
    if connection is None:
        made, connection = None, duckdb.connect(":memory:", config=_SETTINGS)
    try:
        if made is None:
            notes += _load(connection, sources, pairs, view_set, only=only)
        connection.execute(_LOCK)
        yield Database(connection, view_set, notes)
        connection.close()
        if made is not None and keep is not None:
            with suppress(OSError):
                made.replace(keep)
    finally:
        connection.close()
        if made is not None:
            _remove(made)


def _remove(path: Path) -> None:
    with suppress(OSError):
        path.unlink(missing_ok=True)


def _load(
    connection: Any, sources: Sequence[Source], pairs: Sequence[Pair], view_set: ViewSet, *, only: bool
) -> list[str]:
    """Load facts, and return what was left out. A file that grew meanwhile, and may have ended in the middle of a line,
    is read again."""
    duckdb = _duckdb()
    while True:
        notes, sizes = list[str](), _sizes(sources)
        with TemporaryDirectory(prefix="rollout-facts-") as scratch:
            whole = partial(_whole, scratch=Path(scratch), notes=notes)
            sql = load_sql(sources, pairs, view_set, lambda path: str(whole(path)), only=only)  # noqa: B023
            try:
                connection.execute(sql)
            except duckdb.Error as error:
                if _sizes(sources) == sizes:
                    why = _no_object(sources) or f"the facts cannot be read: {_message(error)}"
                    raise InputError(why) from error
            if fault := _not_finite(connection, sources):
                raise InputError(fault)
            return [*notes, *doubts(lambda sql: connection.execute(sql).fetchall(), sources)]


def _sizes(sources: Sequence[Source]) -> list[int]:
    paths = (one.facts / f"{name}.jsonl" for one in sources for name in FACTS)
    return [path.stat().st_size if path.is_file() else 0 for path in paths]


def _no_object(sources: Sequence[Source]) -> str:
    """Return the place of the first line that is not a JSON object, or "": DuckDB may name the line after it."""
    for path in (one.facts / f"{name}.jsonl" for one in sources for name in FACTS):
        if not path.is_file():
            continue
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                try:
                    if line.strip() and not isinstance(parse_json(line), dict):
                        return f"{path}:{number}: must be an object"
                except ValueError as error:
                    return f"{path}:{number}: {error}"
    return ""


def _not_finite(connection: Any, sources: Sequence[Source]) -> str:
    """Return the place of the first number that is not finite, which would spoil any mean, or ""."""
    for name, columns in FACTS.items():
        numbers = [column for column, kind in columns.items() if kind == "DOUBLE"]
        condition = " OR ".join(f"NOT isfinite({column})" for column in numbers)
        if numbers and connection.execute(f"SELECT count(*) FROM facts_{name} WHERE {condition}").fetchall()[0][0]:
            return next(_located(sources, name, numbers), f"facts/{name}.jsonl: a number is not finite")
    return ""


def _located(sources: Sequence[Source], name: str, numbers: Sequence[str]) -> Iterator[str]:
    for path in (one.facts / f"{name}.jsonl" for one in sources):
        if not path.is_file():
            continue
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                row: dict[str, Any] = json.loads(line) if line.strip() else {}
                for column in numbers:
                    if (value := row.get(column)) is not None and not math.isfinite(float(value)):
                        yield f"{path}:{number}: {column}: must be a finite number, not {value}"


def _file(path: Path, notes: list[str]) -> Any | None:
    duckdb = _duckdb()
    try:
        path.parent.mkdir(exist_ok=True)
        path.unlink(missing_ok=True)
        return duckdb.connect(str(path), config=_SETTINGS)
    except (OSError, duckdb.IOException) as error:
        notes.append(f"{path.parent}: the database is not kept: {_message(error)}")
        return None


def _whole(path: Path, scratch: Path, notes: list[str]) -> Path:
    """Return `path`, or a copy without the incomplete last line if it is still being written."""
    if path.suffix != ".jsonl" or not (size := path.stat().st_size):
        return path.resolve()
    with path.open("rb") as file:
        file.seek(size - 1)
        if file.read(1) == b"\n":
            return path.resolve()
        file.seek(0)
        copy = scratch / f"{len(list(scratch.iterdir()))}.jsonl"
        with copy.open("wb") as out:
            for line in file:
                if line.endswith(b"\n"):
                    out.write(line)
    notes.append(f"{path}: its last line is not complete: it is left out")
    return copy


@contextmanager
def _deadline(connection: Any, seconds: float, stuck: Callable[[], object] | None) -> Generator[None]:
    done = threading.Event()

    def watch() -> None:
        if done.wait(seconds):
            return
        for _ in range(int(_GRACE_S * 10)):
            connection.interrupt()
            if done.wait(0.1):
                return
        if stuck is not None:
            stuck()

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def _duckdb() -> Any:
    try:
        return importlib.import_module("duckdb")
    except ImportError as error:
        raise ConfigError(
            "the analysis of experiments needs DuckDB, which is not installed: pip install rollout-engine[experiment]"
        ) from error


def _message(error: BaseException) -> str:
    """Return DuckDB's message without the kind of error, hints for programmers, and the statement."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[0].split("Error: ", 1)[-1].strip()
