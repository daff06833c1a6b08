"""Every section that a page can have, in a real browser, as a report: from values, without a cluster."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import browser
import pytest
import pytest_asyncio
from browser import DESK, PHONE, Scheme
from rollout.ui.page import Page, Section, kind_of
from rollout.ui.report import report_html
from rollout.ui.views import grouped
from rollout.workloads.digest import (
    POINTS_MAX,
    Archive,
    Chart,
    Curve,
    Interval,
    Intervals,
    Link,
    Part,
    Samples,
    Sheet,
    Span,
    Text,
    Timeline,
)

MARKUP = "</script><img src=x onerror=\"document.title='taken'\"><b>bold</b>\x1b[31m"
PARTS: list[Part] = [
    Chart(
        "Loss",
        "step",
        {"loss": [(1, 3.0), (2, 2.0), (3, 1.5)], MARKUP: [(2, 1.0)]},
        {"loss": [(4, 1.2)], "kl": [(4, 0.1)]},
    ),
    Intervals("Means", "agent", [Interval(MARKUP, 0.5, 0.25, 0.75), Interval("one", 1.5, None, None)]),
    Sheet("By task", ("task", MARKUP), [(Link(MARKUP, 4), MARKUP)], "A note."),
    Timeline("Processes", [Span(MARKUP, 0.0, 1.0, "one"), Span("slow", 1.0, 3.0, MARKUP, good=False)]),
    Samples("Samples", [("steps up to 3", "ab" * 32)]),
    Text("Error", MARKUP),
    Archive("Files", "cd" * 32),
]


def page() -> Page:
    run: dict[str, Any] = {"run_id": "01M8K5J9E1G3KXZ721JK4BJQMB"}
    sections = [Section(kind_of(part), {"part": part, "run": run}, str(n)) for n, part in enumerate(PARTS)]
    return Page(MARKUP, sections)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def chromium() -> AsyncIterator[Any]:
    async with browser.chromium() as found:
        yield found


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("report") / "report.html"
    path.write_text(report_html(page(), MARKUP))
    return path


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize(("width", "scheme"), [(DESK, "light"), (PHONE, "dark")])
async def test_a_report_holds_for_every_reader(chromium: Any, report: Path, width: int, scheme: Scheme) -> None:
    async with browser.opened(chromium, report.as_uri(), width=width, scheme=scheme) as found:
        assert await found.axe() == []
        assert await found.overflow() <= 0
        assert (await found.brightness() < 0.5) == (scheme == "dark")
        assert found.errors == []
        assert found.strangers(report.as_uri()) == []
        assert await found.page.locator(".chart canvas").count() == 1
        assert await found.page.locator("svg.lane rect").count() == 2


@pytest.mark.asyncio(loop_scope="module")
async def test_charts_are_drawn_in_a_browser_of_the_locale_c(chromium: Any, report: Path) -> None:
    script = "Object.defineProperty(Navigator.prototype, 'language', { get: () => 'en-US@posix' })"
    async with browser.opened(chromium, report.as_uri(), script=script) as found:
        assert found.errors == []
        assert await found.page.locator(".chart canvas").count() == 1


@pytest.mark.asyncio(loop_scope="module")
async def test_text_that_tries_to_be_markup_is_text(chromium: Any, report: Path) -> None:
    async with browser.opened(chromium, report.as_uri()) as found:
        assert await found.page.locator("main img, main b").count() == 0
        assert await found.page.title() != "taken"
        assert await found.page.locator("td", has_text="onerror").count() == 3
        assert "\\x1b[31m" in await found.page.inner_text("h1")


def test_the_same_cause_is_told_once() -> None:
    failures = [{"code": "exception", "message": f"bad number {n}\nin line {n}", "row": n} for n in (1, 22, 333)] + [
        {"code": "timeout", "message": "it took 1 s", "row": 9}
    ]
    assert [(one["code"], one["count"], one["row"]) for one in grouped(failures)] == [
        ("exception", 3, 1),
        ("timeout", 1, 9),
    ]


def test_a_curve_keeps_its_form_in_bounded_memory() -> None:
    curve = Curve()
    for x in range(100_000):
        curve.add(x, x * 2)
    points = curve.shown()
    assert POINTS_MAX / 2 <= len(points) <= POINTS_MAX + 1
    assert points[0] == (0, 0) and points[-1] == (99_999, 199_998)
    assert all(y == x * 2 for x, y in points)
