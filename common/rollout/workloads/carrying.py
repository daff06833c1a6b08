"""What a run carries on of the run before it in the same output directory.

`--extend` runs the rows that were added to the input, `rollout infer retry` those that failed. Either is a run of its
own, of these rows alone. The lines of all other rows are copied to a hidden directory beside the files before the new
run takes the directory over, and are merged with its own, in the order of the input.
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
"""Section of the configuration of a run that carries results on."""
ERRORS = "errors.jsonl"
COUNTS = ("rows", "done", "failed", "cancelled", "skipped", "invalid", "units_in", "units_out")
"""Of Totals, those that add up."""
INNER = "inner"
"""Of the memory that a run which carries results on saves: that of its writer."""
_PREFIX = ".carried-"
_NEW = ".carried.new"
_ROWS = "rows.json"
PER_ROW = "openai"
"""How the name of a file begins that has a line for each row."""
_PIECE = 1000  # lines
_NONE_APART: Mapping[str, Sequence[int]] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Carried:
    """`rows`: of the input, when the run `run_id` was made. The new run's units are the rows `retried`, in rising order
    and counted from 0, and then `added` rows that follow all of those. `failed`: rows with a line in errors.jsonl that
    stays. `apart`: by file, the rows whose line is in it and not in the first one. `files`: those of that run, without
    the lines of `retried`, in `directory`. `totals`: what they count. `memory`: of that run's writer, empty where it
    has none."""

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
        """The row of a unit."""
        retried = len(self.retried)
        return self.retried[seq] if seq < retried else self.rows + seq - retried

    def pick(self, lines: Iterator[Line]) -> Iterator[Line]:
        """Those of units."""
        retried = frozenset(self.retried)
        return (line for line in lines if line.index >= self.rows or line.index in retried)

    def section(self) -> JsonObject:
        """For the run's configuration. The rows themselves are in `directory`."""
        return {
            "run_id": self.run_id,
            "directory": self.directory,
            "rows": self.rows,
            "retried": len(self.retried),
            "added": self.added,
        }

    @classmethod
    def absent(cls, section: JsonObject) -> Self:
        """Where its directory is not: the rows alone that are units, as far as their numbers are known."""
        none: JsonObject = dict.fromkeys(COUNTS, 0)
        retried = tuple(range(section["retried"]))
        return cls(section["run_id"], "", section["rows"], section["added"], retried, (), {}, {}, none, {})

    @classmethod
    def read(cls, output: Path, section: JsonObject) -> Self:
        """StateError: what was copied is not there any more."""
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
    """Copy what is carried on of the run of `output`, which is complete and whose files were looked at. Blocking.

    `config`: that run's. `names`: the files that the next will write. `rows`: of the input as it is now. `retry`: codes
    of failed rows that run again; empty: all but invalid ones; None: no failed row does. `apart`: by file, in rising
    order, the rows whose result goes there and not to the first one. ConfigError: the files are not those that the
    next run writes, no row failed with one of these codes, or one is that of invalid rows.
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
    """For people."""
    parts = [f"{counted(len(carried.retried), 'failed row')}"] if carried.retried else []
    parts += [f"{counted(carried.added, 'new row')}"] if carried.added else []
    stay = carried.rows - len(carried.retried)
    return f"{' and '.join(parts)} to run; the results of {counted(stay, 'row')} stay"


def _runs_again(code: str, retry: frozenset[str]) -> bool:
    return code in retry if retry else code != INVALID


def _failed(path: Path) -> dict[int, str]:
    """By row, in rising order: the code of each line."""
    found: dict[int, str] = {}
    with disk_errors(path), path.open("rb") as file:
        for line in file:
            fields = json.loads(line)
            found[fields["row"] - 1] = fields["code"]
    return dict(sorted(found.items()))


def _all_totals(output: Path, config: JsonObject, totals: JsonObject) -> JsonObject:
    """Of all rows that are in the files: also of those that the run has carried on itself."""
    earlier = Carried.read(output, config[CARRIED]).totals if CARRIED in config else {}
    return {name: totals[name] + earlier.get(name, 0) for name in COUNTS}


def _memory(config: JsonObject, totals: JsonObject) -> JsonObject:
    memory: JsonObject = totals.get(MEMORY, {})
    return memory.get(INNER, {}) if CARRIED in config else memory


def _without(totals: JsonObject, failed: int) -> JsonObject:
    return {**totals, "rows": totals["rows"] - failed, "failed": totals["failed"] - failed}


def _copy(output: Path, name: str, current: str, retried: Collection[int], saved: JsonObject, tell: Tell) -> None:
    """`name` is whole, or not there. What an earlier command left, and no run uses, goes."""
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
    """Without those of rows that run again. A file with a line for each row has its failed rows in the order of
    errors.jsonl."""
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
    """The lines of the rows that stay, in the order of the input, as far as they are asked for.

    `memory` says how far. `ordered`: every file has its lines in the order of its rows; one for each row, or for each
    that failed, or for each of those `apart` that did not, or for each other that did not. Of other files all lines
    come before any other.
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
        """What stands before the lines of `row`, and was not given yet. Each piece that was taken is remembered."""
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
        """Of the rows before `row`."""
        return row - bisect_left(self._carried.retried, row)

    def _fine(self, name: str, row: int) -> int:
        """Of the rows before `row`, those that did not fail and whose results go to `name`."""
        apart = self._carried.apart
        if name in apart:
            return bisect_left(apart[name], row)
        fine = row - bisect_left(self._failed, row)
        return fine - sum(bisect_left(rows, row) for rows in apart.values())

    def _lines_before(self, name: str, row: int) -> int:
        """Lines of `name` that are of rows before `row`."""
        lines = self._carried.files[name].lines
        if row >= self._carried.rows:
            return lines
        if name == ERRORS:
            return bisect_left(self._carried.failed, row)
        per_row = lines == self._stay(self._carried.rows)
        return self._stay(row) if per_row else self._fine(name, row) if lines else 0


def merged_counts(units: JsonObject, carried: Carried) -> JsonObject:
    """The counts of a summary, with those of the rows that were carried on."""
    names = {"committed": "rows", "completed": "done"}
    stay = carried.rows - len(carried.retried)
    return {
        key: count + (stay if key == "total" else carried.totals.get(names.get(key, key), 0))
        for key, count in units.items()
    }


def as_json(carried: Carried) -> JsonObject:
    """What summary.json says of it."""
    return {"run_id": carried.run_id, "rows": carried.rows - len(carried.retried)}
