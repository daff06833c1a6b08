"""Reads the datasets of a configuration on the client: every row once, before anything starts."""

from __future__ import annotations

import glob
import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from blake3 import blake3

from rollout.model.errors import ConfigError, InputError
from rollout.model.problems import problems
from rollout.objects.tree import scan_directory
from rollout.workloads.input_files import InputFile
from rollout.workloads.input_lines import Line, json_of
from rollout.workloads.json_form import JsonObject
from rollout.workloads.port import InputReader
from rollout.workloads.saved_datasets import INFO, SPLITS, is_dataset, split_directory
from rollout.workloads.source import FileReport, InputReport, Source, looks_remote
from rollout.workloads.train.base_config import DatasetSection
from rollout.workloads.train.config import Kind, SftSection, TrainingSection
from rollout.workloads.train.files import instructions, table_rows
from rollout.workloads.train.report import BadRows, Place
from rollout.workloads.train.rows import (
    LossOn,
    PromptRow,
    Row,
    content_of,
    conversational,
    parse_row,
    refuse_half_pairs,
)

_SUFFIXES = {"jsonl_path": (".jsonl", ".jsonl.gz", ".jsonl.zst", ".ndjson"), "parquet_path": (".parquet",)}
_BATCH = 2000  # rows between two progress calls
_DIGEST = 16
_KINDS_MAX = 50  # of faults that are told apart
_ROOM = 300  # characters for the places of each


@dataclass(slots=True)
class Data:
    """A dataset after reading. `files` are (name in the tree that travels, file). `tables` are (place in the tree, name
    for users) of files or dataset directories. `rows` counts what is trained on; a pair of KTO counts as two.
    `conversations` means that some rows are messages. `columns` are those besides the prompt, for prompts only."""

    kind: str
    report: InputReport
    files: tuple[tuple[str, Path], ...]
    tables: tuple[tuple[str, str], ...]
    rows: int
    contents: set[bytes] = field(default_factory=set[bytes])
    conversations: bool = False
    source: Source | None = None
    columns: set[str] = field(default_factory=set[str])

    def close(self) -> None:
        if self.source is not None:
            self.source.close()

    def config(self) -> JsonObject:
        """Return the configuration for workers: `files` are (place in the tree, name for users)."""
        return {"kind": self.kind, "files": [list(table) for table in self.tables], "manifest": ""}


class _Rows:
    """Checks rows and, if asked to, keeps hashes that identify them. Rows with a fault are collected in `bad` and
    reported together, because all rows often have the same fault."""

    def __init__(self, kind: Kind, loss_on: LossOn, known: set[bytes] | None) -> None:
        self._kind: Kind = kind
        self._loss_on: LossOn = loss_on
        self._known = known
        self.count = 0
        self.contents: set[bytes] = set()
        self.bad = BadRows(_KINDS_MAX)
        self.conversations = False
        self.columns: set[str] = set()

    def add_line(self, line: Line) -> None:
        try:
            value = json_of(line)
        except InputError as error:
            self.bad.add(_place(line), error.message.removeprefix(f"{line.where}: "))
            return
        self.add(line, value)

    def add(self, line: Line, value: Any) -> None:
        try:
            found = parse_row(self._kind, value, self._loss_on)
            if b"\\u" in line.raw:  # only an escape can hold one: what is not escaped was decoded from UTF-8
                refuse_half_pairs(found)
        except InputError as error:
            self.bad.add(_place(line), error.message)
            return
        self.count += len(found)
        self.conversations = self.conversations or conversational(found[0])
        if isinstance(found[0], PromptRow):
            self.columns.update(found[0].columns)
        if self._known is None or self._known:
            self._keep(found)

    def _keep(self, rows: Sequence[Row]) -> None:
        digest = blake3(b"".join(map(content_of, rows))).digest(_DIGEST)
        if self._known is None or digest in self._known:
            self.contents.add(digest)


def _place(line: Line) -> Place:
    return Place(line.index + 1, line.file, line.line)


