"""An input that grows while its rows run (`[input] follow`): files in the parts in which their rows arrived, and
changes on disk.

Rows are counted in the order in which they were seen, so that new ones are always at the end. A run's configuration
lists the parts (`input.files`), by which a later command reads the same files again.
"""

from __future__ import annotations

import glob
import math
import os
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from rollout.model.errors import InputError
from rollout.workloads.input_files import InputFile
from rollout.workloads.input_format import InputFormat
from rollout.workloads.input_lines import Line
from rollout.workloads.json_form import JsonObject, lookup
from rollout.workloads.sections import QueuedInput

SETTLED_S = 5.0
"""A file whose rows are not lines is read once nobody has written to it for this long."""

_OPEN_MAX = 200
"""Maximum number of open files of which another part follows; others are read again up to it."""

FOLLOWED = "followed"
"""Key of `input` of a run's configuration: its files are parts."""


class NoRowsYetError(InputError):
    """No rows have arrived so far."""


@dataclass(frozen=True, slots=True)
class Parts:
    """`known` has (path, rows) of a run's parts, in order. With `grows`, new rows become parts."""

    known: tuple[tuple[str, int], ...] = ()
    grows: bool = True

    @classmethod
    def of(cls, config: JsonObject, *, grows: bool) -> Parts:
        """Return the parts of the run with this configuration."""
        return cls(tuple((one["path"], one["rows"]) for one in lookup(config, "input.files") or ()), grows)

    def of_files(self, found: Sequence[InputFile], form: InputFormat) -> list[InputFile]:
        """Return the known parts, then the rest of each file found, if it may be read."""
        files = {file.name: file for file in found}
        parts: list[InputFile] = []
        rows: dict[str, int] = {}
        for name, count in self.known:
            begin = rows.get(name, 0)
            if parts and parts[-1].name == name:
                parts[-1] = replace(parts[-1], rows=begin + count - parts[-1].skip)
            elif count:
                parts.append(replace(files.get(name, InputFile(name, Path(name))), skip=begin, rows=count))
            rows[name] = begin + count
        if self.grows:
            ready = (file for file in found if form.is_lines(file) or is_settled(file.path))
            parts += [replace(file, skip=rows.get(file.name, 0)) for file in ready]
        return parts


def is_settled(path: Path) -> bool:
    """Return whether it seems that nobody is writing to it."""
    try:
        return time.time() - path.stat().st_mtime >= SETTLED_S
    except OSError:
        return False


class PartsReader:
    """Reads parts in order: each file is read once, however many parts it has."""

    def __init__(self, form: InputFormat, files: Iterable[InputFile]) -> None:
        self._form = form
        self._last = {file.path: file.skip for file in files}
        self._open: dict[Path, tuple[Iterator[Line], int]] = {}

    def rows(self, file: InputFile, first: int = 0) -> Iterator[Line]:
        """Yield the rows of the part, lazily; `first` is the index of its first. Of lines not counted yet, a last one
        without its end is skipped, because someone is writing it. Raises InputError."""
        lines, at = self._open.pop(file.path, None) or (self._form.rows(file), 0)
        end = math.inf if file.rows is None else file.skip + file.rows
        while at < end and (line := next(lines, None)) is not None:
            at += 1
            if at <= file.skip:
                continue
            if file.rows is None and not line.whole and self._form.is_lines(file):
                return
            line.index = first + at - 1 - file.skip
            yield line
        if file.skip < self._last[file.path] and len(self._open) < _OPEN_MAX:
            self._open[file.path] = lines, at


def form_of(section: QueuedInput) -> InputFormat:
    """Return the format of the files of [input]."""
    return InputFormat(section.format, section.columns, section.split)


Seen = frozenset[tuple[str, int, int, bool]]


def seen(patterns: Sequence[str], form: InputFormat, exclude: Path) -> Seen:
    """Return what the patterns match, in enough detail to notice new rows. `exclude` is the output directory, in which
    the command itself writes. Blocking."""
    own = exclude.resolve()
    found: set[tuple[str, int, int, bool]] = set()
    for pattern in patterns:
        for path in glob.iglob(pattern, recursive=True):  # noqa: PTH207 - Path.glob takes no absolute patterns
            with suppress(OSError):
                if Path(path).resolve().is_relative_to(own):
                    continue
                status = os.stat(path)  # noqa: PTH116 - as above
                ready = form.is_lines(InputFile(path, Path(path))) or time.time() - status.st_mtime >= SETTLED_S
                found.add((path, status.st_size, status.st_mtime_ns, ready))
    return frozenset(found)
