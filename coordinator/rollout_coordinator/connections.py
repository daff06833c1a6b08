"""Limits the descriptors that connections take, and the connections that have not identified themselves.

gRPC accepts connections itself. It closes those whose handshake takes longer than `HANDSHAKE_MS`, and refuses those
above `max_allowed_incoming_connections`, so the process always has descriptors left for its files. But it does not
distinguish callers: silent connections in large numbers could keep everyone out for as long as a handshake may take,
again and again. Therefore the sockets are inspected from outside, and the excess is shut down.
"""

from __future__ import annotations

import asyncio
import os
import socket
import stat
import struct
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import structlog
from rollout.wire.channel import HANDSHAKE_MS

log = structlog.get_logger()

RESERVED = 128
"""Descriptors reserved for the database, objects, logs, pipes of children, and probes of the http port."""
LEAST = 16
JOIN_MOST = 256
JOIN_IDLE_MS = 10_000
JOIN_AGE_MS = 30_000

LOOK_S = 0.25
LOOK_CLOSELY_S = 1.0
SUDDEN = 16
"""This many new descriptors since the last look trigger an inspection."""
TELL_S = 60.0
_BYTES_RECEIVED = 128  # offset in Linux' struct tcp_info
DESCRIPTORS = "/proc/self/fd" if Path("/proc/self/fd").is_dir() else "/dev/fd"


