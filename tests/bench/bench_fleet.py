"""Hundreds of workers with engines full of rows on one coordinator; then it is killed, and all come back at once."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from bench_beats import Load
from bench_engine import items
from bench_payload import items as large
from cluster import Cluster, Node
from measure import Row, cpu_s, directory
from rollout.client import Runs
from rollout.client.runs import new_ulid
from rollout.model.run import RunSpec

PROCESSES = 2
WIDTH = 64  # rows that each engine runs at once
SECONDS = (5.0, 15.0)  # that each of them takes
BACK_S = 60.0
RESULT = 200  # bytes
LARGE, LARGE_WIDTH = 16 << 10, 32

Figures = dict[str, float]


async def told(loads: list[Load]) -> Figures:
    """Sums over the processes, and the largest of what is late."""
    found = await asyncio.gather(*[asyncio.to_thread(load.ask) for load in loads])
    return {
        key: (max if key.endswith("_s") else sum)(figures[key] for figures in found) for key in found[0]
    }  # fmt: skip


async def pace(loads: list[Load], node: Node, seconds: float) -> Figures:
    """What happened in `seconds`, each second."""
    assert node.process is not None
    before, cpu, began = await told(loads), cpu_s(node.process.pid), time.monotonic()
    await asyncio.sleep(seconds)
    after, used, wall = await told(loads), cpu_s(node.process.pid) - cpu, time.monotonic() - began
    rates = {key: (after[key] - before[key]) / wall for key in ("beats", "acks", "accepted")}
    return {**after, **rates, "cores": used / wall, "total_accepted": after["accepted"]}


async def back(loads: list[Load], welcomed: float) -> float:
    """Seconds until so many Welcomes have been heard."""
    began = time.monotonic()
    while (await told(loads))["welcomed"] < welcomed and time.monotonic() < began + BACK_S:  # noqa: ASYNC110
        await asyncio.sleep(0.1)
    return time.monotonic() - began


async def watched(cluster: Cluster, node: Node, loads: list[Load], count: int, seconds: float) -> tuple[Figures, ...]:
    """As the fleet works, and again after its coordinator was killed; `back_s`: until all had its Welcome."""
    mean = sum(SECONDS) / 2
    settling = 2 * SECONDS[1]
    async with await Runs.connect(cluster.addresses, tls_dir=Path(cluster.operator()[-1])) as client:
        spec = RunSpec(new_ulid(), "script", b"{}")
        total = int(count * WIDTH * ((2 * settling + 2 * seconds + BACK_S) / mean + 2))
        await client.open(spec)
        submitting = asyncio.create_task(client.submit(spec, lambda seq: items(total, 256, seq)))
        await asyncio.sleep(settling)
        before = await pace(loads, node, seconds)
        node.kill()
        killed = time.monotonic()
        node.start()
        await asyncio.to_thread(node.wait_event, "coordinator_ready", 60.0, node.starts)
        ready_s = time.monotonic() - killed
        back_s = await back(loads, before["welcomed"] + count) + ready_s
        after = await pace(loads, node, seconds)
        submitting.cancel()
    return before, {**after, "ready_s": ready_s, "back_s": back_s}


async def moved(cluster: Cluster, node: Node, loads: list[Load], count: int, seconds: float) -> Figures:
    """As the fleet works on large rows; `objects`: cores of their server, `cached`: MiB in the hosts' caches."""
    async with await Runs.connect(cluster.addresses, tls_dir=Path(cluster.operator()[-1])) as client:
        spec = RunSpec(new_ulid(), "script", b"{}")
        total = int(count * LARGE_WIDTH * ((2 * SECONDS[1] + seconds) / (sum(SECONDS) / 2) + 2))
        await client.open(spec)
        await client.submit(spec, lambda seq: large(total, 1, seq))
        await asyncio.sleep(SECONDS[1])
        assert node.process is not None
        pid = node.process.pid
        used = cpu_s(pid, children=True) - cpu_s(pid)
        was = await pace(loads, node, seconds)
        used = cpu_s(pid, children=True) - cpu_s(pid) - used
    caches = (node.directory / "data/caches").rglob("*")
    cached = sum(path.stat().st_size for path in caches if path.is_file()) / (1 << 20)
    given = (was["total_accepted"] + was["running"]) * LARGE / (1 << 20)
    stored = sum(1 for _ in (node.directory / "data/object-store").rglob("*.meta.json"))
    return {**was, "objects": used / seconds, "cached": cached, "given": given, "stored": stored}


