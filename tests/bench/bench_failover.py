"""Two coordinators on PostgreSQL: the leader is killed, or stopped, while items run; when does the standby serve?"""

from __future__ import annotations

import asyncio
import collections
import json
import signal
import statistics
import time
from pathlib import Path
from typing import Any

from cluster import Cluster, Node
from measure import NoPostgresError, Row, directory, postgres, spread, wait_for
from rollout.client import Runs
from rollout.client.runs import new_ulid
from rollout.model.item import NewItem
from rollout.model.run import RunSpec

TTL_S = 5.0
ITEMS = 16
RUN_S = 14.0  # of an item: longer than any failover


def served(node: Node) -> int:
    return sum(1 for _ in node.events("ledger_replayed"))


def starts(effects: Path) -> collections.Counter[str]:
    lines = effects.read_text().splitlines() if effects.exists() else []
    return collections.Counter(line.split()[1] for line in lines if line.startswith("start"))


async def submit(cluster: Cluster, effects: Path, seconds: float) -> RunSpec:
    spec = RunSpec(new_ulid(), "script", b"{}")
    bodies: list[dict[str, Any]] = [
        {"sleep_ms": int(seconds * 1000), "effects": str(effects), "data": str(n)} for n in range(ITEMS)
    ]
    items = [NewItem(n.to_bytes(32, "big"), json.dumps(body).encode()) for n, body in enumerate(bodies)]
    async with await Runs.connect(cluster.addresses, tls_dir=Path(cluster.operator()[-1])) as client:
        await client.open(spec)
        await client.submit(spec, lambda seq: items[seq:])
    return spec


async def finish(cluster: Cluster, spec: RunSpec) -> int:
    """Waits for the run's end; the number of items that are done."""
    async with await Runs.connect(cluster.addresses, tls_dir=Path(cluster.operator()[-1])) as client:
        async for page in client.watch(spec.run_id, status_only=True):
            if page.last and page.status is not None:
                return page.status.done
    raise AssertionError("a watched run ends")


def fail_over(cluster: Cluster, leader: Node, standby: Node, how: signal.Signals) -> float:
    """Seconds until the standby serves; the leader is its standby afterwards."""
    before = served(standby)
    began = time.monotonic()
    assert leader.process is not None
    leader.process.send_signal(how)
    seconds = wait_for(lambda: served(standby) > before, 60, "the standby to serve") - began
    leader.process.wait(timeout=60)
    stood = sum(1 for _ in leader.events("coordinator_standby"))
    leader.start()
    leader.wait_event("coordinator_standby", count=stood + 1)
    return seconds


def measure(root: Path, url: str, kills: int, stops: int) -> tuple[list[float], list[float], int, int]:
    """Seconds of failovers by kill and by clean stop; attempts in flight at the kills, and those that survived."""
    killed: list[float] = []
    stopped: list[float] = []
    in_flight = survived = 0
    sections: dict[str, Any] = {"objects": {"backend": "postgres"}}
    with Cluster(root, postgres_url=url) as cluster:
        cluster.add_coordinator(**sections).wait_event("coordinator_ready")
        cluster.add_coordinator(others=cluster.addresses, **sections).wait_event("coordinator_standby")
        for _ in range(2):
            cluster.add_worker(worker={"slots": ITEMS // 2}).wait_event("worker_ready")
        cluster.operator()
        leader, standby = cluster.coordinators
        for n in range(kills):
            effects = root / f"effects-{n}"
            spec = asyncio.run(submit(cluster, effects, RUN_S))
            wait_for(lambda effects=effects: len(starts(effects)) == ITEMS, 60, "every item to run")
            in_flight += ITEMS
            killed.append(fail_over(cluster, leader, standby, signal.SIGKILL))
            leader, standby = standby, leader
            done = asyncio.run(finish(cluster, spec))
            if done != ITEMS:
                raise RuntimeError(f"{done} of {ITEMS} items were done")
            survived += sum(1 for count in starts(effects).values() if count == 1)
        for _ in range(stops):
            stopped.append(fail_over(cluster, leader, standby, signal.SIGTERM))
            leader, standby = standby, leader
    return killed, stopped, in_flight, survived


def rows(quick: bool) -> list[Row]:
    try:
        with postgres() as url, directory() as root:
            killed, stopped, in_flight, survived = measure(root, url, 1 if quick else 3, 1 if quick else 3)
    except NoPostgresError as error:
        return [Row("standby after SIGKILL of the leader", f"not run: {error}", "≤TTL + 2 s")]
    kill, stop = statistics.median(killed), statistics.median(stopped)
    return [
        Row(
            "standby after SIGKILL of the leader",
            f"{spread(killed)} s of {len(killed)}",
            f"≤TTL + 2 s = {TTL_S + 2:.0f} s",
            max(killed) <= TTL_S + 2,
            {"seconds": kill},
        ),
        Row(
            "standby after SIGTERM of the leader", f"{spread(stopped)} s of {len(stopped)}", "≤1 s",
            stop <= 1, {"seconds": stop},
        ),
        Row(
            "attempts that survive",
            f"{survived} of {in_flight}, each run once",
            "all non-exclusive",
            survived == in_flight,
            {"in_flight": in_flight, "survived": survived},
        ),
    ]  # fmt: skip
