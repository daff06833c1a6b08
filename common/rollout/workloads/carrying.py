"""What a run takes over from the previous run in the same output directory.

`--extend` runs rows that were added to the input, `rollout infer retry` those that failed. Either is a run of its own
with these rows alone. The lines of all other rows are copied to a hidden directory next to the files before the new run
takes the directory over, and are merged with its own, in the order of the input.
"""

from __future__ import annotations

import json
import os
import shutil
from bisect import bisect_left
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from types import MappingProxyType
from typing import Self

from blake3 import blake3

from rollout.model.counts import counted
from rollout.model.errors import ConfigError, StateError
from rollout.model.item import INVALID
from rollout.workloads.json_form import JsonObject
from rollout.workloads.output import MEMORY, Mark, disk_errors, mark_of, saved_state, seal, unseal, write_atomically
from rollout.workloads.source import Line
from rollout.workloads.spool import Tell, quiet

CARRIED = "carried"
"""Section of the configuration of a run that takes over results."""
ERRORS = "errors.jsonl"
COUNTS = ("rows", "done", "failed", "cancelled", "skipped", "invalid", "units_in", "units_out")
"""Fields of Totals that add up."""
INNER = "inner"
"""Key of the inner writer's memory within that of a run that takes over results."""
_PREFIX = ".carried-"
_NEW = ".carried.new"
_ROWS = "rows.json"
PER_ROW = "openai"
"""Prefix of the name of a file with a line for each row."""
_PIECE = 1000  # lines
_NONE_APART: Mapping[str, Sequence[int]] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Carried:
    """`rows` is the number of rows in the input when the run `run_id` was made. The new run's units are the rows
    `retried`, ascending and counted from 0, then `added` rows that follow all of those. `failed` are rows whose line in
    errors.jsonl stays. `apart` has, by file, the rows whose line is in it and not in the first one. `files` are those
    of the old run, without the lines of `retried`, in `directory`. `totals` are their counts. `memory` is that of the
    old run's writer, empty if it has none."""

    run_id: str
    directory: str
    rows: int
    added: int
    retried: tuple[int, ...]
    failed: tuple[int, ...]
    apart: Mapping[str, Sequence[int]]
    files: Mapping[str, Mark]
    totals: JsonObject
    memory: JsonObject

    @property
    def total(self) -> int:
        return len(self.retried) + self.added

    def row(self, seq: int) -> int:
        """Return the row of a unit."""
        retried = len(self.retried)
        return self.retried[seq] if seq < retried else self.rows + seq - retried

    def pick(self, lines: Iterator[Line]) -> Iterator[Line]:
        """Yield the lines that are units."""
        retried = frozenset(self.retried)
        return (line for line in lines if line.index >= self.rows or line.index in retried)

    def section(self) -> JsonObject:
        """Return the section of the run's configuration. The rows themselves are in `directory`."""
        return {
            "run_id": self.run_id,
            "directory": self.directory,
            "rows": self.rows,
            "retried": len(self.retried),
            "added": self.added,
        }

    @classmethod
    def absent(cls, section: JsonObject) -> Self:
        """Return what is known without the directory: the rows that are units, as far as their numbers are known."""
        none: JsonObject = dict.fromkeys(COUNTS, 0)
        retried = tuple(range(section["retried"]))
        return cls(section["run_id"], "", section["rows"], section["added"], retried, (), {}, {}, none, {})

    @classmethod
    def read(cls, output: Path, section: JsonObject) -> Self:
        """Read what was copied. Raises StateError if it is gone."""
        directory = output / section["directory"]
        try:
            saved = unseal((directory / _ROWS).read_bytes())
            if saved is None:
                raise ValueError(f"{_ROWS} is damaged")
            files = {name: Mark.of(mark) for name, mark in saved["files"].items()}
            for name, mark in files.items():
                if mark_of(directory / name) != mark:
                    raise ValueError(f"{name} is not what was written")
        except (OSError, ValueError) as error:
            why = getattr(error, "strerror", None) or str(error)
            raise StateError(
                f"{directory} holds the results that this run carries on from run {section['run_id']}, and cannot be "
                f"used: {why}. Put it back, or name another output.dir to run everything again"
            ) from error
        retried, failed = tuple(saved["retried"]), tuple(saved["failed"])
        return cls(
            saved["run_id"], section["directory"], saved["rows"], saved["added"], retried, failed, saved["apart"],
            files, saved["totals"], saved["memory"],
        )  # fmt: skip


