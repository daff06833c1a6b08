"""A cluster that lives as long as one command: coordinator and workers as its child processes, on loopback.

It is the same code as on many machines, with a temporary authority. State is in one directory, so the next command
finds the ledger again. The children end with this process however it ends: each holds a pipe whose other end is here.
"""

from __future__ import annotations

import asyncio
import errno
import json
import os
import re
import secrets
import shutil
import signal
import socket
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from rollout.client.client_telemetry import client_telemetry
from rollout.client.embedded_cloud import (
    cloud_of,
    cloud_sections,
    of_its_own,
    secrets_section,
    waited_for,
    write_sections,
)
from rollout.client.private import OwnerLock, address_of, forget_address, remember_address
from rollout.cloud.installed import check_installed
from rollout.config.cloud import NO_CLOUD, CloudSection
from rollout.files import replacing
from rollout.model.errors import ConfigError, RolloutError, StateError, UnavailableError
from rollout.processes.backoff import Backoff
from rollout.processes.child import DEVNULL, PIPE, Child
from rollout.processes.exits import ending
from rollout.processes.interpreter import python_module
from rollout.processes.parent import GRACE_S, PARENT_FD
from rollout.processes.standby import standby
from rollout.processes.supervised import Supervised
from rollout.security.authority import Authority
from rollout.telemetry.spans import environment_of

READY_S = 60.0
STOP_S = 5.0
DRAIN_S = 1.0
ALONE_S = 0.5
"""Grace period of workers whose coordinator is gone: there is nobody to return anything to."""
_COORDINATOR = "coordinator"
_CACHE, _TREES, _SCRATCH = "cache", "cache-trees", "scratch"
"""The second is where a worker whose cache is the first keeps code and models."""
_POLL_S = 0.02
_TELL_AFTER_S = 2.0
OWN_S = 30.0
CLUSTER = "rollout"
_PORT_TRIES = 5
_TAKEN = "cannot be listened on"
_SETTLED_S = 10.0  # a daemon that lived this long is restarted without growing pauses
_PAUSE_S, _PAUSE_MAX_S = 0.5, 10.0
_TRIES = 6
_USAGE = 2
_HOPELESS = ("storage_full", "storage_fault", "storage_damaged")
"""Events of a coordinator that would end in the same way again, until a user does something."""
# Sections that say where things are: those of the person's environment belong to another cluster.
_OURS = ("TRANSPORT", "STORAGE", "OBJECTS", "HTTP", "LOGGING", "CLOUD")


class ChildError(RolloutError):
    """A process of the embedded cluster cannot be kept running."""

    code = "embedded_child"


_OF_THE_FILE = ("cloud.", "objects.backend: ")
"""Messages of a coordinator that begin with one of these keys concern the user's file."""
_SAID = re.compile(r"^error \[\w+\]: ")
WORDS_MAX = 8000
"""Maximum characters of a child's last words: paths may be long, and the reason follows them."""