@contextmanager
def fleet(
    count: int, width: int, result: int, seconds: tuple[float, float] = SECONDS
) -> Generator[tuple[Cluster, Node, list[Load]]]:
    """A coordinator, and so many workers that have joined it. `seconds`: that a row takes."""
    with directory() as root, Cluster(root) as cluster:
        node = cluster.add_coordinator()
        node.wait_event("coordinator_ready")
        to = (cluster.addresses[0], node.directory / "data/tls", count // PROCESSES, width, *seconds, result)
        loads = [Load("fleet_load.py", *to) for _ in range(PROCESSES)]
        try:
            for load in loads:
                load.answer()
            yield cluster, node, loads
        finally:
            for load in loads:
                load.close()


def large_rows(quick: bool) -> Row:
    count, seconds = (16, 10.0) if quick else (40, 30.0)
    with fleet(count, LARGE_WIDTH, LARGE) as (cluster, node, loads):
        was = asyncio.run(moved(cluster, node, loads, count, seconds))
    asked = count * LARGE_WIDTH / (sum(SECONDS) / 2)
    return Row(
        f"{count} hosts, {LARGE_WIDTH} rows of 16 KiB at once, {seconds:g} s",
        f"{was['accepted']:,.0f} of {asked:,.0f} rows/s; {was['cached']:,.0f} of {was['given']:,.0f} MiB fetched as packs; "
        f"{was['total_accepted']:,.0f} results and rows in {was['stored']:,.0f} objects; objects server "
        f"{was['objects']:.2f}, coordinator {was['cores']:.2f} cores; answers {was['answer_s']:.2f} s",
        values={
            "rows_per_s": was["accepted"],
            "cached_mib": was["cached"],
            "given_mib": was["given"],
            "objects": was["stored"],
        },
    )


def rows(quick: bool) -> list[Row]:
    return [*full_engines(quick), large_rows(quick)]


def full_engines(quick: bool) -> list[Row]:
    count, seconds = (200, 10.0) if quick else (600, 30.0)
    with fleet(count, WIDTH, RESULT) as (cluster, node, loads):
        before, after = asyncio.run(watched(cluster, node, loads, count, seconds))
        failed = sum(1 for _ in node.events("worker_failed"))
    asked = count * WIDTH / (sum(SECONDS) / 2)
    engines = f"{count:,} workers, {WIDTH} rows at once, {SECONDS[0]:g} to {SECONDS[1]:g} s a row"

    def said(was: Figures) -> str:
        return (
            f"{was['accepted']:,.0f} of {asked:,.0f} rows/s, "
            f"{was['cores'] / max(was['accepted'], 1) * 1e6:.0f} µs a row, {was['cores']:.2f} cores, "
            f"{was['running'] / count / WIDTH * 100:.0f} % busy; answers {was['answer_s']:.2f} s "
            f"(99 %: {was['late_answer_s']:.2f}); {was['acks'] / count:.2f} acknowledgements/s each; latest beat "
            f"{was['late_s'] * 1000:.0f} ms late"
        )

    return [
        Row(
            f"{engines}, {seconds:g} s",
            f"{failed} failed, {before['lost']:.0f} streams lost; {said(before)}",
            "no false failure",
            failed == 0 and before["lost"] == 0,
            {"rows_per_s": before["accepted"], "false_failures": failed},
        ),
        Row(
            "the same, coordinator killed",
            f"serves after {after['ready_s']:.1f} s, workers back after {after['back_s']:.1f}; "
            f"{after['stale']:.0f} stale results, {after['fences']:.0f} fenced; {said(after)}",
            "",
            None,
            {"back_s": after["back_s"], "rows_per_s": after["accepted"]},
        ),
    ]
