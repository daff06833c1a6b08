"""20,000 rows on two workers while everything is killed: kill -9 of the coordinator twice and of each worker once.

    python smoke/kills.py [--rows 20000] [--delay-ms 500] [--postgres URL] [--dir DIR]

With --postgres a standby runs too and the leader is killed instead. Each kill waits until at least 100 items are
assigned. Afterwards an independent check reads the output files and the coordinators' logs: every row once and in
order, and every attempt that was open at a kill adopted or given to another.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

from cluster import Cluster, Node, binary, wait_until, write_toml

MIN_ASSIGNED = 100


def in_flight(cluster: Cluster) -> int:
    """Items assigned to workers at present, as an operator sees them; 0 while nobody answers."""
    command = [binary("rollout"), "workers", "--json", *cluster.operator()]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        return 0
    return sum(w["in_flight"] for w in json.loads(done.stdout)["workers"] if w["state"] == "ready")


def leader_of(cluster: Cluster) -> Node:
    """The coordinator that took the lease last."""
    epochs = {n.name: max((e["epoch"] for e in n.events("lease_acquired")), default=-1) for n in cluster.coordinators}
    return max((n for n in cluster.coordinators if n.alive()), key=lambda n: epochs[n.name])


def committed(output: Path) -> int:
    return output.read_bytes().count(b"\n") if output.exists() else 0


def strike(cluster: Cluster, output: Path, rows: int, report: list[dict[str, Any]]) -> None:
    """The four kills, spread over the run."""
    plan = ["coordinator", "worker-1", "coordinator", "worker-2"]
    for n, target in enumerate(plan):
        wait_until(lambda n=n: committed(output) >= rows * (n + 1) // 6, 600, f"{n + 1}/6 of the rows")
        wait_until(lambda: in_flight(cluster) >= MIN_ASSIGNED, 60, f"{MIN_ASSIGNED} items assigned")
        node = leader_of(cluster) if target == "coordinator" else next(w for w in cluster.workers if w.name == target)
        assigned, at = in_flight(cluster), committed(output)
        struck = time.monotonic()
        node.kill()
        print(f"-- kill -9 {node.name} at {at} committed rows with {assigned} items assigned", flush=True)
        node.start()
        wait_until(lambda at=at: committed(output) > at + 200, 120, "the run to go on")
        report.append(
            {
                "killed": node.name,
                "assigned": assigned,
                "committed": at,
                "moving_after_s": round(time.monotonic() - struck, 1),
            }
        )


def unaccounted(cluster: Cluster) -> list[str]:
    """Every attempt that a new leader found open must be adopted or given to another, by what the logs say.

    A worker that said Hello without an attempt either stopped it, because no coordinator came back in time, or never
    received it: the leader died between the commit and the send.
    """
    faults: list[str] = []
    entries = sorted((e for c in cluster.coordinators for e in c.events()), key=lambda e: e["timestamp"])
    orphaned = sum(1 for w in cluster.workers for _ in w.events("worker_orphaned"))
    starts = [n for n, e in enumerate(entries) if e["event"] == "ledger_replayed" and e["open_attempts"]]
    for at, end in zip(starts, [*starts[1:], len(entries)], strict=True):
        told = [e for e in entries[at:end] if e["event"] == "worker_reconciled"]
        adopted = sum(e["kept"] + e["resend"] + e["accepted"] for e in told)
        repended = sum(e["repended"] for e in told)
        lost = sum(e["items"] for e in entries[at:end] if e["event"] == "worker_failed")
        print(
            f"-- leader at {entries[at]['timestamp']}: {entries[at]['open_attempts']} open, {adopted} adopted, "
            f"{repended} re-pended, workers that gave up waiting: {orphaned}"
        )
        if adopted + repended + lost < entries[at]["open_attempts"]:
            faults.append(
                f"{entries[at]['open_attempts']} attempts were open, {adopted + repended + lost} are accounted for"
            )
        if repended and orphaned:
            faults.append(f"{repended} attempts that could have survived the coordinator did not")
    return faults


def check(output: Path, rows: int) -> list[str]:
    faults: list[str] = []
    numbers = [json.loads(line)["n"] for line in output.read_text().splitlines()]
    if len(numbers) != rows:
        faults.append(f"{len(numbers)} lines instead of {rows}")
    if numbers != sorted(numbers):
        faults.append("not in input order")
    if len(set(numbers)) != len(numbers):
        faults.append("some row twice")
    errors = output.with_name("errors.jsonl")
    if errors.exists() and errors.read_text().strip():
        faults.append(f"errors.jsonl is not empty: {errors.read_text().splitlines()[0]}")
    return faults


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=20_000)
    parser.add_argument("--delay-ms", type=int, default=500)
    parser.add_argument("--postgres", default="")
    parser.add_argument("--dir", type=Path, default=None)
    args = parser.parse_args()
    root: Path = args.dir or Path(tempfile.mkdtemp(prefix="rollout-kills-"))
    root.mkdir(parents=True, exist_ok=True)
    prompts = root / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": f"row {n}", "n": n}) + "\n" for n in range(args.rows)))
    config = write_toml(
        root / "batch.toml",
        {
            "model": {"uri": "mock"},
            "backend": {"kind": "mock", "delay_ms": args.delay_ms, "concurrency": 64},
            "input": {"glob": str(prompts)},
            "output": {"dir": str(root / "out")},
        },
    )
    output = root / "out" / "completions.jsonl"
    report: list[dict[str, Any]] = []
    started = time.monotonic()
    # Several coordinators need an object store that each reaches.
    sections: dict[str, Any] = {"objects": {"backend": "postgres"}} if args.postgres else {}
    with Cluster(root / "nodes", postgres_url=args.postgres) as cluster:
        cluster.add_coordinator(**sections).wait_event("coordinator_ready")
        if args.postgres:
            cluster.add_coordinator(others=cluster.addresses, **sections).wait_event("coordinator_standby")
        for _ in range(2):
            cluster.add_worker()
        for worker in cluster.workers:
            worker.wait_event("worker_ready")
        cluster.operator()
        killer = threading.Thread(target=strike, args=(cluster, output, args.rows, report), daemon=True)
        killer.start()
        command = [binary("rollout"), "infer", "batch", "--config", str(config), *cluster.operator()]
        code = subprocess.run(command, check=False).returncode
        killer.join(timeout=1)
        seconds = time.monotonic() - started
        events = {
            name: sum(1 for c in cluster.coordinators for _ in c.events(name))
            for name in ("lease_acquired", "ledger_replayed", "worker_reconciled", "worker_failed", "work_stolen")
        }
    faults = check(output, args.rows) + unaccounted(cluster)
    if code != 0:
        faults.append(f"rollout infer batch exited with {code}")
    if len(report) != 4:
        faults.append(f"only {len(report)} of 4 kills happened while rows were running")
    print(
        json.dumps(
            {
                "rows": args.rows,
                "seconds": round(seconds, 1),
                "kills": report,
                "events": events,
                "faults": faults,
                "dir": str(root),
            },
            indent=2,
        )
    )
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