def read_both(kind: Kind, section: TrainingSection, reading: InputReader, where: str) -> tuple[Data, Data | None]:
    """Return (dataset, evaluation set). The dataset's `contents` are those that the evaluation set has too.

    Raises InputError with all faults of both. `where` is the section, for messages.
    """
    loss_on = section.loss_on.kind if isinstance(section, SftSection) else "completion_only"
    faults: list[str] = []
    evaluation: Data | None = None
    if section.eval_dataset is not None:
        try:
            # Hashes are kept of the rows that are trained on: by them a later command sees what changed.
            evaluation = read_data(
                kind, section.eval_dataset, replace(reading, index=None), key=f"{where}.eval_dataset", loss_on=loss_on
            )
            evaluation.close()
        except InputError as error:
            faults.append(error.message)
    known = evaluation.contents if evaluation is not None else set[bytes]()
    try:
        data = read_data(kind, section.dataset, reading, key=f"{where}.dataset", loss_on=loss_on, known=known)
    except InputError as error:
        raise InputError(problems([error.message, *faults])) from None
    if faults:
        data.close()
        raise InputError(problems(faults))
    return data, evaluation


def read_data(
    kind: Kind,
    dataset: DatasetSection,
    reading: InputReader,
    *,
    key: str,
    loss_on: LossOn = "completion_only",
    known: set[bytes] | None = None,
) -> Data:
    """Read every row once. Raises InputError with all faults, each as `file:line: what`, or with the row's number in a
    table.

    `key` is that of the configuration, such as algorithm.sft.dataset, for messages. `known` are contents of rows; the
    returned `contents` are those found again, or all of them if it is None.
    """
    rows = _Rows(kind, loss_on, known)
    try:
        data = _read(dataset, reading, rows, key)
    except InputError as error:
        if not rows.bad.kinds:
            raise
        raise InputError(problems([error.message, *rows.bad.lines(_ROOM)])) from None
    if rows.bad.kinds:
        data.close()
        raise InputError(problems(rows.bad.lines(_ROOM)))
    return data


def _read(dataset: DatasetSection, reading: InputReader, rows: _Rows, key: str) -> Data:
    if dataset.kind == "dataset_path":
        return _read_datasets(dataset, reading, rows, key)
    if dataset.kind == "tasks_path":
        return _read_tasks(dataset, reading, rows)
    patterns = _patterns(dataset, f"{key}.path")
    if dataset.kind == "parquet_path":
        source = reading.open(patterns, f"{key}.path")
        try:
            report = _read_tables("parquet_path", source.files, rows, reading)
        finally:
            source.close()
    else:
        source, report = reading.rows(patterns, rows.add_line, skip=None, key=f"{key}.path")
    files = tuple((_named(i, Path(file.name)), file.path.absolute()) for i, file in enumerate(source.files))
    tables = tuple((place, file.name) for (place, _), file in zip(files, source.files, strict=True))
    kept = source if dataset.kind == "jsonl_path" else None
    return Data(dataset.kind, report, files, tables, rows.count, rows.contents, rows.conversations, kept, rows.columns)


def _named(index: int, path: Path) -> str:
    """Return the file's name in the tree, which is ordered by name."""
    return f"{index:05}-{path.name.strip('<>')}"


def _patterns(dataset: DatasetSection, key: str) -> list[str]:
    """Return the patterns, extended by those for files in directories. Raises InputError if a directory has none."""
    found: list[str] = []
    for pattern in dataset.patterns:
        if not Path(pattern).is_dir():
            found.append(pattern)
            continue
        if is_dataset(Path(pattern)):
            raise InputError(f'{key}: {pattern} is a dataset on disk: set kind = "dataset_path"')
        inside = [f"{glob.escape(pattern.rstrip('/'))}/*{suffix}" for suffix in _SUFFIXES[dataset.kind]]
        some = [one for one in inside if glob.glob(one)]  # noqa: PTH207 - absolute patterns
        if not some:
            raise InputError(f"{key}: no {' and no '.join(_SUFFIXES[dataset.kind])} file is in the directory {pattern}")
        found += some
    return found


