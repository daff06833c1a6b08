"""SIGKILL in a phase of a trial that is known, not hoped for: each phase waits at a gate of this host.

A trial touches `/gate/PHASE.reached` and goes on once `/gate/PHASE.go` is there; `/gate` is a directory of this host,
mounted into its sandbox. Who kills sees which worker the trial is at by the ancestors of its processes.
"""

from __future__ import annotations

import contextlib
import json
import re
import time
from dataclasses import dataclass, field
from pathlib import Path

import psutil
from acceptance_cli import Cli, until
from cluster import Cluster, Node
from job_rig import SCRIPT, SMALL, counts, outcomes, sandbox_processes, write_job, write_task
from rollout_worker.sandboxes import cgroups

SETUP, INSTALL, EXECUTE, VERIFY, TEARDOWN = PHASES = ("setup", "install", "execute", "verify", "teardown")
CHILD, WORKER, COORDINATOR = VICTIMS = ("child", "worker", "coordinator")
FAILURE_S = 2.5
QUICK = {
    "heartbeat_interval_ms": 250,
    "worker_self_fence_timeout_ms": 2000,
    "coordinator_failure_timeout_ms": int(FAILURE_S * 1000),
}
"""Of `[transport]`: a dead worker is noticed sooner than by default."""
REAPED_S = FAILURE_S + 10

GATE = 'touch "/gate/{phase}.reached"; while [ ! -e "/gate/{phase}.go" ]; do sleep 0.02; done; true'
ATTEMPTS = 3


@dataclass
class Scene:
    """A cluster of two workers, and jobs that are struck, one after another."""

    cluster: Cluster
    cli: Cli
    number: int = 0
    record: list[str] = field(default_factory=list[str])

    def strike(self, victim: str, phase: str, provider: str, delay_s: float = 0.0) -> None:
        """A job whose first trials are struck in `phase`: all of it must be as if nothing had happened."""
        self.number += 1
        name = f"job-{self.number}"
        gate = self.cli.directory / f"gate-{self.number}"
        gate.mkdir()
        job = self._job(name, gate, provider)
        process = self.cli.start("job", "run", job, *self.cluster.operator())
        waits_at = VERIFY if phase == TEARDOWN else phase
        self._open(gate, PHASES[: PHASES.index(waits_at)])
        until(lambda: (gate / f"{waits_at}.reached").exists() or process.poll() is not None, f"{waits_at} of {name}")
        assert process.poll() is None, process.communicate()
        struck = self._struck(victim)
        before = Left.of(self, struck.worker)
        if phase == TEARDOWN:
            self._open(gate, PHASES)
            time.sleep(delay_s)  # verification ends, artifacts are collected, the sandbox is removed
        struck.kill()
        killed = time.monotonic()
        self._open(gate, PHASES)
        if victim == WORKER:
            before.wait_for_nothing(killed + REAPED_S)
        if victim != CHILD:
            struck.node.start()
        out, err = process.communicate(timeout=90)
        self.record.append(f"{victim} at {phase}, {provider}: {time.monotonic() - killed:.1f} s to the end")
        assert process.returncode == 0, (victim, phase, out, err)
        before.wait_for_nothing(max(killed + REAPED_S, time.monotonic()))
        self._counted_once(name)

    def _job(self, name: str, gate: Path, provider: str) -> str:
        health = GATE.format(phase=SETUP).replace('"', "'")
        check = f'[environment.healthcheck]\ncommand = "{health}"\ntimeout_sec = 60\n'
        write_task(
            self.cli.directory / name / "task",
            GATE.format(phase=EXECUTE),
            f"{GATE.format(phase=VERIFY)}; echo 0.75 > /logs/verifier/reward.txt",
            SMALL + check,
        )
        return write_job(
            self.cli,
            f"{name}.yaml",
            name=name,
            agents=[SCRIPT | {"install": GATE.format(phase=INSTALL)}],
            n_attempts=ATTEMPTS,
            n_concurrent_trials=2,
            environment={"type": provider, "mounts": [{"type": "bind", "source": str(gate), "target": "/gate"}]},
            datasets=[{"path": name}],
            retry={"max_attempts": 3, "initial_delay_ms": 100},
        )

    @staticmethod
    def _open(gate: Path, phases: tuple[str, ...]) -> None:
        for phase in phases:
            (gate / f"{phase}.go").touch()

    def _struck(self, victim: str) -> Struck:
        """The worker whose trial waits at the gate, or the coordinator."""
        nodes = {node.process.pid: node for node in self.cluster.workers if node.process is not None}
        for pid in sandbox_processes(self.cli):
            with contextlib.suppress(psutil.NoSuchProcess):
                chain = psutil.Process(pid).parents()
                at = next((n for n, process in enumerate(chain) if process.pid in nodes), None)
                if at is not None and at > 0:
                    worker = nodes[chain[at].pid]
                    if victim == COORDINATOR:
                        return Struck(worker, self.cluster.coordinators[0], None)
                    return Struck(worker, worker, chain[at - 1] if victim == CHILD else None)
        raise AssertionError("no trial is at any worker")

    def _counted_once(self, name: str) -> None:
        directory = self.cli.directory / "jobs" / name
        trials = [f"{name}/task/script/{n}" for n in range(1, ATTEMPTS + 1)]
        assert outcomes(directory) == dict.fromkeys(trials, (0.75, None))
        assert counts(directory) == {"total": ATTEMPTS, "completed": ATTEMPTS, "failed": 0, "skipped": 0}
        run = (directory / "run-id").read_text().strip()
        shown = self.cli.run("run", "show", run, "--json", *self.cluster.operator())
        assert shown.code == 0, shown
        states = json.loads(shown.out)
        assert {state: states[state] for state in ("submitted", "done", "failed", "skipped")} == {
            "submitted": ATTEMPTS,
            "done": ATTEMPTS,
            "failed": 0,
            "skipped": 0,
        }


