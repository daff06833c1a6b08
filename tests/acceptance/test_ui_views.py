"""Every view of runs of every workload, in a real browser: light and dark, on a phone, by keyboard, and as a report."""

from __future__ import annotations

import re
from collections.abc import AsyncGenerator, Iterator
from pathlib import Path
from typing import Any

import browser
import httpx2
import pytest
import pytest_asyncio
from acceptance_cli import Cli
from browser import DESK, PHONE, Scheme
from cluster import Cluster
from job_rig import write_job, write_task
from rollout.client.target import Target
from rollout.ui.cluster import Cluster as UiCluster
from rollout.ui.report import report_html, whole_run
from rollout_worker.backends.tiny import make_tiny
from test_experiment import write as write_experiment
from test_offload.suites import write as write_suite
from test_train import configure
from test_ui import page, prepare

pytestmark = [pytest.mark.slow, pytest.mark.engine, pytest.mark.asyncio(loop_scope="module")]
SUITE = "def test_right(): pass\n\ndef test_wrong():\n    print('<b>said</b>')\n    assert 1 == 2\n"
GRADE = "echo '{\"score\": 0.5}' > $AGENTLAB_GRADE_PATH"
SIZES: tuple[tuple[int, Scheme], ...] = ((DESK, "light"), (PHONE, "dark"))
SEEN = {
    "train": ("Loss", "Snapshots", "Gradient norm"),
    "job": ("By agent", "By task", "Mean score by agent", "Slowest trials"),
    "experiment": ("By variant", "Mean score by variant"),
    "test": ("Tests", "Processes over time"),
    "infer": (),
    "map": (),
}
"""By workload: headings of its run's view."""


@pytest.fixture(scope="module")
def cli(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cli]:
    directory = tmp_path_factory.mktemp("runs")
    found = Cli(directory, {"XDG_STATE_HOME": str(directory / ".state"), "XDG_CONFIG_HOME": str(directory / ".config")})
    yield found
    for process in found.started:
        if process.poll() is None:
            process.kill()
        process.communicate()


