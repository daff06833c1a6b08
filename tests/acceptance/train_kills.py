"""Strikes at a training run: SIGKILL in a phase of its work that is known, not hoped for.

Whoever kills first stops the worker's processes, looks at their files for what they are at, and kills if it is what was
wanted; otherwise they go on and it looks again. So a record of strikes says what each of them hit.
"""

from __future__ import annotations

import random
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from glob import glob
from pathlib import Path

import psutil
from acceptance_cli import Cli
from cluster import Cluster, Node

STEP, SNAPSHOT, UPLOAD = "step", "snapshot", "upload"
DRAW, LEARN = "draw", "learn"
"""In the place of `STEP`, of reinforcement learning: samples are drawn; they are trained on."""
RANK, WORKER, COORDINATOR, COMMAND, ENGINE = "rank", "worker", "coordinator", "command", "engine"
PHASES, VICTIMS = (STEP, SNAPSHOT, UPLOAD), (RANK, WORKER, COORDINATOR, COMMAND)
PATIENCE_S = 120.0
QUICK = {
    "heartbeat_interval_ms": 250,
    "worker_self_fence_timeout_ms": 2000,
    "coordinator_failure_timeout_ms": 2500,
}
"""Of `[transport]`: a dead worker is noticed sooner than by default."""


@dataclass(frozen=True)
class Strike:
    victim: str
    phase: str


@dataclass
class Disturbed:
    """A run on a cluster of two workers, one of which trains; `record` has a line for each strike."""

    cluster: Cluster
    cli: Cli
    command: Sequence[str]
    luck: random.Random
    record: list[str] = field(default_factory=list[str])
    phases: list[set[str]] = field(default_factory=list[set[str]])
    process: subprocess.Popen[str] | None = None
    patience_s: float = PATIENCE_S
    segment: tuple[int, int] = (0, 0)
    """Of this cluster's runs and the run's segments, the last one that was seen."""
    began: float = field(default_factory=time.monotonic)

    def run(self, strikes: Sequence[Strike]) -> None:
        """To its end."""
        self.process = self.cli.start(*self.command)
        for strike in strikes:
            self._strike(strike)
        out, err = self.process.communicate(timeout=self.patience_s)
        assert self.process.returncode == 0, (out, err)

    def _strike(self, strike: Strike) -> None:
        """One or two segments later: whatever was struck before is at work again."""
        for _ in range(self.luck.randint(1, 2)):
            self._another_segment()
        with self._caught(strike.phase) as (worker, found):
            at = " and ".join(sorted(found))
            self.record.append(
                f"{time.monotonic() - self.began:.1f} s, segment {self.segment[1]}: {strike.victim} at {at}"
            )
            self.phases.append(found)
            self._kill(strike.victim, worker)
        if strike.victim == WORKER:
            self._another_segment()  # at the other one: this one is gone
            worker.start()
        elif strike.victim == COORDINATOR:
            self.cluster.coordinators[0].start()
        elif strike.victim == COMMAND:
            self.process = self.cli.start(*self.command)

    def _kill(self, victim: str, worker: Node) -> None:
        if victim == WORKER:
            worker.kill()
        elif victim == COORDINATOR:
            self.cluster.coordinators[0].kill()
        elif victim == RANK:
            self.luck.choice(ranks(worker)).kill()
        elif victim == ENGINE:
            engines = [process for node in self.cluster.workers for process in tree(node) if draws(process)]
            assert engines, "nobody draws samples"
            for process in engines:
                process.kill()
        elif self.process is not None:
            self.process.kill()
            self.process.communicate()

    def _another_segment(self) -> None:
        """Until one begins that is further than any before: its predecessor's steps are done."""
        deadline = time.monotonic() + self.patience_s
        while (found := max(map(furthest, self.cluster.workers))) <= self.segment:
            self._alive("another segment")
            assert time.monotonic() < deadline, f"no segment is begun any more: {self.record}"
            time.sleep(0.005)
        self.segment = found

    @contextmanager
    def _caught(self, phase: str) -> Iterator[tuple[Node, set[str]]]:
        """A worker that is in this phase, and all phases that it is in; its processes stand still meanwhile."""
        deadline = time.monotonic() + self.patience_s
        while time.monotonic() < deadline:
            self._alive(phase)
            for worker in self.cluster.workers:
                if phase in phases(worker):
                    time.sleep(self.luck.uniform(0, 0.01))
                    with stopped(worker):
                        found = phases(worker)
                        if phase in found and ranks(worker):
                            yield worker, found
                            return
            time.sleep(0.001)
        raise TimeoutError(f"no worker was seen at {phase}: {self.record}")

    def _alive(self, what: str) -> None:
        assert self.process is not None
        if self.process.poll() is not None:
            raise AssertionError(f"it ended before {what}: {self.record}, {self.process.communicate()}")


def attempts(worker: Node) -> Iterator[tuple[tuple[int, int], Path]]:
    """((run, segment), directory) of those that train; the first item of a run does not."""
    for name in glob("data/scratch/*/child-*/*-*-*", root_dir=worker.directory):  # noqa: PTH207 - some go while it looks
        path = worker.directory / name
        run, segment, _ = map(int, path.name.split("-"))
        if segment:
            yield (run, segment), path


def furthest(worker: Node) -> tuple[int, int]:
    """(run, segment) of the last attempt that has a directory here."""
    return max((place for place, _ in attempts(worker)), default=(0, 0))


def phases(worker: Node) -> set[str]:
    """What a worker's segments are at: two of them overlap. Its scratch directories tell."""
    found: set[str] = set()
    for _, attempt in attempts(worker):
        try:
            names = {path.name for path in attempt.iterdir()}
        except OSError:  # it ends
            continue
        if "state.tar" in names:  # there when it is whole
            found.add(UPLOAD)
        elif "state" in names:
            found.add(SNAPSHOT)
        elif "rollouts" in names:
            drawn, learnt = (_written(attempt / "rollouts" / name) for name in ("rollouts.json", "samples.jsonl"))
            found.add(LEARN if drawn > learnt else DRAW)
        elif not names:
            found.add(STEP)
    return found


def _written(path: Path) -> int:
    """When, in ns; 0: it is not there."""
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return 0


def draws(process: psutil.Process) -> bool:
    """Whether it is a child of a worker's daemon that holds an engine."""
    with suppress(psutil.Error, OSError):
        runner = "rollout_worker.processes.runner" in process.cmdline()
        return runner and "libtorch" in Path(f"/proc/{process.pid}/maps").read_text()
    return False


def tree(worker: Node) -> list[psutil.Process]:
    """The daemon and all below it."""
    if worker.process is None or worker.process.poll() is not None:
        return []
    try:
        daemon = psutil.Process(worker.process.pid)
        return [daemon, *daemon.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def ranks(worker: Node) -> list[psutil.Process]:
    return [process for process in tree(worker) if "rollout_worker.backends.training.rank" in _command(process)]


def _command(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:  # it is gone, or about to be
        return []


@contextmanager
def stopped(worker: Node) -> Iterator[None]:
    """All of its processes; those that are killed meanwhile stay so."""
    processes = tree(worker)
    with ExitStack() as stack:
        for process in processes:
            with suppress(psutil.NoSuchProcess):
                process.suspend()
                stack.callback(_resume, process)
        yield


def _resume(process: psutil.Process) -> None:
    with suppress(psutil.NoSuchProcess):
        process.resume()
