"""The egress of a sandbox whose network is `public`: it needs no other program, no privilege and no rule on the host.

    command --> TUN device of the sandbox --> uplink --> sockets of this host

A sandbox has a network namespace of its own, and in it a TUN device that receives everything but loopback traffic. The
uplink, a process of the host, reads the packets. It does not implement TCP: at the first packet of a connection it
connects to the same target from the host; once that has succeeded, it rewrites the packets of the connection so that
they arrive at a listening socket of the sandbox's own kernel, and the answers so that they come from the target. Then
it relays between the accepted socket and the host's. Each UDP flow has a socket of the host. If a target does not
answer, refuses or is forbidden, the sandbox gets what a network would send.

A sandbox can reach what this host reaches over IPv4, except this host itself and the credential services of clouds
(`is_closed`). Its nameservers are those of this host.

Standard library only, because a sandbox_init forks it.
"""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import json
import os
import resource
import select
import signal
import socket
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn

from rollout_worker.sandboxes import kernel, packets
from rollout_worker.sandboxes.allowlist import Allowlist, is_own
from rollout_worker.sandboxes.packets import Ends, Header

RESOLV_CONF = Path("/etc/resolv.conf")
# From the benchmarking block (RFC 2544, RFC 6890), which has nothing that a sandbox needs.
ADDRESS, _NETMASK = "198.18.0.1", "255.255.255.248"
NAMESERVERS = ("198.18.0.2", "198.18.0.3", "198.18.0.4")
_PEER = socket.inet_aton("198.18.0.6")  # apparent source of connections to the listening socket
_ADDRESS = socket.inet_aton(ADDRESS)
_DEVICE = b"tun0"
_MTU = 65535  # so that there are no fragments, and few packets
_NOBODY = 65534

_CLOSED = tuple(
    ipaddress.ip_network(block)
    for block in (
        "0.0.0.0/8",
        "127.0.0.0/8",
        "169.254.0.0/16",  # link-local: AWS, Google, Azure, Oracle and others give out credentials there
        "100.100.100.200/32",  # Alibaba
        "168.63.129.16/32",  # Azure
        "198.18.0.0/29",
        "224.0.0.0/3",  # multicast, reserved, broadcast
    )
)

_CONNECTIONS, _FLOWS = 16384, 1024
_CHUNK = 1 << 18
_DATAGRAMS = 64  # of one flow before the others' turn
_LOOK_S = 5.0
_UDP_IDLE_S, _QUERY_IDLE_S = 120.0, 20.0
_LINGER_S = 30.0  # after both ends are closed: packets of the last handshake
_ACCEPT_S = 30.0

_IN, _OUT = select.EPOLLIN, select.EPOLLOUT


def is_closed(address: str, listed: Allowlist) -> bool:
    """Return whether a sandbox must not reach it. Listed addresses are allowed."""
    parsed = ipaddress.IPv4Address(address)
    if listed.allows_address(parsed):
        return False
    return any(parsed in block for block in _CLOSED) or is_own(parsed)


def host_resolv_conf() -> str:
    """Return the text of this host's resolv.conf(5), or "" if it has none."""
    try:
        return RESOLV_CONF.read_text(errors="replace")
    except FileNotFoundError:
        return ""


def own_resolv_conf(text: str) -> tuple[str, list[str]]:
    """Convert this host's resolv.conf(5) to (resolv.conf of a sandbox, this host's nameservers behind it)."""
    kept = list[str]()
    servers = list[str]()
    for line in text.splitlines():
        words = line.split()
        if len(words) > 1 and words[0] == "nameserver":
            servers.append(words[1])
        else:
            kept.append(line)
    servers = servers[: len(NAMESERVERS)] or ["127.0.0.1"]
    own = [f"nameserver {address}" for address, _ in zip(NAMESERVERS, servers, strict=False)]
    return "\n".join([*own, *kept, ""]), servers


def attach(nodes: str) -> tuple[int, socket.socket]:
    """Make the device and the listening socket in this network namespace, which has no other. Raises OSError."""
    device = kernel.make_tun(_DEVICE, _MTU, nodes)
    kernel.set_address(_DEVICE, ADDRESS, _NETMASK)
    kernel.raise_interface(_DEVICE)
    kernel.add_default_route(_DEVICE)
    return device, socket.create_server((ADDRESS, 0), backlog=1024)


