"""Workers that come and go all the time: join by token, work, are drained (SIGTERM) or killed (SIGKILL)."""

from __future__ import annotations

import random
import signal
import subprocess
import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
from cluster import Cluster, Node, wait_until

READY_S = 120.0  # the machine may be busy with other things
DRAIN_S = 90.0


@dataclass
class Counts:
    """What was done to whom; shared by the threads, written under `lock`."""

    joined: int = 0
    started: int = 0
    drained: int = 0
    killed: int = 0
    killed_ids: set[str] = field(default_factory=set[str])
    faults: list[str] = field(default_factory=list[str])
    lock: threading.Lock = field(default_factory=threading.Lock)


class Churn:
    """`places` workers at a time, each living `up_s` and then gone for `down_s` seconds (ranges), until `stop`."""

    def __init__(
        self,
        cluster: Cluster,
        places: int,
        up_s: tuple[float, float],
        down_s: tuple[float, float],
        seed: int,
        sections: dict[str, Any],
    ) -> None:
        self.counts = Counts()
        self._cluster = cluster
        self._up_s = up_s
        self._down_s = down_s
        self._sections = sections
        self._stopped = threading.Event()
        self._adding = threading.Lock()  # Cluster.add_worker numbers its directories
        self._threads = [
            threading.Thread(target=self._place, args=(random.Random(seed * 1000 + n),), name=f"place-{n}", daemon=True)
            for n in range(places)
        ]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """Returns when nobody is being started or stopped any more; who is up stays up."""
        self._stopped.set()
        for thread in self._threads:
            thread.join(timeout=READY_S + DRAIN_S)

    def _place(self, dice: random.Random) -> None:
        node: Node | None = None
        try:
            while not self._stopped.is_set():
                if node is None or dice.random() < 0.25:
                    node = self._join()
                self._live(node, dice)
                self._stopped.wait(dice.uniform(*self._down_s))
        except (TimeoutError, RuntimeError, subprocess.SubprocessError) as error:
            self._fault(f"{threading.current_thread().name}: {type(error).__name__}: {error}")

    def _join(self) -> Node:
        """A host nobody has seen before."""
        with self._adding:
            node = self._cluster.add_worker(start=False, **self._sections)
        with self.counts.lock:
            self.counts.joined += 1
        return node

    def _live(self, node: Node, dice: random.Random) -> None:
        before = sum(1 for _ in node.events("worker_ready"))
        node.start()
        with self.counts.lock:
            self.counts.started += 1
        node.wait_event("worker_ready", READY_S, before + 1)
        if self._stopped.wait(dice.uniform(*self._up_s)):
            return
        incarnation = [e["worker"] for e in node.events("worker_starting")][-1]
        if dice.random() < 0.5:
            with self.counts.lock:
                self.counts.killed += 1
                self.counts.killed_ids.add(incarnation)
            node.kill(signal.SIGKILL)
            return
        assert node.process is not None
        node.process.send_signal(signal.SIGTERM)
        code = node.process.wait(timeout=DRAIN_S)
        with self.counts.lock:
            self.counts.drained += 1
        if code != 0:
            self._fault(f"{node.name} ({incarnation}) was drained and exited with {code}: {node.tail(3)}")

    def _fault(self, text: str) -> None:
        with self.counts.lock:
            self.counts.faults.append(text)


def left_behind(root: Path) -> list[str]:
    """Processes that still run below `root`, after half a minute's patience."""

    def running() -> list[str]:
        found = [p.info for p in psutil.process_iter(["pid", "cwd", "cmdline"])]
        return [f"{p['pid']}: {p['cmdline']}" for p in found if p["cwd"] and Path(p["cwd"]).is_relative_to(root)]

    try:
        wait_until(lambda: not running(), 30, "every process to end")
    except TimeoutError:
        return running()
    return []
