"""What the soak measures: every long-lived process every few seconds, the coordinator's own gauges, the database."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import asyncpg
import psutil

MIB = 1 << 20


@dataclass(eq=False)
class Series:
    """One quantity of one process (or of the database) over time."""

    who: str
    what: str
    unit: str
    points: list[tuple[float, float]] = field(default_factory=list[tuple[float, float]])  # (seconds, value)


@dataclass
class Watched:
    """A process that lives as long as the soak. `http` is its metrics address, or empty."""

    name: str
    pid: int
    http: str = ""


Database = Callable[[], dict[str, float]]


def scrape(address: str) -> dict[str, float]:
    """Every sample of a metrics page by its name with labels; empty if nobody answers."""
    try:
        with urllib.request.urlopen(f"http://{address}/metrics", timeout=5) as page:
            text = page.read().decode()
    except OSError:
        return {}
    found: dict[str, float] = {}
    for line in text.splitlines():
        if line and not line.startswith("#"):
            name, _, value = line.rpartition(" ")
            found[name] = float(value)
    return found


def sqlite_sizes(path: Path) -> Database:
    def sizes() -> dict[str, float]:
        found = {"database": path, "wal": path.with_name(path.name + "-wal")}
        return {name: file.stat().st_size / MIB for name, file in found.items() if file.exists()}

    return sizes


def postgres_sizes(url: str) -> Database:
    async def ask() -> dict[str, float]:
        connection = await asyncpg.connect(url, timeout=5)
        try:
            size = await connection.fetchval("SELECT pg_database_size(current_database())")
        finally:
            await connection.close()
        return {"database": size / MIB}

    return lambda: asyncio.run(ask())


class Sampler:
    """A thread that samples until `stop`. A process that is missing is noted in `missing`: that is a finding."""

    def __init__(self, watched: list[Watched], database: Database, every_s: float) -> None:
        self.watched = watched
        self.series: dict[tuple[str, str], Series] = {}
        self.gauges: dict[tuple[str, str], list[float]] = {}  # every value a gauge had, e.g. a certificate's end
        self.missing: list[str] = []
        self._database = database
        self._every_s = every_s
        self._began = time.monotonic()
        self.began_wall = time.time()
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="sampler", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stopped.set()
        self._thread.join(timeout=30)

    def _run(self) -> None:
        while not self._stopped.wait(self._every_s):
            at = time.monotonic() - self._began
            for one in self.watched:
                self._process(at, one)
                if one.http:
                    self._metrics(at, one)
            with contextlib.suppress(OSError, asyncpg.PostgresError):
                for name, size in self._database().items():
                    self._note(at, "ledger", name, "MiB", size)

    def _note(self, at: float, who: str, what: str, unit: str, value: float) -> None:
        self.series.setdefault((who, what), Series(who, what, unit)).points.append((at, value))

    def _process(self, at: float, one: Watched) -> None:
        try:
            process = psutil.Process(one.pid)
            if process.status() == psutil.STATUS_ZOMBIE:
                raise psutil.NoSuchProcess(one.pid)
            self._numbers(at, one.name, process)
            children = process.children(recursive=True)
        except psutil.NoSuchProcess:
            if one.name not in self.missing:
                self.missing.append(one.name)
            return
        rss = 0.0
        for child in children:
            with contextlib.suppress(psutil.NoSuchProcess):
                rss += child.memory_info().rss
                # Children of a worker may come and go; each that lives long is a series of its own.
                self._numbers(at, f"{one.name} child {child.pid}", child)
        self._note(at, one.name, "children", "", len(children))
        self._note(at, one.name, "children rss", "MiB", rss / MIB)

    def _numbers(self, at: float, name: str, process: psutil.Process) -> None:
        with process.oneshot():
            self._note(at, name, "rss", "MiB", process.memory_info().rss / MIB)
            self._note(at, name, "descriptors", "", process.num_fds())
            self._note(at, name, "threads", "", process.num_threads())

    def _metrics(self, at: float, one: Watched) -> None:
        page = scrape(one.http)
        for name in ("rollout_asyncio_tasks", "rollout_worker_asyncio_tasks"):
            if name in page:
                self._note(at, one.name, "tasks", "", page[name])
        for name in ("rollout_certificate_not_after_seconds", "rollout_worker_certificate_not_after_seconds"):
            if name in page:
                values = self.gauges.setdefault((one.name, "certificate"), [])
                if not values or values[-1] != page[name]:
                    values.append(page[name])
        held = {"runs": 0.0, "workers": 0.0}
        for name, value in page.items():
            if name == 'rollout_core{name="runs"}':
                held["runs"] = value
            elif name.startswith('rollout_core{name="workers_'):
                held["workers"] += value
        if page.get("rollout_leader") == 1:
            for name, value in held.items():
                self._note(at, one.name, f"{name} in memory", "", value)
            for name in ("logs", "accepted_ranges"):
                value = page.get(f'rollout_core{{name="{name}"}}')
                if value is not None:
                    self._note(at, one.name, f"{name} in memory", "", value)