def shares(open_files: int, *, join: bool) -> tuple[int, int]:
    """Return the maximum connections of the main port and of the join port, for a process with that limit."""
    joining = min(JOIN_MOST, max(LEAST, open_files // 8)) if join else 0
    return max(LEAST, open_files - RESERVED - joining), joining


def at_most(connections: int) -> list[tuple[str, int | str]]:
    """Return the server option that closes further connections as soon as they are accepted."""
    return [("grpc.max_allowed_incoming_connections", connections)]


JOIN_OPTIONS: list[tuple[str, int | str]] = [
    ("grpc.max_connection_idle_ms", JOIN_IDLE_MS),
    ("grpc.max_connection_age_ms", JOIN_AGE_MS),
    ("grpc.max_connection_age_grace_ms", JOIN_IDLE_MS),
]
"""Callers of the join port are unknown, so their connections are short."""


@dataclass(frozen=True, slots=True)
class Door:
    """A port. A caller connected for longer than `known_after_s` has identified itself; None means never."""

    key: str
    port: int
    limit: int
    known_after_s: float | None = HANDSHAKE_MS / 1000 + 1

    @property
    def each(self) -> int:
        """Maximum unidentified connections of an address."""
        return max(4, self.limit // 4)

    @property
    def all(self) -> int:
        return max(8, self.limit // 2)


@dataclass(slots=True)
class _Connection:
    inode: int
    door: Door | None
    peer: tuple[str, int] = ("", 0)
    since: float = 0.0


class Doorkeeper:
    """Inspects this process's sockets, and shuts down those above a cap that have been silent for longest."""

    def __init__(self, doors: list[Door], clock: Callable[[], float]) -> None:
        self._doors = {door.port: door for door in doors if door.port}
        self._clock = clock
        self._known: dict[int, _Connection] = {}
        self._count = 0
        self._looked = float("-inf")
        self._identified: tuple[set[str], set[str]] = (set(), set())
        self._turned = float("-inf")
        self._closed: Counter[tuple[str, str]] = Counter()
        self._told = float("-inf")

    def identified(self, peer: str) -> None:
        """Note that a call of this peer (`ipv4:10.0.0.1:4711`) had one of our certificates."""
        self._identified[0].add(peer)

    async def run(self) -> None:
        """Inspect until cancelled."""
        while True:
            await asyncio.sleep(LOOK_S)
            self.look()

    def look(self) -> None:
        """Count descriptors and, if there are many new ones or a second has passed, inspect the sockets."""
        now = self._clock()
        if now - self._turned > HANDSHAKE_MS / 1000 + 1:
            self._identified, self._turned = (set(), self._identified[0]), now
        try:
            descriptors = os.listdir(DESCRIPTORS)  # noqa: PTH208 - names alone, four times a second
        except OSError:
            return  # none is left to read the directory with: gRPC's own limit has a reserve, the next round sees it
        sudden = len(descriptors) - self._count >= SUDDEN
        self._count = len(descriptors)
        if sudden or now - self._looked >= LOOK_CLOSELY_S:
            self._looked = now
            self._examine(descriptors, now)
        if self._closed and now - self._told >= TELL_S:
            self._told = now
            self._tell()

    def _examine(self, descriptors: list[str], now: float) -> None:
        known: dict[int, _Connection] = {}
        strangers: dict[Door, list[tuple[int, _Connection]]] = {door: [] for door in self._doors.values()}
        for descriptor in map(int, descriptors):
            try:
                status = os.fstat(descriptor)
            except OSError:
                continue  # closed meanwhile
            found = self._known.get(descriptor)
            if found is None or found.inode != status.st_ino:
                found = self._newcomer(descriptor, status, now)
            known[descriptor] = found
            if found.door is not None and not self._is_known(found, now):
                strangers[found.door].append((descriptor, found))
        self._known = known
        for door, present in strangers.items():
            for descriptor, connection in excess(door, present):
                self._shut(descriptor, connection)

    def _newcomer(self, descriptor: int, status: os.stat_result, now: float) -> _Connection:
        nothing = _Connection(status.st_ino, None)
        if not stat.S_ISSOCK(status.st_mode):
            return nothing
        try:
            with socket.socket(fileno=os.dup(descriptor)) as copy:
                if copy.family not in (socket.AF_INET, socket.AF_INET6):
                    return nothing
                peer = copy.getpeername()  # fails where it listens
                door = self._doors.get(copy.getsockname()[1])
        except OSError:
            return nothing
        return _Connection(status.st_ino, door, (peer[0].removeprefix("::ffff:"), peer[1]), now)

    def _is_known(self, connection: _Connection, now: float) -> bool:
        assert connection.door is not None
        known_after = connection.door.known_after_s
        if known_after is None:
            return False
        if now - connection.since > known_after:
            return True
        host, port = connection.peer
        name = f"ipv6:%5B{host}%5D:{port}" if ":" in host else f"ipv4:{host}:{port}"
        return any(name in identified for identified in self._identified)

    def _shut(self, descriptor: int, connection: _Connection) -> None:
        # The copy pins the socket: gRPC may close its own meanwhile, and another may get the number.
        with suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as copy:
            if os.fstat(copy.fileno()).st_ino == connection.inode:
                copy.shutdown(socket.SHUT_RDWR)
                assert connection.door is not None
                self._closed[connection.door.key, connection.peer[0]] += 1

    def _tell(self) -> None:
        closed, self._closed = self._closed, Counter()
        (key, address), _ = closed.most_common(1)[0]
        log.warning(
            "connections_closed",
            port=key,
            count=closed.total(),
            most_from=address,
            reason="too many were open at once that had not identified themselves; the oldest silent ones were closed",
            action="if they are not yours, keep their address out with a firewall; this line comes once a minute",
        )


def excess(door: Door, strangers: list[tuple[int, _Connection]]) -> list[tuple[int, _Connection]]:
    """Return the connections to shut: those above the cap of their address, then above that of all, the longest silent
    first."""
    if len(strangers) <= door.each:
        return []  # nobody can be above a cap
    ordered = sorted(strangers, key=lambda one: (_has_spoken(one[0]), one[1].since, one[0]))
    of_address = Counter(one.peer[0] for _, one in ordered)
    shut: list[tuple[int, _Connection]] = []
    kept: list[tuple[int, _Connection]] = []
    for descriptor, one in ordered:
        if of_address[one.peer[0]] > door.each:
            of_address[one.peer[0]] -= 1
            shut.append((descriptor, one))
        else:
            kept.append((descriptor, one))
    return shut + kept[: max(0, len(kept) - door.all)]


def _has_spoken(descriptor: int) -> bool:
    """Return whether it has sent anything; False if the system does not say."""
    if not hasattr(socket, "TCP_INFO"):
        return False
    try:
        with socket.socket(fileno=os.dup(descriptor)) as copy:
            info = copy.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _BYTES_RECEIVED + 8)
    except OSError:
        return False
    return len(info) >= _BYTES_RECEIVED + 8 and struct.unpack_from("=Q", info, _BYTES_RECEIVED)[0] > 0
