"""Network namespaces joined by a bridge, links that can be cut in one direction, and PostgreSQL in one of them.

Only `ip` of iproute2 is needed. A cut gives the receiver's address a link address that nobody has: packets leave and
never arrive, nobody is told, and the other direction is as it was.
"""

from __future__ import annotations

import contextlib
import os
import pwd
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

NOBODY_HAS = "02:00:00:00:00:01"
PREFIX = "ro-"


class NotAllowedError(Exception):
    """This machine cannot do it; the text says what is missing."""


def find_binary(name: str) -> str | None:
    """On PATH, or where Debian and the official packages put it."""
    return shutil.which(name) or next(
        (
            str(p / name)
            for p in sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True)
            if (p / name).is_file()
        ),
        None,
    )


def check_allowed() -> None:
    """NotAllowedError unless namespaces can be made and a PostgreSQL can be run in one."""
    if sys.platform != "linux":
        raise NotAllowedError("network namespaces are a feature of Linux")
    if os.geteuid() != 0:
        raise NotAllowedError("network namespaces need root: run it with sudo")
    for name in ("ip", "runuser", "initdb", "postgres"):
        if find_binary(name) is None:
            raise NotAllowedError(f"`{name}` is not installed (needed: iproute2, util-linux, PostgreSQL 15 or newer)")
    probe = f"{PREFIX}{os.getpid()}-probe"
    done = subprocess.run(["ip", "netns", "add", probe], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise NotAllowedError(f"network namespaces are not allowed here: {done.stderr.strip()}")
    made = subprocess.run(
        ["ip", "-n", probe, "link", "add", "br0", "type", "bridge"], capture_output=True, text=True, check=False
    )
    entered = subprocess.run(["ip", "netns", "exec", probe, "true"], capture_output=True, text=True, check=False)
    subprocess.run(["ip", "netns", "del", probe], check=False)
    if made.returncode != 0 or entered.returncode != 0:
        raise NotAllowedError(f"bridges in namespaces are not allowed here: {(made.stderr + entered.stderr).strip()}")


def _ip(*words: str) -> None:
    done = subprocess.run(["ip", *words], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"ip {' '.join(words)}: {done.stderr.strip()}")


class Net:
    """Hosts by name, each a namespace with one address on a common bridge. Use as a context manager."""

    def __init__(self) -> None:
        self.addresses: dict[str, str] = {}
        self._id = f"{PREFIX}{os.getpid()}"
        self._cuts: set[tuple[str, str]] = set()

    def __enter__(self) -> Net:
        remove_abandoned()
        self._make("hub")
        _ip("-n", self.namespace("hub"), "link", "add", "br0", "type", "bridge")
        _ip("-n", self.namespace("hub"), "link", "set", "br0", "up")
        return self

    def __exit__(self, *exc: object) -> None:
        for name in [*self.addresses, "hub"]:
            _end_processes(self.namespace(name))
            subprocess.run(["ip", "netns", "del", self.namespace(name)], capture_output=True, check=False)

    def namespace(self, host: str) -> str:
        return f"{self._id}-{host}"

    def _make(self, host: str) -> None:
        _ip("netns", "add", self.namespace(host))
        _ip("-n", self.namespace(host), "link", "set", "lo", "up")

    def add(self, host: str) -> str:
        """A new host; its address."""
        number = len(self.addresses) + 1
        address = self.addresses[host] = f"10.77.0.{number}"
        self._make(host)
        hub, here, port = self.namespace("hub"), self.namespace(host), f"port{number}"
        _ip("link", "add", port, "netns", hub, "type", "veth", "peer", "name", "eth0", "netns", here)
        _ip("-n", hub, "link", "set", port, "master", "br0")
        _ip("-n", hub, "link", "set", port, "up")
        _ip("-n", here, "addr", "add", f"{address}/24", "dev", "eth0")
        _ip("-n", here, "link", "set", "eth0", "up")
        return address

    def enter(self, host: str, *command: str) -> list[str]:
        """The command, to be run on that host. The process keeps its id."""
        return ["ip", "netns", "exec", self.namespace(host), *command]

    def cut(self, sender: str, *receivers: str) -> None:
        """What `sender` sends to `receivers` is lost from now on; what they send to it arrives."""
        for receiver in receivers:
            to = self.addresses[receiver]
            _ip(
                "-n",
                self.namespace(sender),
                "neigh",
                "replace",
                to,
                "lladdr",
                NOBODY_HAS,
                "dev",
                "eth0",
                "nud",
                "permanent",
            )
            self._cuts.add((sender, receiver))

    def part(self, host: str, *others: str) -> None:
        """Nothing passes between `host` and `others`, in either direction."""
        self.cut(host, *others)
        for other in others:
            self.cut(other, host)

    def heal(self) -> None:
        """All links are whole again."""
        for sender, receiver in self._cuts:
            _ip("-n", self.namespace(sender), "neigh", "del", self.addresses[receiver], "dev", "eth0")
        self._cuts.clear()


def _end_processes(namespace: str) -> None:
    found = subprocess.run(["ip", "netns", "pids", namespace], capture_output=True, text=True, check=False)
    for pid in found.stdout.split():
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(pid), signal.SIGKILL)


