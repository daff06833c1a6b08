"""The report of an experiment in a real browser."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import TYPE_CHECKING

import browser
import pytest
import pytest_asyncio
from browser import DESK, PHONE, Scheme
from facts_maker import Truth, make_facts
from rollout.workloads.experiment.analysis.opening import opened
from rollout.workloads.experiment.analysis.report import write_report

if TYPE_CHECKING:
    from playwright.async_api import Browser

pytest.importorskip("duckdb")
pytestmark = pytest.mark.asyncio(loop_scope="module")

MARKUP = "<script>document.title='run'</script><img src='http://192.0.2.1/x' onerror='document.title=1'><b>bold</b>"
VARIANTS = {
    "control": Truth(lost=0.1, bindings={"model": "small"}),
    "treatment-with-a-long-name": Truth(shift=1.0, crash=0.2, bindings={"model": MARKUP}),
    "worse": Truth(shift=-2.0),
}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With a page, and markup in the name of a task, in a message and in a log."""
    made = make_facts(
        tmp_path_factory.mktemp("runs") / "run", VARIANTS, tasks=5, replications=2, margin=0.1, files=True
    )
    trials = made / "facts/trials.jsonl"
    rows = [json.loads(line) for line in trials.read_text().splitlines()]
    for row in rows:
        row["task_id"] = MARKUP if row["task_id"] == "task-0000" else row["task_id"]
        row["error_message"] = MARKUP if row["error_message"] else None
    trials.write_text("".join(json.dumps(row) + "\n" for row in rows))
    for log in made.glob("trials/*/stdout.log"):
        log.write_text(f"<html>{MARKUP}</html>\n")
    with opened(made) as found:
        write_report(found, made / "report.html", None, 1000)
    return made


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def chromium() -> AsyncIterator[Browser]:
    async with browser.chromium() as found:
        yield found


@pytest.mark.parametrize("width", [DESK, PHONE])
@pytest.mark.parametrize("scheme", ["light", "dark"])
async def test_the_page_fits_light_and_dark_desks_and_phones(
    run: Path, chromium: Browser, scheme: Scheme, width: int
) -> None:
    async with browser.opened(chromium, (run / "report.html").as_uri(), width=width, scheme=scheme) as found:
        assert (await found.brightness() > 0.5) == (scheme == "light")
        await found.page.evaluate("document.querySelectorAll('details').forEach(one => { one.open = true })")
        assert await found.overflow() <= 0
        assert await found.axe() == []
        assert found.strangers(run.as_uri()) == found.errors == []


async def test_no_table_of_a_wide_window_is_cut_off(run: Path, chromium: Browser) -> None:
    async with browser.opened(chromium, (run / "report.html").as_uri()) as found:
        cut = "[...document.querySelectorAll('.wide')].filter(one => one.scrollWidth > one.clientWidth).map(one => one.ariaLabel)"
        assert await found.page.evaluate(cut) == []


async def test_the_keyboard_leads_from_the_top_of_the_page_to_the_log_of_a_trial(run: Path, chromium: Browser) -> None:
    async with browser.opened(chromium, (run / "report.html").as_uri()) as found:
        page = found.page
        await found.tab_to("Trials")
        await page.keyboard.press("Enter")
        await found.tab_to("5 links")
        await page.keyboard.press("Enter")
        await found.tab_to("stdout.log")
        async with page.expect_navigation():
            await page.keyboard.press("Enter")
        assert page.url.endswith("/stdout.log")
        assert "<script>" in await page.inner_text("body")
        assert await page.title() == "" and found.strangers(run.as_uri()) == []


async def test_what_agents_and_tasks_say_is_text(run: Path, chromium: Browser) -> None:
    async with browser.opened(chromium, (run / "report.html").as_uri()) as found:
        await found.page.evaluate("document.querySelectorAll('details').forEach(one => { one.open = true })")
        assert await found.page.title() == "exp"
        assert await found.page.locator("script, img, b").count() == 0
        shown = await found.page.inner_text("main")
        assert shown.count(MARKUP) > 5
