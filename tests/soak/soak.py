"""An hour of everyday life: workers join, drain and die all the time, certificates renew every minute, rows run.

    python tests/soak/soak.py [--seconds 3600] [--postgres URL] [--record] [--dir DIR]

A coordinator (with --postgres a standby too), two workers that stay, three that come and go, batches of mock rows one
after another through `rollout infer batch`, and a client process that uses the client library all the time. Every
long-lived process is sampled. Exits 1 if memory, descriptors, threads or tasks of one of them grew, if a worker was
declared failed that nobody killed, or if a row is missing, repeated or out of order.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import psutil

sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "smoke"))

from cluster import Cluster, Node, binary, wait_until, write_toml
from results_page import write_section
from soak_churn import Churn, left_behind
from soak_sampling import Sampler, Series, Watched, postgres_sizes, sqlite_sizes
from soak_verdict import Judged, Life, judge, kept_too_long, summary, table

CERTIFICATE_S = 120.0  # renewed at half life: every minute
HOST_CERTIFICATE_S = 600.0
ROWS = 300
DELAY_MS = 800
SEEN_WITHIN_S = 12.0  # kill -9 to worker_failed, plus what a busy machine takes


@dataclass
class Report:
    seconds: float
    judged: list[Judged]
    counts: dict[str, int]
    faults: list[str] = field(default_factory=list[str])

    def text(self) -> str:
        lines = [table(self.judged), ""]
        lines += [f"- {name}: {value}" for name, value in self.counts.items()]
        lines += ["", *(f"FAILED: {fault}" for fault in self.faults)]
        return "\n".join(lines).rstrip() + "\n"


class Batches(threading.Thread):
    """`rollout infer batch` against the cluster, one after another, each checked and then removed."""

    def __init__(self, root: Path, options: list[str]) -> None:
        super().__init__(name="batches", daemon=True)
        self.done = self.rows = 0
        self.faults: list[str] = []
        self._root = root
        self._options = options
        self._stopped = threading.Event()
        self._process: subprocess.Popen[bytes] | None = None

    def run(self) -> None:
        self._root.mkdir(parents=True)
        prompts = self._root / "prompts.jsonl"
        prompts.write_text("".join(json.dumps({"prompt": f"row {n}", "n": n}) + "\n" for n in range(ROWS)))
        config = write_toml(
            self._root / "batch.toml",
            {
                "model": {"uri": "mock"},
                "backend": {"kind": "mock", "delay_ms": DELAY_MS, "jitter_ms": DELAY_MS / 2, "concurrency": 8},
                "input": {"glob": str(prompts)},
                "output": {"dir": str(self._root / "out")},
                # Workers die all the time: a row that lost several of them is no row that kills them.
                "run": {"max_worker_lost": 100},
            },
        )
        while not self._stopped.is_set():
            self._one(config)

    def _one(self, config: Path) -> None:
        command = [binary("rollout"), "infer", "batch", "--config", str(config), *self._options]
        log = self._root / "batch.log"
        with log.open("wb") as out:
            self._process = subprocess.Popen(command, stdout=out, stderr=out, start_new_session=True)
            code = self._process.wait()
        if code != 0:
            self.faults.append(f"rollout infer batch exited with {code}: {log.read_text()[-500:]}")
            self._stopped.wait(5)
            return
        numbers = [json.loads(line)["n"] for line in (self._root / "out/completions.jsonl").read_text().splitlines()]
        errors = self._root / "out/errors.jsonl"
        if numbers != list(range(ROWS)):
            self.faults.append(f"batch {self.done}: {len(numbers)} lines, not each row once and in order")
        if errors.exists() and errors.read_text().strip():
            self.faults.append(f"batch {self.done}: {errors.read_text().splitlines()[0]}")
        shutil.rmtree(self._root / "out")
        self.done += 1
        self.rows += len(numbers)

    def stop(self) -> None:
        """After the batch under way."""
        self._stopped.set()
        self.join(timeout=300)
        if self.is_alive() and self._process is not None:
            self._process.kill()
            self.faults.append("the last batch did not end within 300 s")


class Soak:
    """All parts of one soak below one directory."""

    JUDGED_FROM_S = 1200.0  # a shorter one has not warmed up: its table is printed and only its rows are judged

    def __init__(self, root: Path, seconds: float, postgres_url: str, seed: int) -> None:
        self.root, self.seconds, self.postgres_url, self.seed = root, seconds, postgres_url, seed
        self.short = seconds < self.JUDGED_FROM_S
        transport = {"certificate_lifetime_s": CERTIFICATE_S, "host_certificate_lifetime_s": HOST_CERTIFICATE_S}
        self.cluster = Cluster(root / "nodes", postgres_url=postgres_url, transport=transport)
        self.faults: list[str] = []
        self.stable: list[Node] = []

    def run(self) -> Report:
        with self.cluster:
            watched = self._start_stable()
            options = self.cluster.operator()
            batches = Batches(self.root / "batches", options)
            churn = Churn(self.cluster, 3, *self._times(), self.seed, _worker_sections())
            with self._client(options) as client:
                watched.append(Watched("client", _pid(client)))
                every = 10.0 if not self.short else 2.0
                sampler = Sampler(watched, self._database(), every)
                for part in (sampler, churn, batches):
                    part.start()
                self._watch_over(client, time.monotonic() + self.seconds)
                sampler.stop()
                churn.stop()
                batches.stop()
            self._await_failures(churn)
        tasks = Series("client", "tasks", "", [(e["at"], e["tasks"]) for e in client.events("gauge")])
        lives = list(self._lives(sampler.began_wall))
        held = [one for (_, what), one in sampler.series.items() if what == "runs in memory"]
        kept = [kept_too_long(one, lives) for one in held]
        judged = judge([*sampler.series.values(), *kept, tasks], self.seconds)
        counts = self._counts(sampler, churn, batches, client)
        self._check(sampler, churn, batches, client)
        if not self.short:
            self.faults += [
                f"{j.who}: {j.what} grew from {j.first:.1f} to {j.last:.1f} {j.unit}" for j in judged if not j.flat
            ]
        return Report(self.seconds, judged, counts, self.faults)

    def _times(self) -> tuple[tuple[float, float], tuple[float, float]]:
        return ((4.0, 12.0), (0.0, 2.0)) if self.short else ((15.0, 60.0), (0.0, 8.0))

    def _database(self) -> Any:
        if self.postgres_url:
            return postgres_sizes(self.postgres_url)
        return sqlite_sizes(self.cluster.coordinators[0].directory / "data/rollout.db")

    def _start_stable(self) -> list[Watched]:
        sections: dict[str, Any] = {"objects": {"backend": "postgres"}} if self.postgres_url else {}
        watched: list[Watched] = []
        leader = self.cluster.add_coordinator(**sections)
        ready = leader.wait_event("coordinator_ready")
        watched.append(Watched("coordinator", _pid(leader), ready["http_addr"]))
        if self.postgres_url:
            standby = self.cluster.add_coordinator(others=self.cluster.addresses, **sections)
            ready = standby.wait_event("coordinator_standby")
            watched.append(Watched("standby", _pid(standby), ready["http_addr"]))
        for n in (1, 2):
            worker = self.cluster.add_worker(**_worker_sections(), http={"listen_addr": "127.0.0.1:0"})
            worker.wait_event("worker_ready")
            address = worker.wait_event("http_ready")["addr"]
            watched.append(Watched(f"worker-{n}", _pid(worker), address))
            self.stable.append(worker)
        return watched

    @contextmanager
    def _client(self, options: list[str]) -> Iterator[Node]:
        directory = self.root / "client"
        stop = directory / "stop"
        script = Path(__file__).with_name("soak_client.py")
        command = [sys.executable, str(script), *options, "--stop", str(stop)]
        client = Node("client", directory, [*command, "--certificate-lifetime-s", str(CERTIFICATE_S)])
        client.start()
        client.wait_event("gauge")
        try:
            yield client
            stop.touch()
            assert client.process is not None
            try:
                if client.process.wait(timeout=120) != 0:
                    self.faults.append(f"the client exited with {client.process.returncode}: {client.tail(5)}")
            except subprocess.TimeoutExpired:
                self.faults.append(f"the client did not end within 120 s: {client.tail(5)}")
        finally:
            client.kill()

    def _watch_over(self, client: Node, until: float) -> None:
        """Until the time is over; sooner when a process that must live has died."""
        must_live = [client, *self.cluster.coordinators, *self.stable]
        while time.monotonic() < until:
            dead = [f"{n.name} died: {n.tail(5)}" for n in must_live if not n.alive()]
            if dead:
                self.faults += dead
                return
            time.sleep(1.0)

    def _failed(self) -> set[str]:
        return {e["worker"] for c in self.cluster.coordinators for e in c.events("worker_failed")}

    def _await_failures(self, churn: Churn) -> None:
        try:
            wait_until(lambda: churn.counts.killed_ids <= self._failed(), SEEN_WITHIN_S, "worker_failed of all killed")
        except TimeoutError:
            missed = churn.counts.killed_ids - self._failed()
            self.faults.append(f"killed and never declared failed: {sorted(missed)}")

    def _lives(self, began_wall: float) -> Iterator[Life]:
        """Every run's, from the coordinators' logs, in seconds since `began_wall`."""
        marks: dict[str, dict[str, float]] = {}
        for coordinator in self.cluster.coordinators:
            for name in ("run_submitted", "run_completed", "run_deleted"):
                for entry in coordinator.events(name):
                    at = datetime.fromisoformat(entry["timestamp"]).timestamp() - began_wall
                    marks.setdefault(entry["run_id"], {})[name] = at
        for one in marks.values():
            yield Life(one["run_submitted"], one.get("run_completed", math.inf), one.get("run_deleted", math.inf))

    def _check(self, sampler: Sampler, churn: Churn, batches: Batches, client: Node) -> None:
        self.faults += churn.counts.faults + batches.faults
        self.faults += [f"client: {e}" for e in client.events("fault")]
        self.faults += [f"{name} did not live through the soak" for name in sampler.missing]
        false = self._failed() - churn.counts.killed_ids
        if false:
            lines = [e for c in self.cluster.coordinators for e in c.events("worker_failed") if e["worker"] in false]
            self.faults.append(f"declared failed, but nobody killed them: {lines}")
        for worker in self.stable:
            lives = len(list(worker.events("worker_starting")))
            if lives != 1:
                self.faults.append(f"{worker.name}, which stays, had {lives} incarnations")
        for coordinator in self.cluster.coordinators:
            for name in ("worker_quarantined", "coordinator_fenced", "lease_lost"):
                self.faults += [f"{coordinator.name}: {e}" for e in coordinator.events(name)]
        if not list(client.events("stream_done")):
            self.faults.append("the client's long run did not end")
        self.faults += [f"left behind: {one}" for one in left_behind(self.root)]

    def _counts(self, sampler: Sampler, churn: Churn, batches: Batches, client: Node) -> dict[str, int]:
        renewed = {f"certificates of {who} (distinct)": len(ends) for (who, _), ends in sampler.gauges.items()}
        return {
            "batches through `rollout infer batch`": batches.done,
            "rows of those": batches.rows,
            "runs through the client library": len(list(client.events("run_done"))),
            "rows of those, each": max((e["rows"] for e in client.events("run_done")), default=0),
            "rows of the run that stayed open": sum(e["rows"] for e in client.events("stream_done")),
            "hosts joined by token": churn.counts.joined + len(self.stable),
            "workers started": churn.counts.started + len(self.stable),
            "workers drained (SIGTERM)": churn.counts.drained,
            "workers killed (SIGKILL)": churn.counts.killed,
            "worker_failed": len(self._failed()),
            "worker_deregistered": sum(1 for c in self.cluster.coordinators for _ in c.events("worker_deregistered")),
            "host certificates renewed": sum(
                1 for n in self.cluster.nodes for _ in n.events("host_certificate_renewed")
            ),
            **renewed,
        }


def _worker_sections() -> dict[str, Any]:
    return {"worker": {"slots": 2, "drain_budget_s": 30}}


def _pid(node: Node) -> int:
    assert node.process is not None
    return node.process.pid


def soak(root: Path, seconds: float, postgres_url: str = "", seed: int = 1) -> Report:
    """Run one soak below `root`, which must be empty; the time is that of the load, start and end apart."""
    return Soak(root.resolve(), seconds, postgres_url, seed).run()


def record(report: Report, store: str) -> None:
    """Into docs/benchmarks.md: processes that lived all the time in a line each, and what else was counted."""
    memory = psutil.virtual_memory().total / (1 << 30)
    write_section(
        "soak",
        [
            f"{report.seconds:.0f} s on {store}; {os.cpu_count()} cores, {memory:.0f} GiB, {platform.system()}, "
            f"Python {platform.python_version()}; {datetime.now(UTC):%Y-%m-%d}.",
            "",
            summary(report.judged),
            "",
            f"Counted: {'; '.join(f'{name} {value:,}' for name, value in report.counts.items())}.",
            "",
            *([f"FAILED: {fault}" for fault in report.faults] or ["Every condition held."]),
        ],
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=3600.0)
    parser.add_argument("--postgres", default="", metavar="URL")
    parser.add_argument("--record", action="store_true", help="write the section of docs/benchmarks.md")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--dir", type=Path, default=None, help="keep logs here")
    args = parser.parse_args()
    root: Path = args.dir or Path(tempfile.mkdtemp(prefix="rollout-soak-"))
    report = soak(root, args.seconds, args.postgres, args.seed)
    print(report.text(), flush=True)
    if args.record:
        record(report, "PostgreSQL with a standby" if args.postgres else "SQLite")
    if report.faults:
        print(f"logs: {root}")
    elif args.dir is None:
        shutil.rmtree(root, ignore_errors=True)
    return 1 if report.faults else 0


if __name__ == "__main__":
    sys.exit(main())