@dataclass(eq=False)
class _Daemon(Supervised):
    """`words` are its package and arguments. `launched` is called after each start, `failed` when there is no other."""

    name: str
    words: list[str]
    cwd: Path
    log: Path
    env: dict[str, str]
    parent_fd: int
    launched: Callable[[], None]
    report: Callable[[str], None]
    failed: Callable[[RolloutError], None]

    def __post_init__(self) -> None:
        super().__init__(Backoff(_PAUSE_S, _PAUSE_MAX_S, _SETTLED_S))
        self._waits = False  # to be started
        self._begun_at = 0  # of its log: what it says in this life stands behind

    @property
    def has_ended(self) -> bool:
        return self._child is not None and self._child.code is not None

    async def prepare(self) -> None:
        """Start the process, which loads its modules and waits for `launch`. If that fails, `launch` reports it."""
        with suppress(OSError):
            await self._execute(standby(*self.words), stdin=PIPE, output=DEVNULL)
            self._waits = True

    async def launch(self) -> None:
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("ab") as out:
            self._begun_at = out.tell()
            is_ready, self._waits = self._waits and not self.has_ended, False
            if is_ready and self._child is not None:
                self._child.close_stdin(os.fsencode(self.log))
            else:
                await self._execute(python_module(*self.words), stdin=DEVNULL, output=out.fileno())
        self.launched()

    async def _execute(self, command: list[str], *, stdin: int, output: int) -> None:
        self._child = await Child.start(
            command,
            stdin=stdin,
            stdout=output,
            stderr=output,
            cwd=self.cwd,
            env=self.env,
            pass_fds=(self.parent_fd,),
            group=True,  # Ctrl-C is this process's to handle
        )

    def dismiss(self) -> None:
        """End a process that waits for `launch`."""
        if self._waits:
            self.signal(signal.SIGKILL)

    def restarts(self, end: int | Exception, pause_s: float) -> bool:
        if end == _USAGE or self.backoff.failures >= _TRIES or self.hopeless():
            self.failed(self.fatal(end))
            return False
        self.report(f"{self.name} ended ({_how(end)}); it is started again, its work goes on")
        self.signal(signal.SIGKILL)  # what is left of its group
        return True

    def fatal(self, end: int | Exception) -> RolloutError:
        words = self.last_words()
        if self.name == _COORDINATOR and words.startswith(_OF_THE_FILE):
            return ConfigError(words)
        return ChildError(
            f"{self.name} of the embedded cluster ended ({_how(end)})"
            + (f": {words}" if words else "")
            + f"; its log: {self.log}"
        )

    def signal(self, number: int, *, group: bool = True) -> None:
        """Send a signal to the whole group, even if its leader has ended: an engine must not outlive its worker."""
        if self._child is not None:
            (self._child.signal if group else self._child.signal_alone)(number)

    def last_words(self, levels: tuple[str, ...] = ("error", "critical")) -> str:
        """Return what its log says about its end, for a message."""
        try:
            lines = self.log.read_text("utf-8", "replace").splitlines()[-20:]
        except OSError:
            return ""
        for line in reversed(lines):
            try:
                entry: Any = json.loads(line)
            except ValueError:
                if line.strip():
                    return _SAID.sub("", line.strip())[:WORDS_MAX]
                continue
            if isinstance(entry, dict) and entry.get("level") in levels:  # pyright: ignore[reportUnknownMemberType]
                if isinstance(entry.get("error"), str):  # pyright: ignore[reportUnknownMemberType]
                    return str(entry["error"])  # pyright: ignore[reportUnknownArgumentType]
                text = {k: v for k, v in entry.items() if k not in ("level", "timestamp", "exception")}  # pyright: ignore
                return json.dumps(text, ensure_ascii=False)[:WORDS_MAX]
        return ""

    def hopeless(self) -> bool:
        """Whether it reported why it ended, and a restart would not help."""
        return any(entry.get("event") in _HOPELESS for entry in _events(self.log, self._begun_at))


