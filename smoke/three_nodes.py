"""The whole of it in half a minute: see three_nodes.sh. Exits 1 with what was missing if anything did not happen."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

import rollout_worker.hosting.samples as samples
from cluster import Cluster, wait_until
from rollout.client import Runs
from rollout.client.runs import new_ulid
from rollout.model.item import ItemSpec, NewItem, Outcome
from rollout.model.run import RunSpec
from rollout.workloads.commit import CommitEntry

LIMIT_S = 30.0  # from the first submit to the last committed row
SEEN_WITHIN_S = 8.0  # from kill -9 of a worker to worker_failed
ROWS = 400
SAMPLES = Path(samples.__file__).parent


def step(text: str, since: float) -> None:
    print(f"{time.monotonic() - since:5.1f}s  {text}", flush=True)


def build_plugins(directory: Path) -> list[str]:
    """Copies of the sidecar and cdylib samples, the latter compiled; options for `rollout-worker run`."""
    for name in ("sidecar", "cdylib"):
        shutil.copytree(SAMPLES / name, directory / name)
    compiler = [os.environ.get("CC", "cc"), "-shared", "-fPIC", "-O2", "-o", "libsample.so", "sample.c"]
    subprocess.run(compiler, cwd=directory / "cdylib", check=True)
    return [o for name in ("sidecar", "cdylib") for o in ("--plugin", str(directory / name / "rollout-plugin.toml"))]


def item(n: int, payload: dict[str, Any], **spec: Any) -> NewItem:
    return NewItem(n.to_bytes(32, "big"), json.dumps(payload).encode(), ItemSpec(**spec))


async def run(client: Runs, items: Sequence[NewItem]) -> list[CommitEntry]:
    """Submit `items` as a run of the scripted workload and wait for all of them."""
    spec = RunSpec(new_ulid(), "script", b"{}")
    await client.submit(spec, lambda seq: iter(items[seq:]))
    entries: list[CommitEntry] = []
    async for page in client.watch(spec.run_id):
        entries += page.entries
    return entries


async def scenario(cluster: Cluster, plugins: list[str], root: Path) -> list[str]:
    faults: list[str] = []
    coordinator = cluster.add_coordinator()
    coordinator.wait_event("coordinator_ready")
    workers = [
        cluster.add_worker(start=False, args=plugins, worker={"slots": 8}, **{"worker.labels": {"node": str(n)}})
        for n in (1, 2, 3)
    ]
    workers[0].start().wait_event("worker_ready")
    options = cluster.operator()
    async with await Runs.connect([cluster.addresses[0]], tls_dir=Path(options[-1])) as client:
        start = time.monotonic()

        step("16 slow items go to the only worker, eight of them into its backlog; then two idle workers arrive", start)
        go_on = root / "go-on"
        slow = asyncio.create_task(run(client, [item(n, {"until": str(go_on), "data": n}) for n in range(16)]))
        await asyncio.sleep(1.0)
        for worker in workers[1:]:
            worker.start()
        await asyncio.to_thread(coordinator.wait_event, "work_stolen")
        go_on.touch()
        entries = await slow
        stolen = list(coordinator.events("work_stolen"))
        thieves = {e["thief"] for e in stolen}
        by_thief = [e for e in entries if e.worker in thieves and e.attempt > 1]
        step(f"{len(stolen)} steals; {len(by_thief)} of 16 rows committed by a thief", start)
        if len(entries) != 16 or not by_thief:
            faults.append("no stolen item was committed by its thief")

        places = [(n, plugin) for n in ("1", "2", "3") for plugin in ("sidecar", "cdylib")]
        calls = {
            "sidecar": {"method": "overlap", "payload": {"completion": "the cat sat", "answer": "the cat ran"}},
            "cdylib": {"method": "count", "payload": {"text": "abc"}},
        }
        entries = await run(
            client,
            [
                item(
                    n,
                    {"plugin": f"sample-{p}", **calls[p]},
                    require_labels=(("node", node),),
                    require_plugin=f"sample-{p}",
                )
                for n, (node, p) in enumerate(places)
            ],
        )
        answers = [(e.outcome, json.loads(e.data) if e.data else e.failure) for e in entries]
        step(f"both plugins called on each of three workers: {[a for _, a in answers]}", start)
        right = {"sample-sidecar": 0.5, "sample-cdylib": {"bytes": len(b'{"text":"abc"}')}}
        wrong = [
            (plugin, answer)
            for (_, plugin), (outcome, answer) in zip(places, answers, strict=True)
            if outcome is not Outcome.DONE or answer != right[f"sample-{plugin}"]
        ]
        if wrong or len({e.worker for e in entries}) != 3:
            faults.append(f"plugin calls failed: {answers}")

        step(f"{ROWS} rows; kill -9 of worker-2, then of the coordinator", start)
        rows = asyncio.create_task(run(client, [item(n, {"sleep_ms": 250, "data": n}) for n in range(ROWS)]))
        await asyncio.sleep(1.5)
        victim = workers[1].wait_event("worker_ready")["incarnation"]
        killed = time.monotonic()
        workers[1].kill()
        await asyncio.to_thread(
            wait_until,
            lambda: any(e["worker"] == victim for e in coordinator.events("worker_failed")),
            SEEN_WITHIN_S,
            f"worker_failed of {victim}",
        )
        step(f"worker_failed after {time.monotonic() - killed:.1f} s", start)
        coordinator.kill()
        coordinator.start()
        step("coordinator killed and restarted", start)
        entries = await rows
        seconds = time.monotonic() - start
        values = [json.loads(e.data) for e in entries]
        step(f"{len(values)} rows, in order and each once: {values == list(range(ROWS))}", start)
        if values != list(range(ROWS)):
            faults.append("rows are missing, repeated or out of order")
        if len(list(coordinator.events("lease_acquired"))) != 2:
            faults.append("the coordinator did not come back")
        if seconds > LIMIT_S:
            faults.append(f"took {seconds:.1f} s, more than {LIMIT_S:.0f} s")
    return faults


def main() -> int:
    root = Path(tempfile.mkdtemp(prefix="rollout-smoke-"))
    plugins = build_plugins(root / "plugins")
    with Cluster(root / "nodes") as cluster:
        faults = asyncio.run(scenario(cluster, plugins, root))
    for fault in faults:
        print(f"FAILED: {fault} (logs: {root})")
    if not faults:
        shutil.rmtree(root, ignore_errors=True)
        print("1 passed, 0 failed")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