def remove_abandoned() -> None:
    """Namespaces of a run of this script that was killed before it could tidy up."""
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=False)
    for line in listed.stdout.splitlines():
        name = line.split()[0] if line.split() else ""
        owner = name.removeprefix(PREFIX).split("-")[0]
        if name.startswith(PREFIX) and owner.isdigit() and not Path(f"/proc/{owner}").exists():
            _end_processes(name)
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)


@dataclass
class Postgres:
    """A server on one host of the net, as `nobody`: it refuses root."""

    net: Net
    host: str
    directory: Path
    process: subprocess.Popen[bytes] | None = None
    log: Path = field(init=False)

    @property
    def url(self) -> str:
        return f"postgresql://nobody@{self.net.addresses[self.host]}:5432/postgres"

    def start(self) -> Postgres:
        initdb, postgres = find_binary("initdb"), find_binary("postgres")
        assert initdb is not None and postgres is not None
        self.directory.mkdir(parents=True)
        owner = pwd.getpwnam("nobody")
        os.chown(self.directory, owner.pw_uid, owner.pw_gid)
        for parent in self.directory.parents[:2]:
            parent.chmod(0o755)  # `nobody` must get there
        data = self.directory / "data"
        self.log = self.directory / "log"
        user = ["runuser", "-u", "nobody", "--"]
        made = subprocess.run(
            [*user, initdb, "-D", str(data), "-A", "trust", "-E", "UTF8", "--no-sync"],
            cwd=self.directory,
            capture_output=True,
            text=True,
            check=False,
        )
        if made.returncode != 0:
            raise RuntimeError(f"initdb failed: {made.stderr[-1000:]}")
        with (data / "pg_hba.conf").open("a") as rules:
            rules.write("host all all 10.77.0.0/24 trust\n")
        options = {
            "listen_addresses": self.net.addresses[self.host],
            "unix_socket_directories": str(self.directory),
            "fsync": "off",  # nobody kills the machine here
            "shared_buffers": "32MB",
            "max_connections": "60",
        }
        settings = [word for name, value in options.items() for word in ("-c", f"{name}={value}")]
        with self.log.open("ab") as out:
            self.process = subprocess.Popen(
                self.net.enter(self.host, *user, postgres, "-D", str(data), *settings),
                cwd=self.directory,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                start_new_session=True,
            )
        deadline = time.monotonic() + 30
        while "ready to accept connections" not in self.log.read_text(errors="replace"):
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"postgres did not start: {self.log.read_text(errors='replace')[-1000:]}")
            time.sleep(0.05)
        return self

    def stop(self) -> None:
        pid_file = self.directory / "data" / "postmaster.pid"
        if self.process is not None and self.process.poll() is None and pid_file.exists():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid_file.read_text().split()[0]), signal.SIGQUIT)
            self.process.wait(timeout=30)