def carry_over(
    output: Path,
    config: JsonObject,
    names: Sequence[str],
    rows: int,
    retry: frozenset[str] | None,
    apart: Mapping[str, Sequence[int]] = _NONE_APART,
    tell: Tell = quiet,
) -> Carried:
    """Copy what is taken over from the run of `output`, which is complete and whose files were checked. Blocking.

    `config` is that run's. `names` are the files that the next run will write. `rows` is the number in the input now.
    `retry` are codes of failed rows that run again; empty means all except invalid ones, None no failed row. `apart`
    has, by file and ascending, the rows whose result goes there and not to the first one. Raises ConfigError if the
    files are not those that the next run writes, no row failed with one of these codes, or one is that of invalid rows.
    """
    if retry and INVALID in retry:
        raise ConfigError(f"--code {INVALID}: these rows cannot run: mend them, and begin another run")
    state = saved_state(output)
    if state is None:
        raise StateError(f"{output} has no state of its files")
    if not state["files"].keys() <= set(names) <= {*state["files"], *apart}:
        raise ConfigError(
            f"output: the files so far are {', '.join(state['files'])}, and the rows that run now would write "
            f"{', '.join(names)}: set [output] as it was"
        )
    before: int = config["input"]["rows"]
    codes = _failed(output / ERRORS)
    retried = tuple(row for row, code in codes.items() if _runs_again(code, retry)) if retry is not None else ()
    if retry and not retried:
        there = ", ".join(f"{code} ({count})" for code, count in sorted(Counter(codes.values()).items())) or "none"
        raise ConfigError(f"--code {', '.join(sorted(retry))}: no row failed so; codes of failed rows: {there}")
    again = frozenset(retried)
    stand = {name: [row for row in listed if row < before and row not in codes] for name, listed in apart.items()}
    failed = tuple(row for row in codes if row not in again)
    saved = {
        "run_id": state["run_id"],
        "rows": before,
        "added": rows - before,
        "retried": retried,
        "failed": failed,
        "apart": stand,
        "files": list(state["files"]),
        "memory": _memory(config, state["totals"]),
        "totals": _without(_all_totals(output, config, state["totals"]), len(retried)),
    }
    name = f"{_PREFIX}{blake3(seal(saved)).hexdigest()[:16]}"
    _copy(output, name, config.get(CARRIED, {}).get("directory", ""), again, saved, tell)
    return Carried.read(output, {"run_id": state["run_id"], "directory": name})


def describe(carried: Carried) -> str:
    """Describe it for the user."""
    parts = [f"{counted(len(carried.retried), 'failed row')}"] if carried.retried else []
    parts += [f"{counted(carried.added, 'new row')}"] if carried.added else []
    stay = carried.rows - len(carried.retried)
    return f"{' and '.join(parts)} to run; the results of {counted(stay, 'row')} stay"


def _runs_again(code: str, retry: frozenset[str]) -> bool:
    return code in retry if retry else code != INVALID


def _failed(path: Path) -> dict[int, str]:
    """Return the code of each line by row, ascending."""
    found: dict[int, str] = {}
    with disk_errors(path), path.open("rb") as file:
        for line in file:
            fields = json.loads(line)
            found[fields["row"] - 1] = fields["code"]
    return dict(sorted(found.items()))


def _all_totals(output: Path, config: JsonObject, totals: JsonObject) -> JsonObject:
    """Return the totals of all rows in the files, including those that the run itself took over."""
    earlier = Carried.read(output, config[CARRIED]).totals if CARRIED in config else {}
    return {name: totals[name] + earlier.get(name, 0) for name in COUNTS}


def _memory(config: JsonObject, totals: JsonObject) -> JsonObject:
    memory: JsonObject = totals.get(MEMORY, {})
    return memory.get(INNER, {}) if CARRIED in config else memory


def _without(totals: JsonObject, failed: int) -> JsonObject:
    return {**totals, "rows": totals["rows"] - failed, "failed": totals["failed"] - failed}


