"""A thousand workers on one coordinator, each beating every 500 ms over its own mTLS connection."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

from cluster import Cluster
from measure import Row, cpu_s, directory, rss_mib

PROCESSES = 4


class Load:
    """A process of beat_load.py or fleet_load.py."""

    def __init__(self, script: str, *arguments: object) -> None:
        command = [sys.executable, str(Path(__file__).with_name(script)), *map(str, arguments)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def answer(self) -> dict[str, float]:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith('{"'):
                found: dict[str, float] = json.loads(line)
                if "event" not in found:
                    return found
        raise RuntimeError(f"a load process ended with {self._process.wait()}")

    def ask(self) -> dict[str, float]:
        assert self._process.stdin is not None
        self._process.stdin.write("?\n")
        self._process.stdin.flush()
        return self.answer()

    def close(self) -> None:
        self._process.kill()
        self._process.wait()


def rows(quick: bool) -> list[Row]:
    count, seconds = (400, 8.0) if quick else (1000, 30.0)
    loads: list[Load] = []
    with directory() as root, Cluster(root) as cluster:
        node = cluster.add_coordinator()
        node.wait_event("coordinator_ready")
        assert node.process is not None
        pid = node.process.pid
        # Its own authority's directory: certificates without a thousand calls.
        to = (cluster.addresses[0], node.directory / "data/tls", count // PROCESSES)
        loads += [Load("beat_load.py", *to) for _ in range(PROCESSES)]
        try:
            for load in loads:
                load.answer()
            time.sleep(3.0)
            before = [load.ask() for load in loads]
            cpu, began = cpu_s(pid), time.monotonic()
            time.sleep(seconds)
            after = [load.ask() for load in loads]
            wall = time.monotonic() - began
            cpu = cpu_s(pid) - cpu
            failed = sum(1 for _ in node.events("worker_failed"))
            registered = sum(1 for _ in node.events("worker_registered"))
            memory = rss_mib(pid)
        finally:
            for load in loads:
                load.close()
    beats = sum(a["beats"] - b["beats"] for a, b in zip(after, before, strict=True))
    acks = sum(a["acks"] - b["acks"] for a, b in zip(after, before, strict=True))
    lost = int(sum(a["lost"] for a in after))
    late = max(a["late_s"] for a in after)
    share = cpu / wall
    asked = 2 * count * wall
    return [
        Row(
            f"{count:,} workers, beats each 500 ms, {wall:.0f} s",
            f"{failed} failed, {lost} streams lost, {registered:,} registered; {share:.2f} cores, "
            f"{cpu / beats * 1e6:.0f} µs a beat; {beats / asked * 100:.0f} % of {asked / wall:,.0f} beats/s sent, "
            f"{acks / count / wall:.2f} acknowledgements/s each, latest {late * 1000:.0f} ms late; {memory:.0f} MiB",
            "no false failure, ≤0.5 core" if count == 1000 else "",
            (failed == 0 and lost == 0 and share <= 0.5 and beats >= 0.95 * asked) if count == 1000 else None,
            {"cores": share, "false_failures": failed, "us_per_beat": cpu / beats * 1e6},
        )
    ]
