"""The journal of sandboxes: one file for each, written before anything of it exists. Standard library only.

    STATE/lock            held while claims are counted or written
    STATE/owners/ID.lock  held by an owner's zygote while it lives, so that the kernel shows which owners are dead
    STATE/claims/NAME     the claim, JSON
    STATE/boxes/NAME/     the sandbox's files on disk

A claim also reserves what its sandbox declared: owners on one host that share a state directory share its processors
and memory too.

A sandbox that outlives this machine, as in a cloud, needs its claim on disk first (`durable`). Any other leaves only a
directory after a power failure, and that is found without a claim, because names contain their owner's id.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import signal
import time
from collections.abc import Generator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rollout_worker.sandboxes import cgroups, kernel, pid_namespaces, trees

MARK = "ROLLOUT_SANDBOX"
"""Environment variable of every process that a command starts, by which processes without a namespace are found."""

_REMOVE_S = 5.0


@dataclass(frozen=True)
class Capacity:
    """Total resources that sandboxes of this host may declare."""

    cpus: float
    memory_mb: int


@dataclass(frozen=True)
class Claim:
    """The claim of one sandbox. `name` is provider, owner and a number, joined by hyphens."""

    name: str
    provider: str
    owner: str
    box: str
    cpus: float
    memory_mb: int
    cgroups: tuple[str, ...] = ()
    marked: bool = False  # its processes have no namespace of their own

    @property
    def groups(self) -> list[Path]:
        return [Path(path) for path in self.cgroups]


class Journal:
    """The claims in a state directory. All methods block, on the disk and on other owners' locks."""

    def __init__(self, state: Path) -> None:
        self.state = state
        self.boxes = state / "boxes"
        self.mount_point = state / "root"
        self._claims = state / "claims"
        self._owners = state / "owners"

    def prepare(self) -> None:
        for directory in (self.state, self.boxes, self._claims, self._owners, self.mount_point):
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)

    def hold_owner(self, owner: str) -> int:
        """Take an owner's lock and return its descriptor; the lock lasts until that is closed, even by a crash."""
        path = self._owners / f"{owner}.lock"
        with self._locked():  # a reaper between opening and locking would take it for dead
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return fd

    def drop_owner(self, owner: str) -> None:
        (self._owners / f"{owner}.lock").unlink(missing_ok=True)

    def reserve(self, claim: Claim, capacity: Capacity, *, durable: bool = True) -> bool:
        """Write a claim if there is room for it beside all others; return whether there is."""
        with self._locked():
            claims = self.all()
            cpus = sum(c.cpus for c in claims) + claim.cpus
            memory = sum(c.memory_mb for c in claims) + claim.memory_mb
            if cpus > capacity.cpus + 1e-9 or memory > capacity.memory_mb:
                return False
            self.write(claim, durable=durable)
        return True

    def write(self, claim: Claim, *, durable: bool = True) -> None:
        """Write a claim, then make the sandbox's directory; `durable` puts claim and name on disk before that."""
        temporary = self._claims / f".{claim.name}"
        fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        try:
            os.write(fd, json.dumps(asdict(claim)).encode())
            if durable:
                os.fsync(fd)
        finally:
            os.close(fd)
        temporary.rename(self._claims / claim.name)
        if durable:
            directory = os.open(self._claims, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                os.fsync(directory)
            finally:
                os.close(directory)
        Path(claim.box).mkdir(mode=0o700)

    def all(self) -> list[Claim]:
        found = self._claims.iterdir() if self._claims.exists() else ()  # somebody removed the directory
        paths = sorted(path for path in found if not path.name.startswith("."))
        return [claim for path in paths if (claim := self._read(path)) is not None]

    def _read(self, path: Path) -> Claim | None:
        if path.name.startswith("."):  # incomplete: nothing of the sandbox was made
            return None
        try:
            fields: dict[str, Any] = json.loads(path.read_bytes())
            fields["cgroups"] = tuple(fields["cgroups"])
            return Claim(**fields)
        except FileNotFoundError:  # cleared meanwhile
            return None
        except ValueError:  # a power failure before it was on disk: only the directory is left
            return self._without_claim(path.name)

    def _without_claim(self, name: str) -> Claim:
        provider, _, rest = name.partition("-")
        owner = rest.partition("-")[0]
        return Claim(name, provider, owner, str(self.boxes / name), 0.0, 0)

    def of(self, owner: str) -> list[Claim]:
        return [claim for claim in self.all() if claim.owner == owner]

    def lost(self) -> list[Claim]:
        """Return claims of dead owners, with substitutes for their directories that have no claim."""
        with self._locked():
            for unfinished in self._claims.glob(".*"):  # of writes that were killed
                unfinished.unlink()
            claims = self.all()
            known = {claim.name for claim in claims}
            claims += [self._without_claim(path.name) for path in self.boxes.iterdir() if path.name not in known]
            owners = {claim.owner for claim in claims} | {path.stem for path in self._owners.iterdir()}
            dead = {owner for owner in owners if self.is_dead(owner)}
            for owner in dead:
                self.drop_owner(owner)
            return [claim for claim in claims if claim.owner in dead]

    def is_dead(self, owner: str) -> bool:
        """Return whether no process holds the owner's lock."""
        return is_unlocked(self.lock_of(owner))

    def lock_of(self, owner: str) -> Path:
        return self._owners / f"{owner}.lock"

    def clear(self, claim: Claim) -> None:
        """End and remove what is left of a sandbox, then its claim; this stays if OSError or TimeoutError is raised."""
        self.end_processes(claim)
        until = time.monotonic() + _REMOVE_S
        while True:
            try:
                _unmount_below(claim.box)
                trees.remove(claim.box)
                break
            except OSError:  # something that was just killed still wrote
                if time.monotonic() > until:
                    raise
                time.sleep(0.01)
        cgroups.remove(claim.groups)
        (self._claims / claim.name).unlink(missing_ok=True)

    def end_processes(self, claim: Claim) -> None:
        """Kill processes that did not end with the sandbox_init. Raises TimeoutError (an OSError) if some stay."""
        cgroups.kill(claim.groups)
        if claim.marked:
            _kill_marked(claim.name)

    @contextlib.contextmanager
    def _locked(self) -> Generator[None]:
        fd = os.open(self.state / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
            yield
        finally:
            os.close(fd)


def is_unlocked(path: Path) -> bool:
    """Return whether no process holds this lock; true also if the file does not exist."""
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return True
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    finally:
        os.close(fd)
    return True


def _kill_marked(name: str) -> None:
    mark = f"{MARK}={name}".encode()
    until = time.monotonic() + _REMOVE_S
    while found := [pid for pid in pid_namespaces.all_processes() if mark in _environment(pid)]:
        for pid in found:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if time.monotonic() > until:
            raise TimeoutError(f"processes {found} of sandbox {name} do not end")
        time.sleep(0.005)


def _environment(pid: int) -> list[bytes]:
    try:
        return Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:  # it ended, or it is another user's
        return []


def _unmount_below(directory: str) -> None:
    """Unmount everything below a directory. Sandboxes mount in their own namespaces, but nothing must be removed
    through a mount that is visible here."""
    for line in Path("/proc/self/mountinfo").read_bytes().splitlines():
        point = os.fsdecode(line.split(b" ")[4].decode("unicode_escape").encode("latin-1"))
        if point.startswith(f"{directory}/"):
            kernel.unmount(point)
