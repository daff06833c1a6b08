"""A sandbox's root, made in a mount namespace of its own and gone with it. Standard library only."""

from __future__ import annotations

import errno
import json
import os
import signal
import stat
import time
from pathlib import Path
from typing import Any

from rollout_worker.sandboxes import kernel

_BUILT = 77
"""Exit code of the one command that bubblewrap runs, which shows that the root is complete."""
_LOOK_S = 2.0
_READ_ONLY = ("/proc/bus", "/proc/fs", "/proc/irq", "/proc/sys", "/proc/sysrq-trigger")
_HIDDEN = (
    "/proc/acpi",
    "/proc/asound",
    "/proc/interrupts",
    "/proc/kcore",
    "/proc/keys",
    "/proc/latency_stats",
    "/proc/sched_debug",
    "/proc/scsi",
    "/proc/timer_list",
    "/proc/timer_stats",
)


def of_host(config: dict[str, Any]) -> None:
    """Bind every entry of the host's `/` but /proc into a new root, with private directories. Raises OSError.

    `point` is an empty directory of the host where new roots are mounted, `private` has pairs of a path in the sandbox
    and the directory behind it, `mounts` has (source, target, read-only), `hidden` is a directory of the host to cover.
    """
    root: str = config["point"]
    private: list[tuple[str, str]] = sorted(config["private"])
    kernel.mount("tmpfs", root, "tmpfs", kernel.MS_NOSUID, "mode=755,size=1m")
    own = {target.split("/")[1] for target, _ in private if target.count("/") == 1}
    with os.scandir("/") as entries:
        for entry in entries:
            if entry.name == "proc":
                os.mkdir(f"{root}/proc")
            elif entry.name not in own:
                _bind_entry(entry, f"{root}/{entry.name}")
    hidden: str = config["hidden"]
    if os.path.isdir(root + hidden):
        kernel.mount("tmpfs", root + hidden, "tmpfs", kernel.MS_NOSUID | kernel.MS_NODEV, "mode=755,size=64k")
    for target, source in private:
        os.makedirs(root + target, exist_ok=True)
        kernel.mount(source, root + target, None, kernel.MS_BIND)
    for source, target, read_only in config["mounts"]:
        _make_point(source, root + target)
        bind(source, root + target, read_only=read_only)


def enter(root: str) -> None:
    """Make what `of_host` built the root, once its own /proc is there.

    The host's /proc must be gone then: beside it, anyone in a new user namespace could mount one that nothing covers.
    """
    kernel.pivot_root(root)
    guard_proc()


def _bind_entry(entry: os.DirEntry[str], target: str) -> None:
    """Bind an entry, unless it was removed from the host's root meanwhile."""
    try:
        if entry.is_symlink():
            os.symlink(os.readlink(entry.path), target)
            return
        _make_point(entry.path, target)
        kernel.mount(entry.path, target, None, kernel.MS_BIND | kernel.MS_REC)
    except FileNotFoundError:
        if os.path.lexists(entry.path):
            raise


def _make_point(source: str, target: str) -> None:
    if stat.S_ISDIR(os.stat(source).st_mode):
        os.makedirs(target, exist_ok=True)
    elif not os.path.exists(target):  # an existing one may be another user's
        os.makedirs(os.path.dirname(target), exist_ok=True)
        os.close(os.open(target, os.O_CREAT | os.O_WRONLY | os.O_CLOEXEC, 0o644))


def bind(source: str, target: str, *, read_only: bool) -> None:
    kernel.mount(source, target, None, kernel.MS_BIND | kernel.MS_REC)
    if read_only:
        # A user namespace may not clear the flags of a mount, so they are set again (mount_namespaces(7)).
        kept = os.statvfs(target).f_flag & (kernel.MS_NOSUID | kernel.MS_NODEV | kernel.MS_NOEXEC)
        kernel.mount("none", target, None, kernel.MS_BIND | kernel.MS_REMOUNT | kernel.MS_RDONLY | kept)