def run() -> NoReturn:
    """Run as a program, with the arguments FD NAMESERVERS LISTED, the last two as JSON."""
    fd, nameservers, listed = sys.argv[1:4]
    main(socket.socket(fileno=int(fd)), json.loads(nameservers), json.loads(listed))


def main(sock: socket.socket, nameservers: Sequence[str], listed: Sequence[str]) -> NoReturn:
    """Serve the device and listening socket that the parent sends, if it makes them; end with it."""
    os.closerange(0, sock.fileno())
    os.closerange(sock.fileno() + 1, 1 << 16)
    parent = os.getppid()
    if os.geteuid() == 0:
        os.setgroups([])
        os.setresgid(_NOBODY, _NOBODY, _NOBODY)
        os.setresuid(_NOBODY, _NOBODY, _NOBODY)
    kernel.hide_from_tracers()
    kernel.die_with_parent(signal.SIGKILL)
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    _, fds, _, _ = socket.recv_fds(sock, 1, 2)
    if len(fds) == 2 and os.getppid() == parent:
        made = Uplink(fds[0], socket.socket(fileno=fds[1]), nameservers, Allowlist(listed))
        made.watch(sock.fileno(), _IN, lambda _: os._exit(0))
        made.serve()
    os._exit(0)


@dataclass(slots=True)
class _Flow:
    """A UDP flow, or a TCP connection from its first packet. `port` is its source port at the listening socket."""

    ends: Ends
    outside: socket.socket
    used: float
    first: bytes = b""
    port: int = 0
    accepted: bool = False
    closed: bool = False


