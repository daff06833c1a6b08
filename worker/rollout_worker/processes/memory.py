"""Memory limit of a child process: a control group if this daemon may make one, else a resource limit.

A control group counts the memory that the process and all it starts have touched, including files in memory. Above the
limit the kernel kills the largest of them, so an executor with a separate process for the user's code can name the
item.

RLIMIT_DATA applies to each process by itself and counts what it has requested on the heap and in private mappings,
touched or not. An allocation beyond it fails, which Python reports as MemoryError. RLIMIT_AS is not used: it counts
address space, of which CUDA and other allocators reserve far more than they use.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import structlog

from rollout_worker.sandboxes import cgroups

log = structlog.get_logger()

_SIGNS = re.compile(rb"MemoryError|bad_alloc|[Cc]annot allocate memory|[Oo]ut of memory")


def ran_out(last_words: bytes) -> bool:
    """Return whether a process died of its resource limit, by its last output."""
    return _SIGNS.search(last_words) is not None


class MemoryGroups:
    """Control groups for the children of one daemon, below `name`; versions 1 and 2 of the memory controller."""

    def __init__(self, name: str, made: Callable[[Path], None] = lambda _: None, root: Path = Path("/")) -> None:
        """Call `made` with the directory once it exists, so that somebody removes it at the end."""
        self._name = name
        self._made = made
        self._root = root
        self._base: Path | None = None
        self._unified = False
        self._looked = False

    @property
    def base(self) -> Path | None:
        """Directory of the groups, created at first use; None if that is not permitted."""
        if not self._looked:
            self._looked = True
            self._base = self._make_base()
            if self._base is not None:
                self._made(self._base)
            log.debug("memory_limits", by="control group" if self._base else "resource limit", group=str(self._base))
        return self._base

    def _make_base(self) -> Path | None:
        for parent, unified in _candidates(self._root):
            base = parent / self._name
            try:
                if unified:  # each level passes the controller on to the next
                    (parent / "cgroup.subtree_control").write_text("+memory")
                base.mkdir(exist_ok=True)
                if unified:
                    (base / "cgroup.subtree_control").write_text("+memory")
            except OSError:
                with contextlib.suppress(OSError):
                    base.rmdir()
                continue
            self._unified = unified
            return base
        return None

    def make(self, child: int, limit_bytes: int) -> MemoryGroup | None:
        """Return a group for a child with that memory limit and no swap beyond it, or None if that is impossible."""
        if self.base is None:
            return None
        name, place = f"child-{child}", cgroups.Place({"memory": self.base}, self._unified)
        try:
            return MemoryGroup(*cgroups.make(place, name, cpus=0, memory=limit_bytes, pids=0))
        except OSError as error:
            log.warning("memory_group_failed", group=str(self.base / name), error=str(error))
            return None


class MemoryGroup:
    def __init__(self, path: Path) -> None:
        self.path = path

    def add(self, pid: int) -> None:
        """Add a process before it has started anything. Raises ProcessLookupError if it has ended."""
        (self.path / "cgroup.procs").write_text(str(pid))

    def killed(self) -> bool:
        """Return whether the kernel killed one of its processes for lack of memory."""
        return cgroups.memory_kills(cgroups.memory_events([self.path])) > 0

    def remove(self) -> None:
        """Remove the group once nothing runs in it; the guard removes what is left at the end."""
        with contextlib.suppress(OSError):
            self.path.rmdir()


def _candidates(root: Path) -> Iterator[tuple[Path, bool]]:
    """Yield the directories where groups may be made.

    Version 1 may permit one below this process's own group. Version 2 permits one below a group without processes, such
    as the one above a systemd service's DelegateSubgroup.
    """
    mount = root / "sys/fs/cgroup"
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if "memory" in controllers.split(","):
            own = mount / "memory" / path.strip("/")
            yield (own if own.is_dir() else mount / "memory"), False
        elif number == "0" and not controllers:
            for base in (mount, mount / "unified"):
                own = base / path.strip("/")
                for place in dict.fromkeys((own, own.parent)):
                    if place.is_relative_to(base) and "memory" in _words(place / "cgroup.controllers"):
                        yield place, True


def _words(path: Path) -> list[str]:
    try:
        return path.read_text().split()
    except OSError:
        return []