class Embedded:
    """An embedded cluster. Call `start`, then use `address`; `failure` is done when it cannot continue; call `stop`
    always.

    `directory` must be this process's alone. `slots` are those of each of the `workers`, and may be changed before
    `start`. `engines` is the number of each at once. `executors` limits them to these; empty means all that are
    installed. `report` is called for restarts, and for waiting. `lock` is the directory's, if the caller already holds
    it. `cloud` says where objects and secrets are; None means where they were.
    """

    def __init__(
        self,
        directory: Path,
        *,
        workers: int,
        report: Callable[[str], None],
        slots: int = 1,
        engines: int = 1,
        executors: Sequence[str] = (),
        lock: OwnerLock | None = None,
        cloud: CloudSection | None = None,
    ) -> None:
        self.directory = directory.resolve()
        self._cloud = cloud
        self._cwd = Path.cwd()
        self.tls_dir = self.directory / "tls"
        self.logs = self.directory / "logs"
        self.address = ""
        self.failure: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._workers = workers
        self.slots = slots
        self._engines = engines
        self._executors = list(executors)
        self._report = report
        self._read_fd, self._write_fd = os.pipe()
        self._lock = lock or OwnerLock(self.directory)
        self._lock_is_ours = lock is None
        self._children = [
            self._child(_COORDINATOR, "rollout_coordinator", {}),
            *(self._child(name, "rollout_worker", _gpus_of(at, workers)) for at, name in enumerate(self._names)),
        ]

    @property
    def _names(self) -> list[str]:
        """Names of the workers."""
        return [f"worker-{number}" for number in range(1, self._workers + 1)]

    async def prepare(self) -> None:
        """Make `start` faster: processes load their modules; nothing is opened or written."""
        for child in self._children:
            await child.prepare()

    async def start(self) -> None:
        """Start, and wait until the coordinator serves. Raises ChildError with its last words if it does not,
        StateError if another process runs this directory's cluster."""
        try:
            self.directory.mkdir(parents=True, exist_ok=True, mode=0o700)
            await self._own()
            await self._bury_predecessor()
            # Workers need not wait for the coordinator to make it.
            await asyncio.to_thread(Authority.load_or_create, self.tls_dir, CLUSTER, tell=False)
            if self._cloud is None:
                self._cloud = await asyncio.to_thread(cloud_of, self.directory)
            else:
                self._cloud = await asyncio.to_thread(of_its_own, self.directory, self._cloud)
            check_installed(self._cloud)
            for left in reversed(range(_PORT_TRIES)):
                try:
                    await self._start_all(f"127.0.0.1:{_free_port()}")
                    break
                except ChildError as error:
                    if not left or _TAKEN not in error.message:
                        raise
                    await self._end_all()
            remember_address(self.directory, self.address)
        except OSError as error:
            raise ConfigError(f"{self.directory} cannot be used: {error.strerror or error}") from error

    async def _own(self) -> None:
        """Take the lock, waiting briefly, because a command that only reads ends soon."""
        until, told = time.monotonic() + OWN_S, False
        while not self._lock.try_acquire():
            if address_of(self.directory) or time.monotonic() > until:
                raise StateError(f"the private cluster in {self.directory} is run by another process: wait for it")
            if not told and time.monotonic() > until - OWN_S + _TELL_AFTER_S:
                told = True
                self._report(f"waiting for another command that looks at the runs in {self.directory}")
            await asyncio.sleep(_POLL_S)

    async def _start_all(self, address: str) -> None:
        """Start coordinator and workers concurrently: each takes some time to come up."""
        self.address = address
        self._configure_coordinator(address)
        for name in self._names:
            self._configure_worker(name)
        coordinator = self._children[0]
        seen = coordinator.log.stat().st_size if coordinator.log.exists() else 0
        for child in self._children:
            await child.launch()
        await self._ready(coordinator, seen)
        for child in self._children:
            child.watch()

    async def _end_all(self) -> None:
        self.kill()
        await asyncio.gather(*(child.ended() for child in self._children if child.pid))

    async def stop(self) -> None:
        """End every child, cleanly if they manage in time."""
        if self.address:
            forget_address(self.directory)  # before anybody else finds a coordinator that is on its way out
        for child in self._children:
            child.dismiss()
        await asyncio.gather(*[child.unwatch() for child in self._children])
        running = {child.name: asyncio.ensure_future(child.ended()) for child in self._children if child.pid}
        # Workers first, while there is a coordinator to hand things back to.
        workers = [ended for name, ended in running.items() if name != _COORDINATOR]
        for child in self._children:
            if child.name != _COORDINATOR:
                child.signal(signal.SIGTERM, group=False)
        alone = any(child.name == _COORDINATOR and child.has_ended for child in self._children)
        if workers:
            await asyncio.wait(workers, timeout=ALONE_S if alone else DRAIN_S + STOP_S)
        if self._write_fd >= 0:
            os.close(self._write_fd)
            os.close(self._read_fd)
            self._write_fd = self._read_fd = -1
        if running:
            await asyncio.wait(running.values(), timeout=ALONE_S if alone else STOP_S)
        self.kill()
        await asyncio.gather(*running.values(), return_exceptions=True)
        if self.address:
            (self.directory / "children.json").unlink(missing_ok=True)
        if self._lock_is_ours:
            self._lock.release()
        if not self.failure.done():
            self.failure.cancel()

    def tidy(self) -> None:
        """Remove what only its workers need, once they have ended for good. The ledger and the objects stay, from which
        rows, snapshots and models are read. Blocking."""
        for name in (_CACHE, _TREES, _SCRATCH):
            shutil.rmtree(self.directory / name, ignore_errors=True)

    def kill(self) -> None:
        """Kill all children at once, without waiting."""
        for child in self._children:
            child.signal(signal.SIGKILL)

    # ---- children

    def _path(self, name: str) -> str:
        """Return a path for a configuration file, which is text: a directory above may have a name that is not."""
        path = self.directory / name
        return str(path.relative_to(self._cwd) if path.is_relative_to(self._cwd) else path)

    def _configure_coordinator(self, listen: str) -> None:
        cloud = self._cloud or NO_CLOUD
        write_sections(
            self._config(_COORDINATOR),
            {
                "storage": {"backend": "embedded"},
                "storage.embedded": {"path": self._path("rollout.db")},
                "transport": {"listen_addr": listen, "tls_dir": self._path("tls")},
                "objects": {"backend": "" if cloud.bucket else "fs", "path": self._path("objects")},
                "logging": {"format": "json", "level": "info"},
                **cloud_sections(cloud),
            },
        )

    def _configure_worker(self, name: str) -> None:
        cloud = self._cloud or NO_CLOUD
        write_sections(
            self._config(name),
            {
                "transport": {"coordinator_addrs": [self.address], "tls_dir": self._path("tls")},
                "objects": {"cache_dir": self._path(_CACHE)},
                "worker": {
                    "scratch_dir": self._path(f"{_SCRATCH}/{name}"),
                    "drain_budget_s": DRAIN_S,
                    "slots": self.slots,
                    "max_engines": self._engines,
                    "executors": self._executors,
                },
                "secrets": secrets_section(cloud),
                "logging": {"format": "json", "level": "info"},
                **cloud_sections(cloud),
            },
        )

    def _config(self, name: str) -> Path:
        return self.directory / f"{name}.toml"

    def _child(self, name: str, package: str, env: dict[str, str]) -> _Daemon:
        base = {key: value for key, value in os.environ.items() if not _belongs_elsewhere(key)}
        words = [package, "run", "--config", str(self._config(name))]
        env = base | environment_of(client_telemetry()) | env | {PARENT_FD: str(self._read_fd)}
        log = self.logs / f"{name}.jsonl"
        return _Daemon(name, words, self._cwd, log, env, self._read_fd, self._remember, self._report, self._fail)

    def _fail(self, error: RolloutError) -> None:
        if not self.failure.done():
            self.failure.set_exception(error)

    async def _ready(self, child: _Daemon, offset: int) -> None:
        ended = asyncio.ensure_future(child.ended())
        told: set[str] = set()
        try:
            deadline = time.monotonic() + READY_S
            while time.monotonic() < deadline:
                for entry in _events(child.log, offset):
                    if entry.get("event") == "coordinator_ready":
                        return
                    if entry.get("event") == "objects_unreachable" and not told:
                        told.add(waited_for(entry))
                        self._report(waited_for(entry))
                if ended.done():
                    raise child.fatal(ended.result())
                await asyncio.sleep(_POLL_S)
            words = child.last_words(("warning", "error", "critical"))
            raise UnavailableError(
                f"the embedded coordinator is not ready after {READY_S:.0f} s"
                + (f": {words}" if words else "")
                + f"; its log: {child.log}"
            )
        finally:
            ended.cancel()

    # ---- a predecessor that was killed

    def _remember(self) -> None:
        known: list[tuple[int, float]] = []
        for child in (child for child in self._children if child.pid):
            try:
                known.append((child.pid, psutil.Process(child.pid).create_time()))
            except psutil.NoSuchProcess:
                continue
        with replacing(self.directory / "children.json", durable=False) as file:
            file.write(json.dumps(known).encode())

    async def _bury_predecessor(self) -> None:
        """Wait for children of a killed command, which end by themselves once their output is in the ledger; one that
        hangs would keep it locked."""
        path = self.directory / "children.json"
        try:
            known: list[tuple[int, float]] = json.loads(path.read_text())
        except (OSError, ValueError):
            return
        left: list[psutil.Process] = []
        for pid, created in known:
            try:
                process = psutil.Process(pid)
                if process.create_time() == created:
                    left.append(process)
            except psutil.Error:
                continue
        _, left = await asyncio.to_thread(psutil.wait_procs, left, timeout=_TELL_AFTER_S)
        if left:
            self._report(f"waiting for the processes of the command before in {self.directory}, which was killed")
            _, left = await asyncio.to_thread(psutil.wait_procs, left, timeout=GRACE_S - _TELL_AFTER_S)
        for process in left:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
        await asyncio.to_thread(psutil.wait_procs, left, timeout=5.0)
        path.unlink(missing_ok=True)


