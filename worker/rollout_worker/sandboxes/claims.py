"""The journal of sandboxes: a file for each, before anything of it exists. Standard library only.

    STATE/lock            held while claims are counted or written
    STATE/owners/ID.lock  held by an owner's zygote for as long as it lives, so that the kernel tells who is dead
    STATE/claims/NAME     the claim, JSON
    STATE/boxes/NAME/     what the sandbox has on the disk

A claim is also the reservation of what its sandbox declared: owners on one host that share a state directory share its
processors and memory too.

A sandbox that outlives this machine, as in a cloud, needs its claim on the disk first (`durable`). Of one that does
not, a power cut leaves a directory only, and that is found without a claim: names hold their owner's id.
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
"""In the environment of every process that a command starts: how processes without a namespace are found again."""

_REMOVE_S = 5.0


@dataclass(frozen=True)
class Capacity:
    """What sandboxes of this host may declare, all together."""

    cpus: float
    memory_mb: int


@dataclass(frozen=True)
class Claim:
    """`name`: provider, owner and a number, with hyphens between them."""

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
    """All methods block, on the disk and on other owners' locks."""

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
        """Take an owner's lock; it is held until the descriptor is closed, however this process ends."""
        path = self._owners / f"{owner}.lock"
        with self._locked():  # a reaper between opening and locking would take it for dead
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return fd

    def drop_owner(self, owner: str) -> None:
        (self._owners / f"{owner}.lock").unlink(missing_ok=True)

    def reserve(self, claim: Claim, capacity: Capacity, *, durable: bool = True) -> bool:
        """Write a claim, if there is room for it beside all others."""
        with self._locked():
            claims = self.all()
            cpus = sum(c.cpus for c in claims) + claim.cpus
            memory = sum(c.memory_mb for c in claims) + claim.memory_mb
            if cpus > capacity.cpus + 1e-9 or memory > capacity.memory_mb:
                return False
            self.write(claim, durable=durable)
        return True

    def write(self, claim: Claim, *, durable: bool = True) -> None:
        """And make the sandbox's directory. `durable`: the claim, with its name, is on the disk before."""
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
        paths = sorted(self._claims.iterdir()) if self._claims.exists() else ()  # somebody removed the directory
        return [claim for path in paths if (claim := self._read(path)) is not None]

    def _read(self, path: Path) -> Claim | None:
        if path.name.startswith("."):  # not written to its end: nothing of it was made
            return None
        try:
            fields: dict[str, Any] = json.loads(path.read_bytes())
            fields["cgroups"] = tuple(fields["cgroups"])
            return Claim(**fields)
        except FileNotFoundError:  # cleared meanwhile
            return None
        except ValueError:  # the power was cut before it was on the disk: with it went all but the directory
            return self._without_claim(path.name)

    def _without_claim(self, name: str) -> Claim:
        provider, _, rest = name.partition("-")
        owner = rest.partition("-")[0]
        return Claim(name, provider, owner, str(self.boxes / name), 0.0, 0)

    def of(self, owner: str) -> list[Claim]:
        return [claim for claim in self.all() if claim.owner == owner]

    def lost(self) -> list[Claim]:
        """Claims whose owner is dead, and directories of dead owners that have none."""
        with self._locked():
            claims = self.all()
            known = {claim.name for claim in claims}
            claims += [self._without_claim(path.name) for path in self.boxes.iterdir() if path.name not in known]
            owners = {claim.owner for claim in claims} | {path.stem for path in self._owners.iterdir()}
            dead = {owner for owner in owners if self.is_dead(owner)}
            for owner in dead:
                self.drop_owner(owner)
            return [claim for claim in claims if claim.owner in dead]

    def is_dead(self, owner: str) -> bool:
        """Whether no process holds the owner's lock."""
        return is_unlocked(self.lock_of(owner))

    def lock_of(self, owner: str) -> Path:
        return self._owners / f"{owner}.lock"

    def clear(self, claim: Claim) -> None:
        """End and remove all that is left of a sandbox, then its claim. OSError, TimeoutError: the claim stays."""
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
        """Those of a namespace have ended with its sandbox_init. TimeoutError (an OSError): some do not end."""
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
    """Whether no process holds this lock; also if the file is gone."""
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
    """Mounts of sandboxes are in namespaces of their own. Should one be seen here, it must not be removed through."""
    for line in Path("/proc/self/mountinfo").read_bytes().splitlines():
        point = os.fsdecode(line.split(b" ")[4].decode("unicode_escape").encode("latin-1"))
        if point.startswith(f"{directory}/"):
            kernel.unmount(point)
