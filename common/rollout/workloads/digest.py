"""A workload's view of a run for the live page and reports: curves and tables of its results as they arrive."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from rollout.workloads.commit import CommitEntry
from rollout.workloads.json_form import JsonObject

POINTS_MAX = 1_000


@dataclass(frozen=True, slots=True)
class Link:
    """Text that links to an item of the run. `seq` counts from 0."""

    text: str
    seq: int


Cell = str | Link
Point = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Chart:
    """`series` has points (x, y) by name, ordered by x. `live` are those that follow and are not in a result yet."""

    title: str
    x: str
    series: Mapping[str, Sequence[Point]]
    live: Mapping[str, Sequence[Point]] = field(default_factory=dict[str, "Sequence[Point]"])

    @property
    def newest(self) -> Iterator[tuple[str, Point]]:
        """The last point of each name."""
        for name in dict.fromkeys([*self.series, *self.live]):
            yield name, (self.live.get(name) or self.series[name])[-1]


@dataclass(frozen=True, slots=True)
class Interval:
    """A mean and its 95 % interval, None if there is none."""

    name: str
    mean: float
    low: float | None
    high: float | None


@dataclass(frozen=True, slots=True)
class Intervals:
    """Means on a common axis, which shows at least 0 to 1. `of` says what they are means of."""

    title: str
    of: str
    rows: Sequence[Interval]
    note: str = ""


@dataclass(frozen=True, slots=True)
class Span:
    """A bar of a timeline, with begin and end in seconds from the run's first."""

    text: str
    begin_s: float
    end_s: float
    lane: str
    good: bool = True


@dataclass(frozen=True, slots=True)
class Timeline:
    """What ran when, in lanes."""

    title: str
    spans: Sequence[Span]
    note: str = ""


@dataclass(frozen=True, slots=True)
class Sheet:
    """A table. `note` is text below it."""

    title: str
    heads: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    note: str = ""


@dataclass(frozen=True, slots=True)
class Samples:
    """Lines of JSON in objects of the cluster: (text, hex of the object), the newest first."""

    title: str
    objects: Sequence[tuple[str, str]]


@dataclass(frozen=True, slots=True)
class Text:
    """Printed or written text. `key` and `value` are those of the item's JSON, if that has the text too."""

    title: str
    text: str
    key: str = ""
    value: Any = None


@dataclass(frozen=True, slots=True)
class Archive:
    """A tar (`rollout.snapshots.tar`) in an object of the cluster; its id is in hex."""

    title: str
    object_id: str


Part = Chart | Intervals | Sheet | Timeline | Samples | Text | Archive


class Digest(Protocol):
    """A summary with bounded memory, however many entries arrive."""

    def add(self, entry: CommitEntry) -> None:
        """Add a result; each comes once, in the order of the commit log. Raises InvalidResultError if it belongs to
        another workload."""
        ...

    def parts(self, figures: JsonObject) -> Sequence[Part]:
        """Return the parts so far. `figures` is what a running attempt reports (`Context.progress`), if any."""
        ...


@dataclass(slots=True)
class Curve:
    """Points of a curve: the last one and at most `POINTS_MAX`, evenly spread over all that were added."""

    points: list[Point] = field(default_factory=list[Point])
    _every: int = 1
    _added: int = 0
    _last: Point | None = None

    def add(self, x: float, y: float) -> None:
        self._last = (x, y)
        if self._added % self._every == 0:
            self.points.append(self._last)
            if len(self.points) > POINTS_MAX:
                self.points, self._every = self.points[::2], self._every * 2
        self._added += 1

    def shown(self) -> list[Point]:
        rest = [self._last] if self._last is not None and self._last != self.points[-1] else []
        return [*self.points, *rest]
