"""System calls that Python lacks, by ctypes. Linux and standard library only; they raise OSError as `os` does.

Constants are the kernel's: include/uapi/linux/{sched,mount,prctl,capability,if,if_tun,route,sockios}.h.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import socket
import stat
import struct
from collections.abc import Iterable
from pathlib import Path

NEWNS, NEWUTS, NEWIPC, NEWUSER, NEWPID, NEWNET = 0x20000, 0x4000000, 0x8000000, 0x10000000, 0x20000000, 0x40000000

MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_REMOUNT = 1, 2, 4, 8, 32
MS_BIND, MS_REC, MS_PRIVATE = 4096, 16384, 1 << 18
MNT_DETACH = 2

_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_CAPBSET_DROP, _PR_SET_CHILD_SUBREAPER, _PR_SET_NO_NEW_PRIVS = 1, 4, 24, 36, 38
_PR_SET_SECCOMP = 22
_LOAD, _EQUAL, _AT_LEAST, _ABOVE, _AND, _RETURN = 0x20, 0x15, 0x35, 0x25, 0x54, 0x06  # opcodes of a packet filter
# add_key, request_key, keyctl: (architecture of the call, number of the first), by machine; linux/audit.h, unistd.h
_KEY_CALLS = {
    "x86_64": ((0xC000003E, 248), (0x40000003, 286)),
    "aarch64": ((0xC00000B7, 217), (0x40000028, 309)),
    "riscv64": ((0xC00000F3, 217),),
}
_SIOCGIFFLAGS, _SIOCSIFFLAGS, _IFF_UP = 0x8913, 0x8914, 1
_SIOCADDRT, _SIOCSIFADDR, _SIOCSIFNETMASK, _SIOCSIFMTU, _RTF_UP = 0x890B, 0x8916, 0x891C, 0x8922, 1
_TUNSETIFF, _IFF_TUN, _IFF_NO_PI, _TUN_DEVICE = 0x400454CA, 1, 0x1000, os.makedev(10, 200)

# chown, dac_override, fowner, fsetid, kill, setgid, setuid, setpcap, net_bind_service, sys_chroot, audit_write,
# setfcap: what container engines leave to root, without mknod and raw sockets.
CONTAINER_CAPABILITIES = frozenset({0, 1, 3, 4, 5, 6, 7, 8, 10, 18, 29, 31})

_libc = ctypes.CDLL(None, use_errno=True)


def _checked(result: int, what: str) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), what)


def _prctl(option: int, value: int) -> int:
    unused = ctypes.c_ulong(0)
    return int(_libc.prctl(option, ctypes.c_ulong(value), unused, unused, unused))


def unshare(flags: int) -> None:
    _checked(_libc.unshare(flags), "unshare")


def setns(fd: int, kind: int) -> None:
    _checked(_libc.setns(fd, kind), "setns")


def mount(source: str, target: str, kind: str | None = None, flags: int = 0, data: str | None = None) -> None:
    result = _libc.mount(
        os.fsencode(source),
        os.fsencode(target),
        kind.encode() if kind else None,
        ctypes.c_ulong(flags),
        data.encode(errors="surrogateescape") if data else None,
    )
    _checked(result, f"mount {target}")


def unmount(target: str) -> None:
    """Unmount lazily: a busy mount goes away once it is no longer used."""
    _checked(_libc.umount2(os.fsencode(target), MNT_DETACH), f"unmount {target}")


def pivot_root(root: str) -> None:
    """Make the mount point `root` the root of this mount namespace and unmount the old one (pivot_root(2), NOTES)."""
    os.chdir(root)
    _checked(_libc.pivot_root(b".", b"."), f"pivot_root {root}")
    unmount(".")
    os.chdir("/")


def die_with_parent(signal_number: int) -> None:
    """Send this process a signal when the thread that made it ends. A change of user clears this."""
    _checked(_prctl(_PR_SET_PDEATHSIG, signal_number), "PR_SET_PDEATHSIG")


def adopt_orphans() -> None:
    """Make descendants whose parent ends children of this process."""
    _checked(_prctl(_PR_SET_CHILD_SUBREAPER, 1), "PR_SET_CHILD_SUBREAPER")


def hide_from_tracers() -> None:
    """Forbid this user's processes to trace this one or read its /proc files, until it runs another program."""
    _checked(_prctl(_PR_SET_DUMPABLE, 0), "PR_SET_DUMPABLE")


