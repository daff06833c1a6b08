"""Pages made of sections, each a template with its data. The live page and reports use the same sections."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from typing import Any
from urllib.parse import quote, urlencode

from jinja2 import Environment, PackageLoader, StrictUndefined

from rollout.cli.show import amounts, row_of, timestamp
from rollout.cli.words import duration, first_line, rate, took, when
from rollout.config.visible import visible
from rollout.model.ids import short
from rollout.workloads.digest import Chart, Intervals, Part, Timeline

TEXT_MAX = 20_000
"""Maximum number of characters of a text on a page."""


@dataclass(frozen=True, slots=True)
class Section:
    """`name` is the id of its element, and of its template without the suffix. `key` distinguishes sections of one
    name."""

    name: str
    data: Mapping[str, Any]
    key: str = ""

    @property
    def id(self) -> str:
        return f"{self.name}-{self.key}" if self.key else self.name


@dataclass(frozen=True, slots=True)
class Page:
    """`trail` are links to the pages above it: (text, path). `live` means that it may change."""

    title: str
    sections: Sequence[Section]
    trail: Sequence[tuple[str, str]] = field(default=())
    live: bool = True


@cache
def environment() -> Environment:
    made = Environment(
        loader=PackageLoader("rollout.ui"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    filters: dict[str, Any] = made.filters
    filters.update(
        took=took, duration=duration, rate=rate, short=short, row=row_of, line=first_line, text=shown, pretty=_pretty,
        clock=when, iso=timestamp, plot=plot, bars=bars, whiskers=whiskers, number=_number, amounts=amounts,
        memory=_memory,
    )  # fmt: skip
    return made


@cache
def asset(name: str) -> str:
    return (files("rollout.ui") / "static" / name).read_text("utf-8")


def render(section: Section, link: Callable[..., str]) -> str:
    """Render a section. `link(path, **query)` returns the address of another page, "" if there is none, as in a
    report."""
    return environment().get_template(f"{section.name}.html.j2").render(section.data, link=link, section=section)


def linker(base: str) -> Callable[..., str]:
    def link(path: str, **query: Any) -> str:
        given = {name: value for name, value in query.items() if value not in (None, "")}
        return base + quote(path) + (f"?{urlencode(given)}" if given else "")

    return link


def nowhere(path: str, **query: Any) -> str:
    return ""


def shown(text: str, limit: int = TEXT_MAX) -> str:
    """Return other people's text with control characters escaped, truncated to `limit`."""
    cut = visible(text[:limit])
    return cut if len(text) <= limit else f"{cut}\n... {len(text) - limit:,} characters more"


def _pretty(value: Any, limit: int = TEXT_MAX) -> str:
    try:
        return shown(value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, indent=2), limit)
    except RecursionError:
        return "It is nested too deeply to be shown."


def _number(value: float) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:,.4g}"


def _memory(worker: Mapping[str, Any]) -> str:
    used, whole = worker["memory_mib"] / 1024, worker["capacity"].get("memory_mib", 0) / 1024
    return f"{used:.1f} of {whole:.1f} GiB" if whole else f"{used:.1f} GiB"


def plot(chart: Chart) -> str:
    """Return columns for the plotting script: x, then y of each series, null without a point. `of` is the index of the
    series to which each belongs; a live one starts at its own last point."""
    names = list(dict.fromkeys([*chart.series, *chart.live]))
    series = [dict(chart.series.get(name, ())) for name in names]
    of = list(range(len(names)))
    for name, points in chart.live.items():
        series.append(dict([*list(chart.series.get(name, ()))[-1:], *points]))
        of.append(names.index(name))
    xs = sorted({x for points in series for x in points})
    columns = [xs, *([points.get(x) for x in xs] for points in series)]
    labels = [*names, *(f"{name}, not committed" for name in chart.live)]
    return json.dumps({"x": chart.x, "names": labels, "of": of, "columns": columns})


def bars(timeline: Timeline) -> dict[str, Any]:
    """Return the bars of a timeline in percent of its width, in lanes."""
    whole = max((span.end_s for span in timeline.spans), default=0.0) or 1.0
    lanes: dict[str, list[dict[str, Any]]] = {}
    for span in timeline.spans:
        left = 100 * span.begin_s / whole
        width = max(0.1, 100 * (span.end_s - span.begin_s) / whole)
        text = f"{span.text}: {span.end_s - span.begin_s:.2f} s from {span.begin_s:.2f} s on"
        lanes.setdefault(span.lane, []).append({"left": left, "width": width, "text": text, "good": span.good})
    return {"whole": whole, "lanes": lanes}


def whiskers(part: Intervals) -> dict[str, Any]:
    """Return positions on an axis of 1,000 units."""
    found = [value for row in part.rows for value in (row.mean, row.low, row.high) if value is not None]
    least, most = min(0.0, *found), max(1.0, *found)

    def at(value: float) -> int:
        return round(1_000 * (value - least) / (most - least))

    rows = [
        {
            "name": row.name,
            "mean": f"{row.mean:.3f}",
            "at": at(row.mean),
            "span": None if row.low is None or row.high is None else (at(row.low), at(row.high)),
            "text": "none" if row.low is None or row.high is None else f"{row.low:.3f} to {row.high:.3f}",
        }
        for row in part.rows
    ]
    return {"least": least, "most": most, "rows": rows}


def kind_of(part: Part) -> str:
    """Return the template of a part of a digest."""
    return type(part).__name__.lower()