# ---- tables


def _read_datasets(dataset: DatasetSection, reading: InputReader, rows: _Rows, key: str) -> Data:
    faults: list[str] = []
    directories: list[Path] = []
    for pattern in dataset.patterns:
        if looks_remote(pattern):
            try:
                brought = reading.directory(pattern, f"{key}.path")
                directories.append(_split(brought or Path(pattern), dataset.split, key))
            except (ConfigError, InputError) as error:
                faults.append(error.message)
            continue
        matches = sorted(glob.glob(pattern)) or [pattern]  # noqa: PTH207 - absolute patterns
        for match in matches:
            try:
                directories.append(_split(Path(match), dataset.split, key))
            except InputError as error:
                faults.append(error.message)
    if faults:
        raise InputError(problems(faults))
    report = _read_tables("dataset_path", [InputFile(str(path), path) for path in directories], rows, reading)
    files: list[tuple[str, Path]] = []
    tables: list[tuple[str, str]] = []
    for i, path in enumerate(directories):
        place = _named(i, path)
        tables.append((place, str(path)))
        files += [(f"{place}/{name}", file.absolute()) for name, file in scan_directory(path) if _travels(name)]
    return Data(
        "dataset_path",
        report,
        tuple(files),
        tuple(tables),
        rows.count,
        rows.contents,
        rows.conversations,
        None,
        rows.columns,
    )


def _read_tasks(dataset: DatasetSection, reading: InputReader, rows: _Rows) -> Data:
    """Read directories of tasks that `find_tasks` has checked: their instructions travel as rows."""
    directories = [Path(pattern).expanduser().resolve() for pattern in dataset.patterns]
    report = _read_tables(dataset.kind, [InputFile(str(path), path) for path in directories], rows, reading)
    tables = tuple((_named(i, path), str(path)) for i, path in enumerate(directories))
    files = tuple(
        (f"{place}/{file.relative_to(path)}", file)
        for (place, _), path in zip(tables, directories, strict=True)
        for file in instructions(path)
    )
    whole = rows.count, rows.contents, rows.conversations, None, rows.columns
    return Data(dataset.kind, report, files, tables, *whole)


def _travels(name: str) -> bool:
    """Return whether a file belongs to the data: hidden files and caches of `map` and `filter` do not."""
    last = name.rpartition("/")[2]
    return not last.startswith((".", "cache-", "tmp"))


def _split(path: Path, split: str | None, key: str) -> Path:
    """Return the directory of one dataset: `path`, or a split below it in a DatasetDict. Raises InputError."""
    if not is_dataset(path):
        why = "there is no such directory" if not path.exists() else f"it has no {INFO} and no {SPLITS}"
        raise InputError(
            f"{key}.path: {path} is not what Dataset.save_to_disk writes: {why}; for files set "
            'kind = "jsonl_path" or "parquet_path"'
        )
    return split_directory(path, split, key)


def _read_tables(kind: str, files: Sequence[InputFile], rows: _Rows, reading: InputReader) -> InputReport:
    faults: list[str] = []
    reports: list[FileReport] = []
    whole, total, total_bytes = blake3(), 0, 0
    for file in files:
        digest, count, size = blake3(), 0, 0
        try:
            for number, value in enumerate(table_rows(kind, file.name, file.path), 1):
                raw = json.dumps(value, sort_keys=True, default=repr).encode()
                rows.add(Line(total, file.name, number, raw), value)
                digest.update(blake3(raw).digest())
                whole.update(blake3(raw).digest())
                count, size, total = count + 1, size + len(raw), total + 1
                if reading.progress and total % _BATCH == 0:
                    reading.progress(total, total_bytes + size)
        except InputError as fault:
            faults.append(fault.message)
        total_bytes += size
        reports.append(FileReport(file.name, count, size, digest.hexdigest()))
    if faults:
        raise InputError(problems(faults))
    if not total:
        raise InputError(f"the input is empty: no row in {', '.join(file.name for file in files[:3])}")
    return InputReport(total, total_bytes, tuple(reports), whole.hexdigest())
