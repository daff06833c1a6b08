"""Starts and kills real coordinators and workers on this machine, for the demo, the smokes and the acceptance tests.

Every node gets a directory of its own with its own configuration and log; nothing is shared but loopback and the
certificates that `join` handed out.
"""

from __future__ import annotations

import errno
import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

popen: type[subprocess.Popen[Any]] = subprocess.Popen
"""What starts a program: the tests put in its place what does so quicker."""


@dataclass
class Node:
    """One daemon: its process, directory and log of JSON lines."""

    name: str
    directory: Path
    command: list[str]
    env: dict[str, str] = field(default_factory=dict)
    process: subprocess.Popen[bytes] | None = None
    starts: int = 0

    @property
    def log(self) -> Path:
        return self.directory / "log.jsonl"

    def start(self) -> Node:
        self.directory.mkdir(parents=True, exist_ok=True)
        self.starts += 1
        with self.log.open("ab") as out:
            self.process = popen(
                self.command,
                cwd=self.directory,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                start_new_session=True,
                env=os.environ | {"ROLLOUT_LOGGING__FORMAT": "json"} | self.env,
            )
        return self

    def events(self, name: str | None = None) -> Iterator[dict[str, Any]]:
        """Log lines that are JSON objects, all or those of one event."""
        if not self.log.exists():
            return
        for line in self.log.read_text(errors="replace").splitlines():
            if line.startswith("{"):
                try:
                    entry = json.loads(line)
                except json.JSONDecodeError:
                    continue
                if name is None or entry.get("event") == name:
                    yield entry

    def wait_event(self, name: str, timeout: float = 60.0, count: int = 1) -> dict[str, Any]:
        """The `count`-th event of that name."""
        found: list[dict[str, Any]] = []

        def there() -> bool:
            found[:] = list(self.events(name))
            if len(found) < count and self.process is not None and self.process.poll() is not None:
                raise RuntimeError(f"{self.name} exited with {self.process.returncode}; see {self.log}\n{self.tail()}")
            return len(found) >= count

        wait_until(there, timeout, f"{self.name} to log {name} (log: {self.log})")
        return found[count - 1]

    def tail(self, lines: int = 15) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:]) if self.log.exists() else ""

    def kill(self, sig: int = signal.SIGKILL) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.send_signal(sig)
            if sig in (signal.SIGKILL, signal.SIGTERM, signal.SIGINT):
                self.process.wait(timeout=90)

    def alive(self) -> bool:
        return self.process is not None and self.process.poll() is None


def wait_until(condition: Callable[[], bool], timeout: float, what: str) -> None:
    deadline = time.monotonic() + timeout
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"waited {timeout:.0f} s for {what}")
        time.sleep(0.05)


def _ran(command: list[str], **options: Any) -> tuple[int, str, str]:
    """Its exit code and what it printed."""
    with popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options) as process:
        out, err = process.communicate()
    return process.returncode, out, err


def binary(name: str) -> str:
    """A console script of the environment that runs this file."""
    return str(Path(sys.executable).with_name(name))


def free_port() -> int:
    """A port nobody listens on, below those that systems give to outgoing connections: it stays free until it is used.

    Also while its daemon is down: one that is started again finds its port as it left it.
    """
    while True:
        port = 20_000 + secrets.randbelow(12_000)
        if port in _given:
            continue
        with socket.socket() as s:
            try:
                s.bind(("127.0.0.1", port))
            except OSError as error:
                if error.errno != errno.EADDRINUSE:
                    raise
                continue
        _given.add(port)
        return port


_given: set[int] = set()


