"""An input that grows while its rows run (`[input] follow`): files in the parts in which their rows came, and what
changes on disk.

Rows are counted in the order in which they were seen, so that those which are new always stand at the end. A run's
configuration lists the parts (`input.files`), in which a later command reads the same files again.
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
"""A file whose rows are not lines of their own is read when nobody has written to it for so long."""

_OPEN_MAX = 200
"""Files of which a part follows that stay open; others are read again up to it."""

FOLLOWED = "followed"
"""Of `input` of a run's configuration: its files are parts."""


class NoRowsYetError(InputError):
    """Nothing has come so far."""


@dataclass(frozen=True, slots=True)
class Parts:
    """`known`: (path, rows) of the parts that a run has, in order. `grows`: what is new is a part, too."""

    known: tuple[tuple[str, int], ...] = ()
    grows: bool = True

    @classmethod
    def of(cls, config: JsonObject, *, grows: bool) -> Parts:
        """Those of the run with this configuration."""
        return cls(tuple((one["path"], one["rows"]) for one in lookup(config, "input.files") or ()), grows)

    def of_files(self, found: Sequence[InputFile], form: InputFormat) -> list[InputFile]:
        """What is known, and then the rest of each file that was found, where it may be read."""
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
    """Whether nobody writes to it any more, as far as one can see."""
    try:
        return time.time() - path.stat().st_mtime >= SETTLED_S
    except OSError:
        return False


class PartsReader:
    """One reading of parts, in their order: each file is read once, however many it has."""

    def __init__(self, form: InputFormat, files: Iterable[InputFile]) -> None:
        self._form = form
        self._last = {file.path: file.skip for file in files}
        self._open: dict[Path, tuple[Iterator[Line], int]] = {}

    def rows(self, file: InputFile, first: int = 0) -> Iterator[Line]:
        """Those of the part, lazily; `first`: the index of its first. Of lines that are not counted yet, a last one
        without its end is none: somebody is writing it. InputError."""
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
    """What the files of [input] hold."""
    return InputFormat(section.format, section.columns, section.split)


Seen = frozenset[tuple[str, int, int, bool]]


def seen(patterns: Sequence[str], form: InputFormat, exclude: Path) -> Seen:
    """What the patterns match, as far as it shows whether something came. `exclude`: the output directory, in which
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