class Uplink:
    def __init__(self, device: int, listener: socket.socket, nameservers: Sequence[str], listed: Allowlist) -> None:
        self._device = device
        self._listener = listener
        self._listener.setblocking(False)
        self._listening: bytes = listener.getsockname()[1].to_bytes(2, "big")
        self._nameservers = dict(zip(NAMESERVERS, nameservers, strict=False))
        self._listed = listed
        self._epoll = select.epoll()
        self._handlers: dict[int, Callable[[int], None]] = {}
        self._interest: dict[int, int] = {}
        self._tcp: dict[Ends, _Flow] = {}
        self._by_port: dict[int, _Flow] = {}
        self._next_port = 1
        self._udp: dict[Ends, _Flow] = {}
        self._buffer = bytearray(_MTU + 1)

    def serve(self) -> NoReturn:
        self.watch(self._device, _IN, self._read_device)
        self.watch(self._listener.fileno(), _IN, self._accept)
        looked = time.monotonic()
        while True:
            for fd, events in self._epoll.poll(_LOOK_S):
                handler = self._handlers.get(fd)
                if handler is not None and self._interest.get(fd):  # an earlier one of this round may have closed it
                    handler(events)
            if time.monotonic() - looked > _LOOK_S:
                looked = time.monotonic()
                self._forget_idle(looked)

    def watch(self, fd: int, interest: int, handler: Callable[[int], None]) -> None:
        """Call the handler for these events. An interest of 0 means no call at all, not even for errors."""
        had = self._interest.get(fd, 0)
        self._handlers[fd] = handler
        self._interest[fd] = interest
        if had and interest:
            if had != interest:
                self._epoll.modify(fd, interest)
        elif interest:
            self._epoll.register(fd, interest)
        elif had:
            self._epoll.unregister(fd)

    def close(self, sock: socket.socket) -> None:
        fd = sock.fileno()
        if fd >= 0:
            if self._interest.pop(fd, 0):
                self._epoll.unregister(fd)
            self._handlers.pop(fd, None)
            sock.close()

    # Packets of the sandbox

    def _read_device(self, _: int) -> None:
        for _ in range(_DATAGRAMS):
            try:
                size = os.readv(self._device, [self._buffer])
            except BlockingIOError:
                return
            with memoryview(self._buffer)[:size] as packet:
                header = packets.read_header(packet)
                if header is None:
                    continue
                if header.protocol == packets.TCP:
                    self._take_tcp(packet, header)
                else:
                    self._take_udp(packet, header)

    def _write_device(self, packet: bytes | memoryview) -> None:
        with contextlib.suppress(OSError):  # its queue is full: like a network that drops a packet
            os.write(self._device, packet)

    def _take_tcp(self, packet: memoryview, header: Header) -> None:
        ends = header.ends
        if ends.target == _PEER and ends.source_port == self._listening:
            flow = self._by_port.get(int.from_bytes(ends.target_port, "big"))
            if flow is not None:
                out = flow.ends
                back = Ends(out.target, out.target_port, out.source, out.source_port)
                packets.rewrite_tcp(packet, header.offset, back)
                self._write_device(packet)
            return
        flow = self._tcp.get(ends)
        if header.is_syn and (flow is None or flow.closed):
            if flow is not None:
                self._drop(flow)
            self._open_tcp(packet, header)
        elif flow is not None and flow.port:
            self._forward(packet, header.offset, flow)

    def _forward(self, packet: memoryview, offset: int, flow: _Flow) -> None:
        port = flow.port.to_bytes(2, "big")
        packets.rewrite_tcp(packet, offset, Ends(_PEER, port, _ADDRESS, self._listening))
        self._write_device(packet)

    def _target(self, header: Header) -> tuple[str, int] | None:
        """Return where to connect to from this host, or None if it must not be reached."""
        address = socket.inet_ntoa(header.ends.target)
        port = int.from_bytes(header.ends.target_port, "big")
        if address in self._nameservers and port == 53:
            return self._nameservers[address], port
        return None if port == 0 or is_closed(address, self._listed) else (address, port)

    def _connect(self, packet: memoryview, header: Header, kind: socket.SocketKind) -> socket.socket | None:
        """Connect a socket of this host to the packet's target. If that fails, send the sandbox the reason and return
        None."""
        target = self._target(header)
        if target is None:
            self._write_device(packets.unreachable(packet, header.offset, packets.PROHIBITED))
            return None
        outside = None
        try:
            outside = socket.socket(socket.AF_INET6 if ":" in target[0] else socket.AF_INET, kind)
            outside.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                outside.connect(target)
        except OSError as error:  # no route, no more descriptors
            if outside is not None:
                outside.close()
            self._write_device(packets.unreachable(packet, header.offset, _code(error.errno)))
            return None
        return outside

    # TCP

    def _open_tcp(self, packet: memoryview, header: Header) -> None:
        if len(self._tcp) >= _CONNECTIONS:
            return  # like a congested network: the sandbox retries
        outside = self._connect(packet, header, socket.SOCK_STREAM)
        if outside is not None:
            flow = _Flow(header.ends, outside, time.monotonic(), bytes(packet))
            self._tcp[header.ends] = flow
            self.watch(outside.fileno(), _OUT, lambda _: self._connected(flow))

    def _connected(self, flow: _Flow) -> None:
        number = flow.outside.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        packet = memoryview(bytearray(flow.first))
        offset = (packet[0] & 15) * 4
        if number:
            self._drop(flow)
            self._write_device(packets.unreachable(packet, offset, _code(number)))
            return
        self.watch(flow.outside.fileno(), 0, lambda _: None)
        flow.outside.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        while self._next_port in self._by_port:
            self._next_port = self._next_port % 65535 + 1
        flow.port, flow.first, flow.used = self._next_port, b"", time.monotonic()
        self._next_port = self._next_port % 65535 + 1
        self._by_port[flow.port] = flow
        self._forward(packet, offset, flow)

    def _accept(self, _: int) -> None:
        with contextlib.suppress(BlockingIOError, ConnectionAbortedError):
            while True:
                inside, (address, port) = self._listener.accept()
                flow = self._by_port.get(port)
                if address != socket.inet_ntoa(_PEER) or flow is None or flow.accepted or flow.closed:
                    inside.close()
                    continue
                flow.accepted = True
                inside.setblocking(False)
                inside.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                _Relay(self, flow, inside).begin()

    def close_flow(self, flow: _Flow) -> None:
        """Close its sockets; its packets are still rewritten for a while."""
        flow.closed, flow.used = True, time.monotonic()
        self.close(flow.outside)

    def _drop(self, flow: _Flow) -> None:
        self.close(flow.outside)
        flow.closed = True
        self._by_port.pop(flow.port, None)
        if self._tcp.get(flow.ends) is flow:
            del self._tcp[flow.ends]

    # UDP

    def _take_udp(self, packet: memoryview, header: Header) -> None:
        flow = self._udp.get(header.ends)
        if flow is None:
            if len(self._udp) >= _FLOWS:
                self._drop_udp(min(self._udp.values(), key=lambda other: other.used))
            outside = self._connect(packet, header, socket.SOCK_DGRAM)
            if outside is None:
                return
            flow = self._udp[header.ends] = _Flow(header.ends, outside, 0.0)
            opened = flow
            self.watch(outside.fileno(), _IN, lambda _: self._receive(opened))
        flow.used = time.monotonic()
        try:
            flow.outside.send(packet[header.offset + 8 :])
        except ConnectionRefusedError:
            self._write_device(packets.unreachable(packet, header.offset, packets.NO_PORT))
        except OSError:  # like a network that drops a packet
            pass

    def _receive(self, flow: _Flow) -> None:
        ends = Ends(flow.ends.target, flow.ends.target_port, flow.ends.source, flow.ends.source_port)
        flow.used = time.monotonic()
        for _ in range(_DATAGRAMS):
            try:
                self._write_device(packets.datagram(ends, flow.outside.recv(_MTU)))
            except OSError:  # no more data; or a refusal, reported at the next datagram
                return

    def _drop_udp(self, flow: _Flow) -> None:
        self.close(flow.outside)
        self._udp.pop(flow.ends, None)

    def _forget_idle(self, now: float) -> None:
        for flow in list(self._udp.values()):
            idle_s = _QUERY_IDLE_S if flow.ends.target_port == b"\0\x35" else _UDP_IDLE_S
            if now - flow.used > idle_s:
                self._drop_udp(flow)
        for flow in list(self._tcp.values()):
            waits = flow.port and not flow.accepted
            if (flow.closed and now - flow.used > _LINGER_S) or (waits and now - flow.used > _ACCEPT_S):
                self._drop(flow)


