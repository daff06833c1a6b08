"""What the benchmarks share: a row of the table, the machine, processor time and memory of processes, clusters."""

from __future__ import annotations

import asyncio
import os
import platform
import signal
import sqlite3
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import psutil

TESTS = Path(__file__).resolve().parents[1]
for _ in (TESTS, TESTS.parent / "smoke", TESTS / "bench"):
    if str(_) not in sys.path:
        sys.path.insert(0, str(_))


@dataclass
class Row:
    """One line of the report. `values` are the numbers behind `figure`; `reached` is None where there is no target."""

    what: str
    figure: str
    target: str = ""
    reached: bool | None = None
    values: dict[str, float] = field(default_factory=dict[str, float])

    @property
    def verdict(self) -> str:
        return {None: "", True: "reached", False: "missed"}[self.reached]


def spread(values: Sequence[float], digits: int = 2) -> str:
    """Median (min..max)."""
    if len(values) == 1:
        return f"{values[0]:,.{digits}f}"
    return f"{statistics.median(values):,.{digits}f} ({min(values):,.{digits}f}..{max(values):,.{digits}f})"


def percentile(values: Sequence[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


# ---- the machine


def reference_loop() -> float:
    """Seconds of processor time of a fixed piece of Python: what this machine gives at present."""
    best = float("inf")
    for _ in range(3):
        began = time.process_time()
        x = 0
        for i in range(2_000_000):
            x += i * i % 7
        best = min(best, time.process_time() - began)
    return best


def machine() -> dict[str, str]:
    import grpc
    from postgres import find_binary

    found: dict[str, str] = {
        "cores": str(os.cpu_count()),
        "processor": _processor(),
        "memory": f"{psutil.virtual_memory().total / 2**30:.0f} GiB",
        "system": f"{platform.system()} {platform.release().split('-')[0]}",
        "Python": platform.python_version(),
        "SQLite": sqlite3.sqlite_version,
        "grpcio": grpc.__version__,
    }
    binary = find_binary("postgres")
    if binary:
        said = subprocess.run([binary, "--version"], capture_output=True, text=True, check=False).stdout.split()
        found["PostgreSQL"] = said[2] if len(said) > 2 else "unknown"
    found["reference loop"] = f"{reference_loop() * 1000:.0f} ms"
    found["load before"] = f"{os.getloadavg()[0]:.1f}"
    return found


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


# ---- processes


def cpu_s(pid: int, *, children: bool = False) -> float:
    """Processor seconds of a process so far; with those of its living descendants on request."""
    process = psutil.Process(pid)
    total = sum(process.cpu_times()[:2])
    for child in process.children(recursive=True) if children else ():
        try:
            total += sum(child.cpu_times()[:2])
        except psutil.NoSuchProcess:
            continue
    return total


def peak_mib(pid: int) -> float:
    """The largest resident size a process has had (Linux: VmHWM; elsewhere what it has now)."""
    try:
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("VmHWM"):
                return int(line.split()[1]) / 1024
    except OSError:
        pass
    return rss_mib(pid)


def rss_mib(pid: int) -> float:
    try:
        return psutil.Process(pid).memory_info().rss / 2**20
    except psutil.NoSuchProcess:
        return 0.0


# ---- places


@contextmanager
def directory() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="rollout-bench-", ignore_cleanup_errors=True) as path:
        yield Path(path)


class NoPostgresError(RuntimeError):
    """There is no PostgreSQL here: its rows are left out, and said to be."""


@contextmanager
def postgres() -> Iterator[str]:
    """The URL of a durable server of our own (fsync and synchronous_commit on), or of the one that was given."""
    from postgres import GIVEN_URL, PostgresServer, find_binary

    if os.environ.get(GIVEN_URL):
        yield os.environ[GIVEN_URL]
        return
    if not (find_binary("initdb") and find_binary("postgres")):
        raise NoPostgresError(f"no PostgreSQL: set {GIVEN_URL} or install PostgreSQL 15+")
    # Not in a directory that only root may enter: the server runs as another user.
    with tempfile.TemporaryDirectory(prefix="rollout-pg-", ignore_cleanup_errors=True) as path:
        server = PostgresServer(Path(path))
        server.settings = {"fsync": "on", "synchronous_commit": "on", "shared_buffers": "128MB"}
        server.init()
        server.start()
        try:
            yield server.url
        finally:
            server.stop(signal.SIGINT)


def wait_for(condition: Callable[[], bool], timeout: float, what: str, poll_s: float = 0.005) -> float:
    """Until `condition` holds; the monotonic time at which it was seen to. TimeoutError otherwise."""
    deadline = time.monotonic() + timeout
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"waited {timeout:.0f} s for {what}")
        time.sleep(poll_s)
    return time.monotonic()


async def reached(condition: Callable[[], bool], timeout: float, what: str, poll_s: float = 0.005) -> float:
    """As `wait_for`, on a loop."""
    deadline = time.monotonic() + timeout
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"waited {timeout:.0f} s for {what}")
        await asyncio.sleep(poll_s)
    return time.monotonic()
