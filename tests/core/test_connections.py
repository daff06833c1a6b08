"""Whom a coordinator shuts out when too many connections say nothing, and what its log says of a flood."""

from __future__ import annotations

import errno
import logging
import socket
from collections.abc import Callable, Iterator

import pytest
from rollout.config.repeats import Repeats
from rollout_coordinator.connections import RESERVED, Door, Doorkeeper, shares


class Listener:
    """Accepted connections of one port, in this process."""

    def __init__(self) -> None:
        self.server = socket.create_server(("127.0.0.1", 0), backlog=128)
        self.port: int = self.server.getsockname()[1]
        self.clients: list[socket.socket] = []
        self.accepted: list[socket.socket] = []

    def connect(self, *, says: bytes = b"") -> socket.socket:
        client = socket.create_connection(("127.0.0.1", self.port))
        self.clients.append(client)
        if says:
            client.sendall(says)
        self.accepted.append(self.server.accept()[0])
        return client

    def open(self) -> list[bool]:
        """Of each client, in the order they came, whether the other side is still there."""
        return [_is_open(client) for client in self.clients]

    def close(self) -> None:
        for one in (self.server, *self.clients, *self.accepted):
            one.close()


def _is_open(client: socket.socket) -> bool:
    client.setblocking(False)
    try:
        return bool(client.recv(1))
    except BlockingIOError:
        return True


@pytest.fixture
def listener() -> Iterator[Listener]:
    found = Listener()
    yield found
    found.close()


class Time:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_who_has_been_silent_for_longest_goes_first(listener: Listener) -> None:
    time = Time()
    keeper = Doorkeeper([Door("listen_addr", listener.port, limit=32)], time)  # 8 of each address
    spoken = [listener.connect(says=b"hello") for _ in range(3)]
    for _ in range(4):
        listener.connect()
    keeper.look()
    assert all(listener.open())
    time.now += 2
    for _ in range(4):
        listener.connect()
    keeper.look()
    assert listener.open() == [True] * 3 + [False] * 3 + [True] * 5, "the oldest silent ones, down to the cap"
    assert all(_is_open(client) for client in spoken)


def test_who_is_known_does_not_count(listener: Listener) -> None:
    time = Time()
    keeper = Doorkeeper([Door("listen_addr", listener.port, limit=32)], time)
    for _ in range(8):
        host, port = listener.connect().getsockname()
        keeper.identified(f"ipv4:{host}:{port}")
    for _ in range(8):
        listener.connect()
    keeper.look()
    assert all(listener.open())
    time.now += 12  # longer than a handshake may take: whoever is still there has made it
    keeper.look()
    for _ in range(8):
        listener.connect()
    time.now += 2
    keeper.look()
    assert all(listener.open())


def test_nobody_is_ever_known_where_hosts_join(listener: Listener) -> None:
    time = Time()
    keeper = Doorkeeper([Door("join_addr", listener.port, limit=16, known_after_s=None)], time)
    for _ in range(4):
        listener.connect()
        keeper.look()
        time.now += 60
    listener.connect()
    keeper.look()
    assert listener.open() == [False, True, True, True, True]


def test_other_ports_are_left_alone(listener: Listener) -> None:
    keeper = Doorkeeper([Door("listen_addr", listener.port + 1, limit=16)], Time())
    for _ in range(9):
        listener.connect()
    keeper.look()
    assert all(listener.open())


@pytest.mark.parametrize("open_files", [256, 1024, 20_000, 1 << 20])
def test_shares_leave_descriptors_for_files(open_files: int) -> None:
    main, join = shares(open_files, join=True)
    assert main + join + RESERVED <= open_files and main > join > 0
    assert shares(open_files, join=False) == (open_files - RESERVED, 0)


@pytest.fixture
def said() -> Iterator[tuple[logging.Logger, list[str], list[Callable[[], None]]]]:
    """A logger, what came out, and what is due a minute later."""
    lines: list[str] = []
    later: list[Callable[[], None]] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage() + (" TRACEBACK" if record.exc_info else ""))
    handler.addFilter(Repeats(later=lambda seconds, work: later.append(work)))
    logger = logging.getLogger("test.repeats")
    logger.propagate = False
    logger.addHandler(handler)
    yield logger, lines, later
    logger.removeHandler(handler)


def test_the_same_error_is_shown_once_and_counted(
    said: tuple[logging.Logger, list[str], list[Callable[[], None]]],
) -> None:
    logger, lines, later = said
    for number in range(813):
        logger.error("cannot accept from %d", number)
    logger.error("something else")
    assert lines == ["cannot accept from 0", "something else"]
    for work in later[:]:
        work()
    assert lines[2:] == ["cannot accept from %d ... and 812 more in the last minute"]
    logger.error("cannot accept from %d", 5)
    assert lines[3:] == ["cannot accept from 5"], "a minute later it is told again"


def test_no_descriptor_left_is_a_sentence(said: tuple[logging.Logger, list[str], list[Callable[[], None]]]) -> None:
    logger, lines, _ = said
    for _ in range(3):
        try:
            raise OSError(errno.EMFILE, "Too many open files")
        except OSError:
            logger.exception("socket.accept() out of system resource")
    (line,) = lines
    assert "Too many open files" in line and "ulimit -n" in line and "TRACEBACK" not in line