def toml(value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return json.dumps(value)


def write_toml(path: Path, sections: dict[str, dict[str, Any]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    lines: list[str] = []
    for section, values in sections.items():
        lines.append(f"[{section}]")
        for key, value in values.items():
            if isinstance(value, list):
                lines.append(f"{key} = [{', '.join(toml(v) for v in value)}]")
            else:
                lines.append(f"{key} = {toml(value)}")
        lines.append("")
    path.write_text("\n".join(lines))
    return path


TOKEN_S, TOKEN_USES = 300.0, 100
"""Nodes of one role join by one token while it is young: making one is a process of its own."""


class Cluster:
    """Coordinators and workers below one directory, all on loopback, all over mTLS."""

    def __init__(self, root: Path, *, postgres_url: str = "", transport: dict[str, Any] | None = None) -> None:
        self.root = root.resolve()
        self.postgres_url = postgres_url
        self.transport = transport or {}
        self.nodes: list[Node] = []
        self.coordinators: list[Node] = []
        self.workers: list[Node] = []
        self.addresses: list[str] = []
        self.join_address = ""
        self._tokens: dict[str, tuple[str, float]] = {}  # by role, when it was made

    def add_coordinator(self, *, others: list[str] | None = None, start: bool = True, **sections: Any) -> Node:
        name = f"coordinator-{len(self.coordinators) + 1}"
        directory = self.root / name
        address, join = f"127.0.0.1:{free_port()}", f"127.0.0.1:{free_port()}"
        storage: dict[str, dict[str, Any]] = (
            {"storage": {"backend": "postgres"}, "storage.postgres": {"url": self.postgres_url}}
            if self.postgres_url
            else {"storage": {"backend": "embedded"}, "storage.embedded": {"path": "data/rollout.db"}}
        )
        config = write_toml(
            directory / "coordinator.toml",
            storage
            | {
                "transport": {"listen_addr": address, "join_addr": join, "tls_dir": "data/tls"}
                | ({"coordinator_addrs": [address, *others]} if others else {})
                | self.transport,
                "http": {"listen_addr": f"127.0.0.1:{free_port()}"},
            }
            | sections,
        )
        if self.coordinators:
            self._join(directory / "data/tls", "coordinator", "rollout-coordinator")
        node = Node(name, directory, [binary("rollout-coordinator"), "run", "--config", str(config)])
        self.nodes.append(node)
        self.coordinators.append(node)
        self.addresses.append(address)
        self.join_address = self.join_address or join
        return node.start() if start else node

    def token(self, role: str, uses: int = 1) -> str:
        node = self.coordinators[0]
        command = [
            binary("rollout-coordinator"),
            "token",
            "create",
            "--config",
            str(node.directory / "coordinator.toml"),
        ]
        code, out, err = _ran([*command, "--role", role, "--uses", str(uses)], cwd=node.directory)
        if code != 0:
            raise RuntimeError(f"no token:\n{out}{err}")
        return out.strip()

    def _join(self, tls_dir: Path, role: str, program: str) -> None:
        tls_dir.parent.mkdir(parents=True, exist_ok=True)
        token, made = self._tokens.get(role, ("", 0.0))
        if not token or time.monotonic() - made > TOKEN_S:
            token = self.token(role, uses=TOKEN_USES)
            self._tokens[role] = token, time.monotonic()
        command = [binary(program), "join", "--coordinator", self.join_address, "--tls-dir", str(tls_dir)]
        # Whoever runs this has clusters of their own in use.
        env = os.environ | {"ROLLOUT_JOIN_TOKEN": token, "XDG_CONFIG_HOME": str(self.root / "config")}
        code, out, err = _ran(command, env=env)
        if code != 0:
            raise RuntimeError(f"{program} join ended with {code}:\n{out}{err}")

    def operator(self) -> list[str]:
        """Options that make a `rollout` command reach this cluster; enrols an operator the first time."""
        tls_dir = self.root / "operator" / "tls"
        if not tls_dir.exists():
            self._join(tls_dir, "operator", "rollout")
        return [o for a in self.addresses for o in ("--coordinator", a)] + ["--tls-dir", str(tls_dir)]

    def add_worker(self, *, start: bool = True, args: list[str] | None = None, **sections: Any) -> Node:
        name = f"worker-{len(self.workers) + 1}"
        directory = self.root / name
        transport = {"coordinator_addrs": self.addresses, "tls_dir": "data/tls"} | self.transport
        config = write_toml(directory / "worker.toml", {"transport": transport} | sections)
        self._join(directory / "data/tls", "worker", "rollout-worker")
        node = Node(name, directory, [binary("rollout-worker"), "run", "--config", str(config), *(args or [])])
        self.nodes.append(node)
        self.workers.append(node)
        return node.start() if start else node

    def close(self) -> None:
        """Stops everything, workers first."""
        for node in [*self.workers, *self.coordinators]:
            if node.alive() and node.process is not None:
                node.process.send_signal(signal.SIGCONT)
                node.process.send_signal(signal.SIGTERM)
        for node in [*self.workers, *self.coordinators]:
            if node.process is not None:
                try:
                    node.process.wait(timeout=15)
                except subprocess.TimeoutExpired:
                    node.kill()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