@pytest.fixture(scope="module")
def cluster(cli: Cli, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """With one run of each workload that has ended."""
    with Cluster(tmp_path_factory.mktemp("nodes")) as found:
        found.add_coordinator().wait_event("coordinator_ready")
        found.add_worker(worker={"slots": 4}).wait_event("worker_ready")
        make_tiny(cli.directory / "tiny")
        write_task(cli.directory / "tasks" / "right", "echo '<b>agent</b>'")
        write_task(cli.directory / "tasks" / "wrong", test="echo 0 > /logs/verifier/reward.txt")
        suite = write_suite(cli.directory / "suite", {"pytest.ini": "[pytest]\n", "test_a.py": SUITE})
        cli.rows(3)
        prepare(cli, 3)
        at = found.operator()
        works = [
            cli.start("train", "sft", "--config", configure(cli, "sft", cli.directory / "tiny", "sft", 8), *at),
            cli.start("job", "run", write_job(cli, datasets=[{"path": "tasks"}]), *at),
            cli.start("experiment", "run", write_experiment(cli, grading={"command": GRADE}), *at),
            cli.start("infer", "batch", "--config", str(cli.config()), *at),
            cli.start("map", "mine:work", "--input", "rows.jsonl", "--output", "mapped", *at),
            Cli(suite, cli.env, cli.started).start("test", "run", *at),
        ]
        for work, code in zip(works, (0, 0, 0, 0, 0, 1), strict=True):
            out, err = work.communicate(timeout=300)
            assert work.returncode == code, out + err
        yield found


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def chromium() -> AsyncGenerator[Any]:
    async with browser.chromium() as found:
        yield found


@pytest.fixture(scope="module")
def url(cli: Cli, cluster: Cluster) -> Iterator[str]:
    with page(cli, *cluster.operator()) as (found, _):
        yield found


def runs(url: str) -> dict[str, str]:
    """The path of each run by its workload."""
    rows = re.findall(r'href="/(runs/\w+)".*?<td>(\w+)</td>', httpx2.get(url).text, re.DOTALL)
    return {workload: path for path, workload in rows}


async def test_every_view_holds_for_every_reader(chromium: Any, url: str) -> None:
    found = runs(url)
    assert set(found) == set(SEEN)
    worker = re.search(r'href="/(workers/\w+)"', httpx2.get(f"{url}workers").text)
    assert worker is not None
    plain = ["", "events", "workers", worker[1], f"{worker[1]}/order/drain"]
    plain += [found["infer"] + rest for rest in ("/items", "/items/1", "/events")]
    paths = [*plain, *found.values(), *(f"{found[name]}/items/1" for name in ("train", "job", "experiment", "test"))]
    paths.append(f"{found['job']}/output")
    async with browser.opened(chromium, url) as seen:
        seen.page.set_default_timeout(20_000)
        for path in paths:
            for width, scheme in SIZES:
                await seen.page.set_viewport_size({"width": width, "height": 900})
                await seen.page.emulate_media(color_scheme=scheme)
                await seen.page.goto(url + path)
                assert await seen.axe() == [], path
                assert await seen.overflow() <= 0, path
                assert (await seen.brightness() < 0.5) == (scheme == "dark")
        for workload, path in found.items():
            await seen.page.goto(url + path)
            for heading in SEEN[workload]:
                await seen.page.get_by_role("heading", name=heading, exact=True).wait_for()
        await seen.page.goto(f"{url}{found['job']}/items/1")
        await seen.page.get_by_role("link", name="Open the files").click()
        await seen.page.get_by_role("link", name="agent/stdout.txt").click()
        await seen.page.get_by_text("<b>agent</b>").wait_for()
        assert await seen.axe() == []
        assert (seen.errors, seen.strangers(url)) == ([], [])


async def test_every_view_is_reached_by_keyboard(chromium: Any, url: str) -> None:
    names = dict(zip(SEEN, ("sft", "job", "e", "test-results", "out", "mapped"), strict=True))
    async with browser.opened(chromium, url) as seen:
        seen.page.set_default_timeout(20_000)
        for workload, path in runs(url).items():
            await seen.page.goto(url)
            for text, address in (
                (names[workload], path),
                ("Output of processes", f"{path}/output"),
                (names[workload], path),
                ("Rows", f"{path}/items"),
                ("1", f"{path}/items/1"),
            ):
                await seen.tab_to(text)
                await seen.page.keyboard.press("Enter")
                await seen.page.wait_for_url(f"{url}{address}")
        await seen.tab_to("Workers")
        await seen.page.keyboard.press("Enter")
        await seen.page.wait_for_url(f"{url}workers")
        await seen.page.locator("tbody th a").focus()
        await seen.page.keyboard.press("Enter")
        await seen.page.wait_for_url("**/workers/*")
        await seen.tab_to("Drain")
        await seen.page.keyboard.press("Enter")
        await seen.page.wait_for_url("**/order/drain")
        await seen.tab_to("Back")


async def test_a_report_of_every_workload_needs_nothing_else(
    chromium: Any, url: str, cluster: Cluster, tmp_path: Path
) -> None:
    at = Target(cluster.addresses, Path(cluster.operator()[-1]), "rollout", explicit=True)
    async with UiCluster(at, lambda _: None) as reading:
        for workload, path in runs(url).items():
            whole = await whole_run(reading, path.removeprefix("runs/"), lambda _: None)
            file = tmp_path / f"{workload}.html"
            file.write_text(report_html(whole, "c"))
            async with browser.opened(chromium, file.as_uri()) as seen:
                seen.page.set_default_timeout(20_000)
                assert await seen.axe() == [], workload
                for heading in SEEN[workload]:
                    await seen.page.get_by_role("heading", name=heading, exact=True).wait_for()
                assert (seen.errors, seen.requests) == ([], [file.as_uri()])