def _how(end: int | Exception) -> str:
    return ending(end) if isinstance(end, int) else str(end)


def _free_port() -> int:
    """Return a port that nobody listens on, below those that systems use for outgoing connections."""
    while True:
        port = 20_000 + secrets.randbelow(12_000)
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError as error:
                if error.errno != errno.EADDRINUSE:
                    raise
                continue
        return port


def _belongs_elsewhere(variable: str) -> bool:
    return variable in ("ROLLOUT_COORDINATOR", "ROLLOUT_CONTEXT", "ROLLOUT_TLS_DIR") or variable.startswith(
        tuple(f"ROLLOUT_{name}__" for name in _OURS)
    )


def _gpus_of(index: int, workers: int) -> dict[str, str]:
    """Return a worker's share of this machine's GPUs, if there are enough and nobody has chosen."""
    gpus = len(list(Path("/dev").glob("nvidia[0-9]*")))
    if workers == 1 or gpus < workers or "CUDA_VISIBLE_DEVICES" in os.environ:
        return {}
    share = gpus // workers
    return {"CUDA_VISIBLE_DEVICES": ",".join(str(n) for n in range(index * share, (index + 1) * share))}


def _events(log: Path, offset: int) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    try:
        with log.open("rb") as file:
            file.seek(offset)
            lines = file.read().split(b"\n")
    except FileNotFoundError:
        return []
    for line in lines:
        if line.startswith(b"{"):
            try:
                found.append(json.loads(line))
            except ValueError:
                continue  # half written
    return found