def no_new_privileges() -> None:
    _checked(_prctl(_PR_SET_NO_NEW_PRIVS, 1), "PR_SET_NO_NEW_PRIVS")


def forbid_keys() -> None:
    """Refuse system calls for keys (keyrings(7)) to programs run by this process: EPERM, as in containers.

    Root's keyring is shared by all in a user namespace, whatever their other namespaces. Call `no_new_privileges`
    first.
    """
    program = b""
    for architecture, first in _KEY_CALLS.get(os.uname().machine, ()):
        for code, jump_if, jump_else, value in (
            (_LOAD, 0, 0, 4),  # the architecture, then the number of the call (seccomp(2), struct seccomp_data)
            (_EQUAL, 0, 5, architecture),
            (_LOAD, 0, 0, 0),
            (_AND, 0, 0, ~0x40000000 & 0xFFFFFFFF),  # the x32 calls are those of x86_64
            (_AT_LEAST, 0, 2, first),
            (_ABOVE, 1, 0, first + 2),
            (_RETURN, 0, 0, 0x00050000 | errno.EPERM),
        ):
            program += struct.pack("=HBBI", code, jump_if, jump_else, value)
    if not program:
        return
    program += struct.pack("=HBBI", _RETURN, 0, 0, 0x7FFF0000)
    buffer = ctypes.create_string_buffer(program, len(program))
    header = ctypes.create_string_buffer(struct.pack("@HP", len(program) // 8, ctypes.addressof(buffer)))
    unused = ctypes.c_ulong(0)
    result = _libc.prctl(_PR_SET_SECCOMP, ctypes.c_ulong(2), ctypes.byref(header), unused, unused)
    _checked(int(result), "PR_SET_SECCOMP")


def keep_capabilities(kept: Iterable[int]) -> None:
    """Limit the capabilities that programs run by this process may have (capabilities(7), bounding set)."""
    kept = frozenset(kept)
    for number in range(64):
        if number not in kept and _prctl(_PR_CAPBSET_DROP, number) != 0:
            if ctypes.get_errno() == 22:  # EINVAL: this kernel has no more
                return
            _checked(-1, "PR_CAPBSET_DROP")


def raise_interface(name: bytes = b"lo") -> None:
    """Bring up an interface of this network namespace."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        request = struct.pack("16sh22x", name, 0)
        (flags,) = struct.unpack_from("h", fcntl.ioctl(probe, _SIOCGIFFLAGS, request), 16)
        fcntl.ioctl(probe, _SIOCSIFFLAGS, struct.pack("16sh22x", name, flags | _IFF_UP))


def set_address(name: bytes, address: str, netmask: str) -> None:
    """Set the IPv4 address of an interface in this network namespace."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for option, value in ((_SIOCSIFADDR, address), (_SIOCSIFNETMASK, netmask)):
            fcntl.ioctl(probe, option, struct.pack("16s", name) + _socket_address(value) + bytes(8))


def add_default_route(name: bytes) -> None:
    """Send what has no other IPv4 route to an interface of this network namespace."""
    device = ctypes.create_string_buffer(name)
    everywhere = _socket_address("0.0.0.0")
    route = struct.pack(
        "@L16s16s16sHhLPhPLLH",
        0, everywhere, everywhere, everywhere, _RTF_UP, 0, 0, 0, 0, ctypes.addressof(device), 0, 0, 0,
    )  # fmt: skip
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        fcntl.ioctl(probe, _SIOCADDRT, route)


def _socket_address(address: str) -> bytes:
    return struct.pack("=HH4s8x", socket.AF_INET, 0, socket.inet_aton(address))


def make_tun(name: bytes, mtu: int, nodes: str) -> int:
    """Make a TUN device in this network namespace, which exists as long as the returned descriptor is open.

    `nodes` is a directory where root may make the device file if /dev has none.
    """
    path = Path("/dev/net/tun")
    if is_made := not path.exists() and os.geteuid() == 0:
        path = Path(nodes, "tun")
        os.mknod(path, stat.S_IFCHR | 0o600, _TUN_DEVICE)
    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        fcntl.ioctl(fd, _TUNSETIFF, struct.pack("16sH22x", name, _IFF_TUN | _IFF_NO_PI))
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            fcntl.ioctl(probe, _SIOCSIFMTU, struct.pack("16si20x", name, mtu))
    except BaseException:
        os.close(fd)
        raise
    finally:
        if is_made:
            path.unlink()
    return fd
