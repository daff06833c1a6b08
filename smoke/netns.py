"""Separate hosts: see netns.sh. Every node has a network namespace and an address of its own; links are cut and healed.

A PostgreSQL server, two coordinators, three workers that join by token over the net, and a client that keeps a run
busy. Cut in turn: one worker alone; two workers in one direction each; the leader alone; the leader from the database.
After each, what must happen is checked; at the end every row must be there once and in order. Exits 1 with what was
missing, 0 with SKIPPED where namespaces are not allowed.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

from cluster import Node, binary, wait_until, write_toml
from netns_client import read_effects
from netns_world import Net, NotAllowedError, Postgres, check_allowed

TTL_S = 5.0  # coordinator_failure_timeout, as are all timeouts here: the defaults
SEEN_WITHIN_S = 8.0  # from the cut to worker_failed: 1.0 + 5.0 + 0.25, and what a busy machine takes
TAKEOVER_S = TTL_S + 2.0  # from the end of the old leader's trust, which is at most TTL after the cut
BACK_WITHIN_S = 20.0  # from healing to a worker that is ready again
START_S = 120.0  # a process, however busy the machine
LISTEN, JOIN, OBJECTS = 7001, 7002, 7003
WORKERS = ("worker-1", "worker-2", "worker-3")
COORDINATORS = ("coordinator-1", "coordinator-2")


class World:
    """All nodes and what is known of them."""

    def __init__(self, net: Net, root: Path) -> None:
        self.net, self.root = net, root
        self.began = time.monotonic()
        self.faults: list[str] = []
        self.nodes: dict[str, Node] = {}
        self.postgres = Postgres(net, "database", root / "pg")
        self.stop_file = root / "client" / "stop"

    def say(self, text: str) -> None:
        print(f"{time.monotonic() - self.began:5.1f}s  {text}", flush=True)

    def check(self, good: bool, text: str) -> None:
        self.say(f"{'ok  ' if good else 'FAIL'} {text}")
        if not good:
            self.faults.append(text)

    def until(self, condition: Callable[[], bool], seconds: float, text: str) -> float:
        """Seconds it took; a fault when it did not happen in time."""
        since = time.monotonic()
        try:
            wait_until(condition, seconds, text)
        except TimeoutError:
            self.check(False, f"{text}: not within {seconds:.0f} s")
            return seconds
        took = time.monotonic() - since
        self.check(True, f"{text}: {took:.1f} s")
        return took

    # ---- nodes

    @property
    def dial(self) -> list[str]:
        return [f"{self.net.addresses[name]}:{LISTEN}" for name in COORDINATORS]

    def run(self, host: str, *command: str) -> str:
        # An operator's `join` makes a context: not one of whoever runs this.
        env = os.environ | {"XDG_CONFIG_HOME": str(self.root / "config")}
        done = subprocess.run(
            self.net.enter(host, *command), capture_output=True, text=True, check=False, cwd=self.root, env=env
        )
        if done.returncode != 0:
            raise RuntimeError(f"{' '.join(command[:3])} on {host} failed:\n{done.stdout}{done.stderr}")
        return done.stdout.strip()

    def join(self, host: str, program: str, token: str) -> Path:
        tls_dir = self.root / host / "tls"
        tls_dir.parent.mkdir(parents=True, exist_ok=True)
        address = f"{self.net.addresses[COORDINATORS[0]]}:{JOIN}"
        self.run(host, binary(program), "join", "--coordinator", address, "--token", token, "--tls-dir", str(tls_dir))
        return tls_dir

    def token(self, role: str, uses: int = 1) -> str:
        config = str(self.root / COORDINATORS[0] / "coordinator.toml")
        command = [binary("rollout-coordinator"), "token", "create", "--config", config, "--role", role]
        return self.run(COORDINATORS[0], *command, "--uses", str(uses))

    def coordinator(self, name: str) -> Node:
        here, directory = self.net.addresses[name], self.root / name
        config = write_toml(
            directory / "coordinator.toml",
            {
                "storage": {"backend": "postgres"},
                "storage.postgres": {"url": self.postgres.url},
                "transport": {
                    "listen_addr": f"{here}:{LISTEN}",
                    "join_addr": f"{here}:{JOIN}",
                    "coordinator_addrs": self.dial,
                    "tls_dir": str(directory / "tls"),
                },
                "objects": {"backend": "postgres", "listen_addr": f"{here}:{OBJECTS}"},
            },
        )
        return self._node(name, binary("rollout-coordinator"), "run", "--config", str(config))

    def worker(self, name: str, token: str) -> Node:
        tls_dir = self.join(name, "rollout-worker", token)
        config = write_toml(
            self.root / name / "worker.toml",
            {
                "transport": {"coordinator_addrs": self.dial, "tls_dir": str(tls_dir)},
                "worker": {"slots": 4, "scratch_dir": "scratch"},
                "objects": {"cache_dir": "cache"},
            },
        )
        return self._node(name, binary("rollout-worker"), "run", "--config", str(config))

    def client(self) -> Node:
        tls_dir = self.join("client", "rollout", self.token("operator"))
        (self.root / "client" / "effects").mkdir(parents=True)
        words = [w for address in self.dial for w in ("--coordinator", address)]
        words += ["--tls-dir", str(tls_dir), "--stop", str(self.stop_file), "--rows", str(self.rows_file)]
        script = str(Path(__file__).with_name("netns_client.py"))
        return self._node("client", sys.executable, script, *words, "--effects", str(self.root / "client" / "effects"))

    def _node(self, name: str, *command: str) -> Node:
        node = self.nodes[name] = Node(name, self.root / name, self.net.enter(name, *command))
        return node.start()

    def start(self) -> None:
        for host in ("database", *COORDINATORS, *WORKERS, "client"):
            self.net.add(host)
        self.postgres.start()
        self.coordinator(COORDINATORS[0]).wait_event("coordinator_ready", START_S)
        self.say("a coordinator leads; the others join by token over the net")
        workers_token = self.token("worker", uses=len(WORKERS))
        with ThreadPoolExecutor() as pool:
            joining = [pool.submit(self.worker, name, workers_token) for name in WORKERS]
            self.join(COORDINATORS[1], "rollout-coordinator", self.token("coordinator"))
            self.coordinator(COORDINATORS[1]).wait_event("coordinator_standby", START_S)
            for one in joining:
                one.result()
        self.client()
        for name in WORKERS:
            self.nodes[name].wait_event("worker_ready", START_S)
        wait_until(lambda: len(self.rows()) > 100, START_S, "100 rows")
        self.say("three workers are busy")

    def close(self) -> None:
        for node in self.nodes.values():
            node.kill()
        self.postgres.stop()

    # ---- what happened

    @property
    def rows_file(self) -> Path:
        return self.root / "client" / "rows.jsonl"

    def rows(self) -> list[dict[str, Any]]:
        if not self.rows_file.exists():
            return []
        return [json.loads(line) for line in self.rows_file.read_text().split("\n")[:-1]]  # whole lines only

    def leader(self) -> str:
        """Who took the lease last."""
        taken = {n: max((e["epoch"] for e in self.nodes[n].events("lease_acquired")), default=-1) for n in COORDINATORS}
        return max(COORDINATORS, key=lambda name: taken[name])

    def stands_by(self, name: str) -> bool:
        """What it said last of its part."""
        parts = ("coordinator_standby", "lease_acquired", "lease_lost", "coordinator_fenced")
        said = [e["event"] for e in self.nodes[name].events() if e["event"] in parts]
        return self.nodes[name].alive() and said[-1:] == ["coordinator_standby"]

    def told(self, name: str, event: str, **fields: object) -> int:
        """How often a node logged that event with these fields."""
        return sum(all(e.get(k) == v for k, v in fields.items()) for e in self.nodes[name].events(event))

    def incarnation(self, worker: str) -> str:
        return [e["worker"] for e in self.nodes[worker].events("worker_starting")][-1]

    def committed_by(self, incarnation: str) -> int:
        return sum(row["worker"] == incarnation for row in self.rows())

    def moves_on(self, seconds: float, text: str) -> None:
        """More than a few rows are committed from now on."""
        before = len(self.rows())
        self.until(lambda: len(self.rows()) > before + 50, seconds, text)


def workers_back(world: World, names: tuple[str, ...], before: dict[str, int]) -> None:
    """After healing: the same incarnation says Hello, offers what it held, and commits rows again."""
    leader = world.leader()
    for name in names:
        worker = world.incarnation(name)
        ready = f"{name} is ready again as the same incarnation"
        world.until(
            lambda w=worker, n=name: world.told(leader, "worker_ready", worker=w) > before[n], BACK_WITHIN_S, ready
        )
        count = world.committed_by(worker)
        world.until(lambda w=worker, c=count: world.committed_by(w) > c, BACK_WITHIN_S, f"{name} commits rows again")
        world.check(world.told(name, "worker_starting") == 1, f"{name} was never started anew")


def ready_before(world: World) -> dict[str, int]:
    leader = world.leader()
    return {name: world.told(leader, "worker_ready", worker=world.incarnation(name)) for name in WORKERS}


def worker_alone(world: World) -> None:
    """Longer than the failure timeout: declared failed, its rows run elsewhere, and it comes back with what it kept."""
    leader, victim = world.leader(), world.incarnation("worker-1")
    before = ready_before(world)
    world.say("CUT worker-1 alone")
    world.net.part("worker-1", *COORDINATORS)
    failed = "worker_failed of worker-1"
    world.until(lambda: world.told(leader, "worker_failed", worker=victim) == 1, SEEN_WITHIN_S, failed)
    world.moves_on(30, "the others go on, with its rows too")
    world.net.heal()
    world.say("HEALED")
    workers_back(world, ("worker-1",), before)
    told = [e for e in world.nodes[leader].events("worker_reconciled") if e["worker"] == victim]
    offered = sum(e["kept"] + e["resend"] + e["accepted"] + e["dropped"] for e in told)
    world.check(offered > 0, f"worker-1 offered {offered} attempts and results in its Hello")


def one_direction(world: World) -> None:
    """worker-2 is heard by nobody; worker-3 hears nobody. Neither may commit what another got meanwhile."""
    leader = world.leader()
    two, three = world.incarnation("worker-2"), world.incarnation("worker-3")
    before = ready_before(world)
    world.say("CUT worker-2 to the coordinators, and the coordinators to worker-3")
    world.net.cut("worker-2", *COORDINATORS)
    for coordinator in COORDINATORS:
        world.net.cut(coordinator, "worker-3")
    silent = "worker_failed of worker-2, which is not heard"
    world.until(lambda: world.told(leader, "worker_failed", worker=two) == 1, SEEN_WITHIN_S, silent)
    world.moves_on(30, "worker-1 goes on")
    world.check(world.told(leader, "worker_quarantined") == 0, "nobody was taken for a liar")
    deaf = world.told(leader, "worker_failed", worker=three)
    world.say(f"     worker-3, which hears nothing, was declared failed {deaf} times; it fenced itself")
    world.net.heal()
    world.say("HEALED")
    before["worker-3"] -= 0 if deaf else 1  # its stream may have lived on
    workers_back(world, ("worker-2", "worker-3"), before)


def takeover(world: World, cut: Callable[[str], None], what: str) -> None:
    old = world.leader()
    new = next(name for name in COORDINATORS if name != old)
    wait_until(lambda: world.stands_by(new), START_S, f"{new} to stand by")
    epoch = max(e["epoch"] for e in world.nodes[old].events("lease_acquired"))
    ready = world.told(new, "coordinator_ready")
    world.say(f"CUT {what} ({old})")
    cut(old)
    text = f"{new} leads and serves after the cut (target TTL + 2 s = {TAKEOVER_S:.0f} s)"
    world.until(lambda: world.told(new, "coordinator_ready") > ready, TTL_S + TAKEOVER_S, text)
    world.check(world.told(new, "lease_acquired", epoch=epoch + 1) == 1, f"the epoch grew by one, to {epoch + 1}")
    world.moves_on(40, "rows are committed by the new leader")
    told = list(world.nodes[new].events("worker_reconciled"))
    kept = sum(e["kept"] + e["resend"] + e["accepted"] for e in told)
    world.check(kept > 0, f"{kept} attempts and results were adopted by the new leader")
    world.net.heal()
    world.say("HEALED")

    stepped_back = f"{old} stands by, or was fenced and ended"
    world.until(lambda: world.stands_by(old) or not world.nodes[old].alive(), BACK_WITHIN_S, stepped_back)
    if not world.nodes[old].alive():
        world.check(world.told(old, "coordinator_fenced") == 1, f"{old} was fenced and ended, as it must")
        world.nodes[old].start()  # as systemd would; the next cut waits until it stands by
    world.check(world.leader() == new, f"{new} still leads")


def leader_alone(world: World) -> None:
    takeover(world, lambda old: world.net.part(old, *(h for h in world.net.addresses if h != old)), "the leader alone")


def leader_from_database(world: World) -> None:
    takeover(world, lambda old: world.net.part(old, "database"), "the leader from the database, and from nobody else")


def finish(world: World) -> None:
    world.stop_file.touch()
    client = world.nodes["client"]
    world.until(lambda: not client.alive(), 60, "the run is sealed and ends")
    done = next(iter(client.events("client_done")), {"submitted": -1, "committed": -2, "state": client.tail(5)})
    rows = world.rows()
    right = [row["seq"] for row in rows] == list(range(done["submitted"]))
    world.check(right, f"every row once and in order: {len(rows)} of {done['submitted']}, run {done['state']}")
    wrong = [row for row in rows if row["data"] != str(row["seq"])]
    world.check(not wrong, f"every row has its own result {wrong[:1] if wrong else ''}")
    taken = sorted(e["epoch"] for name in COORDINATORS for e in world.nodes[name].events("lease_acquired"))
    world.check(taken == [0, 1, 2], f"one leader an epoch: {taken}")
    begun = read_effects(world.root / "client" / "effects")
    overlaps = [f"{e.row}: attempt {e.attempt}" for e in begun if e.what == "beside"]
    seen, ended = (sum(e.what in what for e in begun) for what in (("start",), ("end", "cancelled")))
    world.check(
        seen > ended and not overlaps,
        f"no two attempts of an exclusive row overlapped ({seen} attempts, {seen - ended} killed) {overlaps[:1] or ''}",
    )
    world.say(f"     rows that needed more than one attempt: {sum(row['attempt'] > 1 for row in rows)}")


def main() -> int:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        check_allowed()
    except NotAllowedError as reason:
        print(f"SKIPPED: {reason}")
        return 0
    root = Path(tempfile.mkdtemp(prefix="rollout-netns-"))
    faults = ["interrupted"]
    try:
        with Net() as net:
            world = World(net, root)
            try:
                world.start()
                for part in (worker_alone, one_direction, leader_alone, leader_from_database, finish):
                    part(world)
                faults = world.faults
            finally:
                world.close()
    except (RuntimeError, TimeoutError) as error:
        faults = [str(error)]
    for fault in faults:
        print(f"FAILED: {fault} (logs: {root})")
    if not faults:
        shutil.rmtree(root, ignore_errors=True)
        print("1 passed, 0 failed")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