@dataclass(slots=True)
class _Way:
    """One direction of a connection."""

    source: socket.socket
    target: socket.socket
    waiting: memoryview = field(default_factory=lambda: memoryview(b""))
    ended: bool = False  # the source has sent everything


class _Relay:
    """Relays one TCP connection in both directions until both have ended."""

    def __init__(self, uplink: Uplink, flow: _Flow, inside: socket.socket) -> None:
        self._uplink = uplink
        self._flow = flow
        self._inside = inside
        self._ways = (_Way(inside, flow.outside), _Way(flow.outside, inside))

    def begin(self) -> None:
        self._update()

    def _update(self) -> None:
        out, back = self._ways
        if out.ended and back.ended and not out.waiting and not back.waiting:
            self._close()
            return
        for sock, reads, writes in ((out.source, out, back), (back.source, back, out)):
            interest = (_IN if not reads.ended and not reads.waiting else 0) | (_OUT if writes.waiting else 0)
            self._uplink.watch(sock.fileno(), interest, lambda events, sock=sock: self._move(sock, events))

    def _move(self, sock: socket.socket, events: int) -> None:
        try:
            for way in self._ways:
                if way.target is sock and way.waiting:
                    self._send(way)
                if way.source is sock and not way.waiting and not way.ended and events & ~_OUT:
                    self._receive(way)
        except OSError:  # reset: reset the other end, too
            for end in (self._inside, self._flow.outside):
                with contextlib.suppress(OSError):
                    end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
            self._close()
            return
        self._update()

    def _receive(self, way: _Way) -> None:
        try:
            data = way.source.recv(_CHUNK)
        except BlockingIOError:
            return
        if data:
            way.waiting = memoryview(data)
            self._send(way)
        else:
            way.ended = True
            way.target.shutdown(socket.SHUT_WR)

    def _send(self, way: _Way) -> None:
        with contextlib.suppress(BlockingIOError):
            way.waiting = way.waiting[way.target.send(way.waiting) :]

    def _close(self) -> None:
        self._uplink.close(self._inside)
        self._uplink.close_flow(self._flow)


def _code(number: int | None) -> int:
    """Return the code of "destination unreachable" for a connection error of this host."""
    if number == errno.ECONNREFUSED:
        return packets.NO_PORT
    return packets.NO_NETWORK if number == errno.ENETUNREACH else packets.NO_HOST
