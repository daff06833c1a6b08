"""The writer of a run that takes over results: its own lines, merged with those of the rows that do not run again."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path

from rollout.workloads.carrying import CARRIED, COUNTS, INNER, Carried, CarriedLines, as_json, merged_counts
from rollout.workloads.commit import CommitEntry
from rollout.workloads.json_form import JsonObject
from rollout.workloads.port import Remembering, Totals, Writer

_REACHED = "reached"


class CarryingWriter:
    """Call `open` first. `unit` is the workload's. `alone` means that what was taken over is missing, so the files have
    only the run's own rows."""

    def __init__(self, inner: Writer, config: JsonObject, unit: str, *, alone: bool = False) -> None:
        self.files = inner.files
        self._inner = inner
        self._reached: JsonObject = {}
        self._config = config
        self._unit = unit
        self._alone = alone
        self._known: tuple[Carried, CarriedLines] | None = None

    def open(self, directory: Path) -> None:
        section = self._config[CARRIED]
        alone = self._alone and not (directory / section["directory"]).exists()
        carried = Carried.absent(section) if alone else Carried.read(directory, section)
        self._alone = alone
        ordered = self._config["run"].get("order", "schedule") == "schedule"
        self._known = carried, CarriedLines(directory, carried, ordered=ordered)

    @property
    def memory(self) -> JsonObject:
        """The position in the carried lines, and the memory of the inner writer, which continues that of the previous
        run."""
        inner = {INNER: self._inner.memory} if isinstance(self._inner, Remembering) else {}
        return {_REACHED: self._reached, **inner}

    @memory.setter
    def memory(self, value: JsonObject) -> None:
        self._reached = value.get(_REACHED, {})
        if isinstance(self._inner, Remembering):
            self._inner.memory = value[INNER] if INNER in value else {**self._opened[0].memory}

    def before(self, entry: CommitEntry) -> Iterator[tuple[str, bytes]]:
        carried, lines = self._opened
        return lines.before(carried.row(entry.seq), self._reached)

    def rest(self) -> Iterator[tuple[str, bytes]]:
        return self._opened[1].rest(self._reached)

    def lines(self, entry: CommitEntry) -> Iterable[tuple[str, bytes]]:
        return self._inner.lines(replace(entry, seq=self._opened[0].row(entry.seq)))

    def summary(self, summary: JsonObject, totals: Totals) -> JsonObject:
        carried, _ = self._opened
        counts = {name: getattr(totals, name) + carried.totals[name] for name in COUNTS}
        units = summary[self._unit] if self._alone else merged_counts(summary[self._unit], carried)
        merged = {**summary, self._unit: units}
        return {**self._inner.summary(merged, replace(totals, **counts)), CARRIED: as_json(carried)}

    @property
    def _opened(self) -> tuple[Carried, CarriedLines]:
        if self._known is None:
            raise RuntimeError("open() first")
        return self._known
