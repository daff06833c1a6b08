"""The live page over a real cluster, in a real browser."""

from __future__ import annotations

import json
import re
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import browser
import httpx2
import pytest
from acceptance_cli import Cli, until
from cluster import Cluster
from rollout.client.private import STATE_DIR, OwnerLock

CODE = """
import time
def work(row):
    time.sleep(0.2)
    print("<i>printed</i>")
    if row["n"] % 5 == 4:
        raise ValueError(f"<b>bad</b> {row['n']}")
    return {"text": "<script>document.title = 'taken'</script>"}
"""


def prepare(cli: Cli, rows: int) -> None:
    (cli.directory / "mine.py").write_text(CODE)
    (cli.directory / "rows.jsonl").write_text("".join(json.dumps({"n": n}) + "\n" for n in range(rows)))


@contextmanager
def page(cli: Cli, *args: str) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """Its address, and its process."""
    process = cli.start("ui", "--listen", "127.0.0.1:0", *args)
    assert process.stderr is not None
    for line in process.stderr:
        if found := re.search(r"http://\S+/", line):
            yield found[0], process
            break
    if process.poll() is None:
        process.send_signal(signal.SIGINT)
    process.communicate(timeout=20)


async def test_a_run_is_followed_paused_and_seen_through_a_restart(cli: Cli, tmp_path: Path) -> None:
    prepare(cli, 400)
    with Cluster(tmp_path / ".nodes") as cluster:
        coordinator = cluster.add_coordinator()
        coordinator.wait_event("coordinator_ready")
        cluster.add_worker(worker={"slots": 2}).wait_event("worker_ready")
        at = cluster.operator()
        given = ("map", "mine:work", "--input", "rows.jsonl", "--output", "out", "--max-attempts", "1")
        work = cli.start(*given, *at)
        results = cli.directory / "out" / "results.jsonl"
        until(lambda: (results.exists() and results.read_text().count("\n") > 4) or work.poll() is not None, "rows")
        assert work.poll() is None, work.communicate()
        with page(cli, *at) as (url, process):
            async with browser.chromium() as chromium, browser.opened(chromium, url) as seen:
                await seen.page.get_by_role("link", name="out", exact=True).click()
                state = seen.page.locator("#run .state")
                assert await state.inner_text() == "running"
                await seen.page.get_by_text("ValueError: <b>bad</b>").first.wait_for()
                done = seen.page.locator("#run dd").nth(1)
                before = await done.inner_text()
                await seen.page.wait_for_function(
                    "before => document.querySelectorAll('#run dd')[1].innerText !== before", arg=before
                )

                await seen.page.get_by_role("link", name="Pause").click()
                assert "nothing new begins" in await seen.page.inner_text("#order")
                await seen.page.get_by_label("Reason").fill("to look <i>closer</i>")
                await seen.page.get_by_role("button", name="Pause").click()
                await seen.page.locator("#run .state.paused").wait_for()
                await seen.page.get_by_text("to look <i>closer</i>").first.wait_for()

                coordinator.kill()
                await seen.page.locator("#trouble:not(:empty)").wait_for(timeout=30_000)
                coordinator.start()
                await seen.page.locator("#trouble:empty").wait_for(timeout=60_000, state="attached")
                await seen.page.get_by_role("link", name="Resume").click()
                await seen.page.get_by_role("button", name="Resume").click()
                await seen.page.locator("#run .state.running").wait_for()

                for path, text in (("items?which=failed", "exception"), ("output", "<i>printed</i>")):
                    await seen.page.goto(f"{seen.page.url}/{path}")
                    await seen.page.get_by_text(text).first.wait_for()
                    assert await seen.axe() == []
                    await seen.page.go_back()
                await seen.page.goto(f"{seen.page.url}/items/1")
                await seen.page.get_by_text("document.title = 'taken'").first.wait_for()
                assert await seen.page.title() != "taken"
                for path in ("workers", "events"):
                    await seen.page.goto(url + path)
                    assert await seen.axe() == []
                assert (seen.errors, seen.strangers(url)) == ([], [])
                process.send_signal(signal.SIGINT)  # while somebody looks
                assert process.wait(20) == 0 and process.stderr is not None
                assert "uvicorn" not in process.stderr.read()
        work.kill()


def test_a_page_at_rest_leaves_the_directory_to_its_command(cli: Cli) -> None:
    prepare(cli, 4)
    given = ("map", "mine:work", "--input", "rows.jsonl", "--output", "out", "--local")
    assert cli.run(*given).code == 0
    with page(cli, "--dir", "out") as (url, _):
        assert ">completed<" in httpx2.get(url).text
        rows = cli.directory / "rows.jsonl"
        rows.write_text(rows.read_text() + '{"n": 5}\n')
        lock = OwnerLock(cli.directory / "out" / STATE_DIR)
        until(lock.try_acquire, "nobody to run the cluster")
        lock.release()
        assert cli.run(*given, "--extend").code == 0
    report = cli.run("report", "@last", "--dir", "out", "--output", "r.html")
    assert report.code == 0 and "completed" in (cli.directory / "r.html").read_text()


@pytest.mark.slow
async def test_the_page_of_a_standby_is_seen_through_a_failover(cli: Cli, tmp_path: Path, postgres_url: str) -> None:
    sections = {"objects": {"backend": "postgres"}, "http": {"ui": True, "ui_listen_addr": "127.0.0.1:0"}}
    prepare(cli, 200)
    with Cluster(tmp_path / ".nodes", postgres_url=postgres_url) as cluster:
        leader = cluster.add_coordinator(**sections)
        leader.wait_event("coordinator_ready")
        standby = cluster.add_coordinator(others=list(cluster.addresses), **sections)
        standby.wait_event("coordinator_standby")
        url = standby.wait_event("ui_ready")["url"]
        cluster.add_worker(worker={"slots": 2}).wait_event("worker_ready")
        given = ("map", "mine:work", "--input", "rows.jsonl", "--output", "out", "--max-attempts", "1")
        work = cli.start(*given, *cluster.operator())
        until(lambda: "/runs/" in httpx2.get(url).text or work.poll() is not None, "a run")
        async with browser.chromium() as chromium, browser.opened(chromium, url) as seen:
            await seen.page.goto(f"{url}workers")
            await seen.page.get_by_text(f"leader: {cluster.addresses[0]}").wait_for()
            await seen.page.goto(url)
            await seen.page.get_by_role("link", name="out", exact=True).click()
            leader.kill()
            standby.wait_event("coordinator_ready")
            await seen.page.locator("#run .state.completed").wait_for(timeout=120_000)
            await seen.page.goto(f"{url}workers")
            await seen.page.get_by_text(f"leader: {cluster.addresses[1]}").wait_for()
            assert (seen.errors, seen.strangers(url)) == ([], [])
        assert work.wait(60) in (0, 1)
