"""Limits for all processes of a sandbox together, by control groups, versions 1 and 2. Standard library only.

A group is one directory in version 2, and one in each controller's hierarchy in version 1. Groups are made below this
process's own group, so that the worker's limits hold for its sandboxes too; in version 2, where a group with processes
cannot have limited groups below it, they are made beside it.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

CONTROLLERS = ("cpu", "memory", "pids")
_CPU_PERIOD_US = 100_000
REMOVE_S = 5.0


@dataclass(frozen=True)
class Place:
    """Where groups can be made. `directories` maps each controller to the parent directory of its groups."""

    directories: Mapping[str, Path]
    unified: bool

    def paths(self, name: str) -> list[Path]:
        return [path / name for path in dict.fromkeys(self.directories.values())]


def find(root: Path = Path("/")) -> Place:
    """Find where this process may make groups and set limits, by making one; `directories` is empty if nowhere."""
    best = Place({}, False)
    for place in _candidates(root):
        works = {c: p for c, p in place.directories.items() if _works(c, p, place.unified)}
        if len(works) > len(best.directories):
            best = Place(works, place.unified)
    return best


def _works(controller: str, parent: Path, unified: bool) -> bool:
    probe = parent / f"rollout-probe-{os.getpid()}"
    try:
        probe.mkdir()
    except OSError:
        return False
    try:
        for file, value in _settings(controller, unified, cpus=1.0, memory=1 << 30, pids=1024):
            (probe / file).write_text(value)
    except OSError:
        return False
    finally:
        with contextlib.suppress(OSError):
            probe.rmdir()
    return True


def _candidates(root: Path) -> Iterator[Place]:
    mount = root / "sys/fs/cgroup"
    first: dict[str, Path] = {}
    for line in _lines(root / "proc/self/cgroup"):
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if number == "0" and not controllers:
            for base in (mount, mount / "unified"):
                own = base / path.strip("/")
                # Groups with limits cannot be below a group with processes: try beside it too, if that was delegated.
                for place in dict.fromkeys((own, own.parent)):
                    if place.is_relative_to(base) and (place / "cgroup.controllers").is_file():
                        _delegate(place)
                        enabled = _words(place / "cgroup.subtree_control")
                        yield Place({c: place for c in CONTROLLERS if c in enabled}, True)
            continue
        for controller in set(controllers.split(",")) & set(CONTROLLERS):
            hierarchy = mount / controllers if (mount / controllers).is_dir() else mount / controller
            own = hierarchy / path.strip("/")
            first[controller] = own if own.is_dir() else hierarchy  # in a container its own is mounted at the top
    if first:
        yield Place(first, False)


def _delegate(place: Path) -> None:
    for controller in CONTROLLERS:
        with contextlib.suppress(OSError):
            (place / "cgroup.subtree_control").write_text(f"+{controller}")


def _settings(controller: str, unified: bool, *, cpus: float, memory: int, pids: int) -> list[tuple[str, str]]:
    quota = max(1000, int(cpus * _CPU_PERIOD_US))
    if controller == "cpu":
        if unified:
            return [("cpu.max", f"{quota} {_CPU_PERIOD_US}")]
        return [("cpu.cfs_period_us", str(_CPU_PERIOD_US)), ("cpu.cfs_quota_us", str(quota))]
    if controller == "memory":
        return [("memory.max" if unified else "memory.limit_in_bytes", str(memory))]
    return [("pids.max", str(pids))]


def make(place: Place, name: str, *, cpus: float, memory: int, pids: int) -> list[Path]:
    """Make a group with these limits (bytes of memory, no swap beyond) and return its directories. Raises OSError."""
    made: list[Path] = []
    try:
        for controller, parent in place.directories.items():
            group = parent / name
            if group not in made:
                group.mkdir()
                made.append(group)
            for file, value in _settings(controller, place.unified, cpus=cpus, memory=memory, pids=pids):
                (group / file).write_text(value)
            if controller == "memory":
                swap = ("memory.swap.max", "0") if place.unified else ("memory.memsw.limit_in_bytes", str(memory))
                with contextlib.suppress(OSError):  # without swap accounting this cannot be limited
                    (group / swap[0]).write_text(swap[1])
    except OSError:
        remove(made)
        raise
    return made


def memory_events(groups: Iterable[Path]) -> Path | None:
    """Return the file that counts the processes killed at a group's memory limit, or None if there is none."""
    files = (group / name for group in groups for name in ("memory.events", "memory.oom_control"))
    return next((file for file in files if file.exists()), None)


def memory_kills(events: Path | None) -> int:
    """Return how many processes the kernel killed because the group was at its memory limit."""
    for line in _lines(events) if events is not None else ():
        word, _, count = line.partition(" ")
        if word == "oom_kill" and count.isdigit():
            return int(count)
    return 0


def processes(groups: Iterable[Path]) -> set[int]:
    return {int(word) for group in groups for word in _words(group / "cgroup.procs")}


def kill(groups: list[Path], wait_s: float = REMOVE_S) -> None:
    """Kill every process of the group. It starts no new ones meanwhile. Raises TimeoutError if some do not end."""
    limits = {group: _words(group / "pids.max") for group in groups}
    for group in groups:
        with contextlib.suppress(OSError):
            (group / "pids.max").write_text("0")
    try:
        until = time.monotonic() + wait_s
        while left := processes(groups):
            for number in (signal.SIGSTOP, signal.SIGKILL):  # stopped first: no shell reports its killed children
                for pid in left:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, number)
            if time.monotonic() > until:
                raise TimeoutError(f"processes {sorted(left)} do not end")
            time.sleep(0.002)
    finally:
        for group, words in limits.items():
            if words:
                with contextlib.suppress(OSError):
                    (group / "pids.max").write_text(words[0])


def remove(groups: Iterable[Path], wait_s: float = REMOVE_S) -> None:
    """Remove a group without processes, and the groups below it. Raises OSError if it stays."""
    until = time.monotonic() + wait_s
    for group in groups:
        while group.is_dir():
            try:
                for path in sorted((p for p in group.rglob("*") if p.is_dir()), reverse=True):
                    path.rmdir()
                group.rmdir()
            except FileNotFoundError:
                break
            except OSError:  # the kernel releases ended processes a little later
                if time.monotonic() > until:
                    raise
                time.sleep(0.002)


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []


def _words(path: Path) -> list[str]:
    return [word for line in _lines(path) for word in line.split()]