def by_bubblewrap(config: dict[str, Any]) -> int:
    """Let bubblewrap make the root, enter it, and return its mount namespace. Raises OSError with bubblewrap's message.

    `overlays` (lowers with the topmost first, upper, work, name, options) are mounted first, because bubblewrap
    supports them only since 0.11. They lie below `point`, a directory that stays, because removing one that is a mount
    point elsewhere would wait for the kernel. bubblewrap is blocked before it runs its command until its mount
    namespace is open here, so no process needs to stay alive in the sandbox to keep it.
    """
    kernel.mount("tmpfs", config["point"], "tmpfs", kernel.MS_NOSUID | kernel.MS_NODEV, "mode=755,size=64k")
    for lowers, upper, work, name, options in config["overlays"]:
        where = f"{config['point']}/{name}"
        os.mkdir(where)
        lower = ":".join(_escape(path) for path in lowers)
        data = f"lowerdir={lower},upperdir={_escape(upper)},workdir={_escape(work)}{options}"
        try:  # it need not survive a crash, so its unmount need not wait for the disk (overlayfs.rst, volatile)
            kernel.mount("overlay", where, "overlay", 0, f"{data},volatile")
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            kernel.mount("overlay", where, "overlay", 0, data)
    held, release = os.pipe()
    told, tell = os.pipe()
    said, say = os.pipe()

    processes = os.open("/proc/self/ns/pid_for_children", os.O_RDONLY | os.O_CLOEXEC)

    # Given the namespace that it is already in, bubblewrap mounts a /proc of that instead of the host's.
    fds = ["--info-fd", str(tell), "--block-fd", str(held), "--pidns", str(processes)]
    argv = [config["program"], *fds, *config["arguments"], "--", "/bin/sh", "-c", f"exit {_BUILT}"]
    for fd in (held, tell, processes):
        os.set_inheritable(fd, True)
    pid = os.posix_spawn(  # a fork of this process would cost three times as much
        argv[0],
        argv,
        {"PATH": "/usr/bin:/bin"},
        file_actions=[(os.POSIX_SPAWN_DUP2, say, 2)],
        setsigdef=[signal.SIGCHLD, signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGPIPE, signal.SIGXFSZ],
    )
    for fd in (held, tell, say, processes):
        os.close(fd)
    info = _read_to_end(told)
    mounts = -1
    if info and "child-pid" in json.loads(info):
        mounts = open_mounts(pid)
        os.write(release, b"x")
    os.close(release)
    words = _read_to_end(said).decode(errors="replace").strip()
    os.close(told)
    os.close(said)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if code != _BUILT or mounts < 0:
        raise OSError(0, f"bubblewrap ended with {code}: {words or 'it said nothing'}")
    kernel.setns(mounts, kernel.NEWNS)
    os.chdir("/")
    guard_proc()
    return mounts


def guard_proc() -> None:
    """Make read-only or hide what in /proc would change or show the whole machine.

    Files of /proc/sys belong to uid 0 and require no capability; bubblewrap leaves them, because it is made for users
    other than root. The lists are those of container engines.
    """
    for name in _READ_ONLY:
        if os.path.exists(name):
            bind(name, name, read_only=True)
    for name in _HIDDEN:
        if os.path.isdir(name):
            kernel.mount("tmpfs", name, "tmpfs", kernel.MS_RDONLY, "size=0")
        elif os.path.exists(name):
            kernel.mount("/dev/null", name, None, kernel.MS_BIND)


def open_mounts(pid: int) -> int:
    """Open the mount namespace of bubblewrap's child that is not ours; return -1 if there is none. The pid that
    bubblewrap reports is no help, because it belongs to the sandbox's pid namespace."""
    own = os.stat("/proc/self/ns/mnt").st_ino
    until = time.monotonic() + _LOOK_S
    while time.monotonic() < until:
        for child in _children(pid):  # empty if the process has ended
            try:
                fd = os.open(f"/proc/{child}/ns/mnt", os.O_RDONLY | os.O_CLOEXEC)
            except (FileNotFoundError, PermissionError):  # it ends: the child that only enters the pid namespace
                continue
            if os.fstat(fd).st_ino != own:
                return fd
            os.close(fd)
        time.sleep(0.0005)  # a list that is read while a child ends may lack its siblings (proc_pid_children(5))
    return -1


def _children(pid: int) -> list[int]:
    try:
        return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except FileNotFoundError:  # CONFIG_PROC_CHILDREN is not set
        parents = {word: Path(f"/proc/{word}/stat").read_text() for word in os.listdir("/proc") if word.isdigit()}
        return [int(word) for word, text in parents.items() if int(text.rpartition(")")[2].split()[1]) == pid]


def _read_to_end(fd: int) -> bytes:
    data = b""
    while piece := os.read(fd, 1 << 16):
        data += piece
    return data


def _escape(path: str) -> str:
    """Escape a path for mount options, where commas separate options and colons separate layers."""
    return path.replace("\\", "\\\\").replace(":", "\\:").replace(",", "\\,")