@dataclass
class Struck:
    """`worker`: that of the trial. `node`: who is killed, unless it is the `child` of it that runs trials."""

    worker: Node
    node: Node
    child: psutil.Process | None

    def kill(self) -> None:
        if self.child is not None:
            self.child.kill()
        else:
            self.node.kill()


@dataclass
class Left:
    """Sandboxes of a worker, and all that there is of them on this host."""

    names: set[str]
    state: Path

    @classmethod
    def of(cls, scene: Scene, worker: Node) -> Left:
        states = {path.parent for path in worker.directory.rglob("claims") if path.is_dir()}
        (state,) = states
        names = {path.name for path in (state / "claims").iterdir() if not path.name.startswith(".")}
        assert names, "no sandbox is claimed, although a trial runs"
        return cls(names, state)

    def there(self) -> dict[str, list[str]]:
        marks = {f"ROLLOUT_SANDBOX={name}".encode() for name in self.names}
        processes: list[str] = []
        mounts: set[str] = set()
        shown = re.compile("|".join(map(re.escape, sorted(self.names))))
        for path in Path("/proc").iterdir():
            if not path.name.isdigit():
                continue
            with contextlib.suppress(OSError):
                if marks & set((path / "environ").read_bytes().split(b"\0")):
                    processes.append(path.name)
                mounts |= {line for line in (path / "mountinfo").read_text().splitlines() if shown.search(line)}
        groups = [d / f"rollout-{n}" for d in cgroups.find().directories.values() for n in self.names]
        found = {
            "processes": processes,
            "mounts": sorted(mounts),
            "claims": [n for n in sorted(self.names) if (self.state / "claims" / n).exists()],
            "boxes": [n for n in sorted(self.names) if (self.state / "boxes" / n).exists()],
            "groups": [str(group) for group in groups if group.exists()],
        }
        return {what: there for what, there in found.items() if there}

    def wait_for_nothing(self, deadline: float) -> None:
        """Nothing of these sandboxes is left by `deadline`, of time.monotonic(); one that is past: now."""
        while left := self.there():
            assert time.monotonic() < deadline, left
            time.sleep(0.05)