def _copy(output: Path, name: str, current: str, retried: Collection[int], saved: JsonObject, tell: Tell) -> None:
    """Write `name` atomically. What an earlier command left, and no run uses, is deleted."""
    for path in output.glob(f"{_PREFIX}*"):
        if path.name not in (name, current):
            shutil.rmtree(path, ignore_errors=True)
    new = output / _NEW
    marks: JsonObject = {}
    done = 0
    with disk_errors(new):
        shutil.rmtree(new, ignore_errors=True)
        new.mkdir()
        whole = sum((output / file).stat().st_size for file in saved["files"])
        for file in saved["files"]:
            with (output / file).open("rb") as there, (new / file).open("wb") as copied:
                staying = _staying(file, there, output / ERRORS, retried)
                while piece := b"".join(islice(staying, _PIECE)):
                    copied.write(piece)
                    done += len(piece)
                    tell(f"copying the results that stay: {done >> 20:,} of {whole >> 20:,} MiB")
                copied.flush()
                os.fsync(copied.fileno())
            if (mark := mark_of(new / file)) is not None:
                marks[file] = asdict(mark)
        write_atomically(new / _ROWS, seal({**saved, "files": marks}))
        if not (output / name).exists():
            new.replace(output / name)
        shutil.rmtree(new, ignore_errors=True)


def _staying(file: str, lines: Iterable[bytes], errors: Path, retried: Collection[int]) -> Iterator[bytes]:
    """Yield lines except those of rows that run again. In a file with a line for each row, failed rows are in the order
    of errors.jsonl."""
    if not retried or (file != ERRORS and not file.startswith(PER_ROW)):
        yield from lines
        return
    with errors.open("rb") as listed:
        rows = (json.loads(line)["row"] - 1 for line in listed)
        for line in lines:
            failed = file == ERRORS or json.loads(line)["error"] is not None
            if not failed or next(rows) not in retried:
                yield line


class CarriedLines:
    """The lines of the rows that stay, in the order of the input, as they are requested.

    `memory` is the position. `ordered` means that every file has its lines in the order of its rows: one for each row,
    or for each failed row, or for each of those `apart` that did not fail, or for each other that did not. Lines of
    other files come before all others.
    """

    def __init__(self, output: Path, carried: Carried, *, ordered: bool) -> None:
        self._carried = carried
        self._directory = output / carried.directory
        self._failed = sorted((*carried.failed, *carried.retried))
        self._ordered = ordered and all(
            mark.lines in (self._stay(carried.rows), self._fine(name, carried.rows), 0)
            for name, mark in carried.files.items()
            if name != ERRORS
        )

    def before(self, row: int, memory: JsonObject) -> Iterator[tuple[str, bytes]]:
        """Yield what precedes the lines of `row` and was not yielded yet. Each piece taken is remembered."""
        limit = min(row, self._carried.rows) if self._ordered else self._carried.rows
        if limit <= memory.get("row", 0):
            return
        places: dict[str, list[int]] = memory.setdefault("places", {})
        for name in self._carried.files:
            line, offset = places.get(name, [0, 0])
            upto = self._lines_before(name, limit)
            with (self._directory / name).open("rb") as file:
                file.seek(offset)
                while line < upto:
                    piece = list(islice(file, min(upto - line, _PIECE)))
                    line, offset = line + len(piece), offset + sum(map(len, piece))
                    places[name] = [line, offset]
                    yield name, b"".join(piece)
        memory["row"] = limit

    def rest(self, memory: JsonObject) -> Iterator[tuple[str, bytes]]:
        return self.before(self._carried.rows, memory)

    def _stay(self, row: int) -> int:
        """Return the number of rows before `row` that stay."""
        return row - bisect_left(self._carried.retried, row)

    def _fine(self, name: str, row: int) -> int:
        """Return the number of rows before `row` that did not fail and whose results go to `name`."""
        apart = self._carried.apart
        if name in apart:
            return bisect_left(apart[name], row)
        fine = row - bisect_left(self._failed, row)
        return fine - sum(bisect_left(rows, row) for rows in apart.values())

    def _lines_before(self, name: str, row: int) -> int:
        """Return the number of lines in `name` for rows before `row`."""
        lines = self._carried.files[name].lines
        if row >= self._carried.rows:
            return lines
        if name == ERRORS:
            return bisect_left(self._carried.failed, row)
        per_row = lines == self._stay(self._carried.rows)
        return self._stay(row) if per_row else self._fine(name, row) if lines else 0


def merged_counts(units: JsonObject, carried: Carried) -> JsonObject:
    """Return the counts of a summary including those of the rows taken over."""
    names = {"committed": "rows", "completed": "done"}
    stay = carried.rows - len(carried.retried)
    return {
        key: count + (stay if key == "total" else carried.totals.get(names.get(key, key), 0))
        for key, count in units.items()
    }


def as_json(carried: Carried) -> JsonObject:
    """Return the section of summary.json."""
    return {"run_id": carried.run_id, "rows": carried.rows - len(carried.retried)}
