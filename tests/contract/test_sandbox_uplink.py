"""The way out of a public network, in a network namespace of its own that stands for the host's."""

from __future__ import annotations

import random
import socket
import struct
import subprocess
import sys
from pathlib import Path

import pytest
from rollout_worker.sandboxes import packets
from rollout_worker.sandboxes.allowlist import Allowlist
from rollout_worker.sandboxes.packets import Ends
from rollout_worker.sandboxes.uplink import is_closed, own_resolv_conf

HOST = """
# This host has the address 203.0.113.1 and a nameserver there. What a sandbox with the network `public` reaches of it.
import asyncio, os, socket, sys, threading
from pathlib import Path
from rollout_worker.sandboxes import kernel, uplink

if os.geteuid() != 0:
    kernel.unshare(kernel.NEWUSER)
kernel.unshare(kernel.NEWNET)
kernel.raise_interface()
kernel.set_address(b"lo:1", "203.0.113.1", "255.255.255.255")

from rollout_worker.sandboxes.errors import SandboxRefusedError
from rollout_worker.sandboxes.port import Limits, Network, Spec
from rollout_worker.sandboxes.process import open_process

def serve_tcp(listener):
    while True:
        conn, _ = listener.accept()
        threading.Thread(target=answer, args=(conn,), daemon=True).start()

def answer(conn):
    with conn:  # all that comes, back; then how much it was
        size = 0
        while data := conn.recv(1 << 16):
            conn.sendall(data)
            size += len(data)
        conn.sendall(b" %d" % size)

def serve_udp(sock):
    while True:
        data, peer = sock.recvfrom(65535)
        sock.sendto(data.upper(), peer)

for address in (("203.0.113.1", 9000), ("203.0.113.1", 53), ("127.0.0.1", 9000)):
    threading.Thread(target=serve_tcp, args=(socket.create_server(address),), daemon=True).start()
    datagrams = socket.socket(type=socket.SOCK_DGRAM)
    datagrams.bind(address)
    threading.Thread(target=serve_udp, args=(datagrams,), daemon=True).start()

async def main(state):

    uplink.host_resolv_conf = lambda: "search a.test\\nnameserver 203.0.113.1\\n"
    async with open_process(state) as provider:
        try:
            found = await provider.probe()
        except SandboxRefusedError as error:
            print("skip:", error)
            return
        if "public" not in found.networks:
            print("skip:", found.notes)
            return
        for name, listed in (("listed", ("203.0.113.1",)), ("unlisted", ())):
            network = Network("public", listed)
            async with await provider.create(Spec(network=network, limits=Limits(0.5, 512))) as sandbox:
                script = Path(sys.argv[2]).read_bytes()
                finished = await sandbox.exec([sys.executable, "-I", "-S", "-"], stdin=script, timeout_s=60)
                print(name, finished.stdout.text().strip(), finished.stderr.text()[-500:])

asyncio.run(main(Path(sys.argv[1])))
"""

SANDBOX = """
import contextlib, socket, threading

def tcp(address, size=10):
    try:
        with socket.create_connection(address, 20) as s:
            def send():
                with contextlib.suppress(OSError):  # the reader tells
                    s.sendall(b"x" * size)
                    s.shutdown(socket.SHUT_WR)
            sender = threading.Thread(target=send)
            sender.start()
            got = bytearray()
            while data := s.recv(1 << 16):
                got += data
            sender.join()  # before its socket is closed
            return len(got) - size - 1 - len(str(size)) == 0 and got.endswith(b" %d" % size)
    except OSError as error:
        return type(error).__name__ + str(error.errno)

def udp(address, data=b"hello"):
    with socket.socket(type=socket.SOCK_DGRAM) as s:
        s.settimeout(20)
        try:
            s.connect(address)
            s.send(data)
            return s.recv(65535) == data.upper()
        except OSError as error:
            return type(error).__name__ + str(error.errno)

host = "203.0.113.1"
# A long transfer both ways, many at once, a closed port, large datagrams, names.
print(tcp((host, 9000)), tcp((host, 9000), 20_000_000), end=" ")
results = []
threads = [threading.Thread(target=lambda: results.append(tcp((host, 9000), 50_000))) for _ in range(20)]
[t.start() for t in threads], [t.join() for t in threads]
print(sorted(map(str, set(results))), tcp((host, 1)), udp((host, 9000)), udp((host, 9000), b"y" * 60_000), end=" ")
print(udp(("198.18.0.2", 53)), tcp(("198.18.0.2", 53)), tcp(("198.18.0.2", 9000)), tcp(("127.0.0.1", 9000)), end=" ")
print(tcp(("169.254.169.254", 80)), udp(("169.254.169.254", 80)), tcp(("192.0.2.1", 80)))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="sandboxes need Linux")
def test_what_a_public_network_reaches(tmp_path: Path) -> None:
    (tmp_path / "script").write_text(SANDBOX)
    (tmp_path / "host.py").write_text(HOST)
    command = [sys.executable, str(tmp_path / "host.py"), str(tmp_path / "state"), str(tmp_path / "script")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    if done.stdout.startswith("skip:"):
        pytest.skip(done.stdout)
    refused, no_host, no_network = "ConnectionRefusedError111", "OSError113", "OSError101"
    closed = f"{no_host} {no_host}"
    assert done.stdout.splitlines() == [
        f"listed True True ['True'] {refused} True True True True {no_host} {refused} {closed} {no_network} ",
        f"unlisted {closed} ['{no_host}'] {no_host} {closed} True True {no_host} {refused} {closed} {no_network} ",
    ]


def test_the_nameservers_of_a_sandbox() -> None:
    text = "# a comment\nnameserver 127.0.0.53\noptions edns0\nnameserver fe80::1%eth0\nsearch a.test\n"
    own, servers = own_resolv_conf(text)
    assert servers == ["127.0.0.53", "fe80::1%eth0"]
    assert own == ("nameserver 198.18.0.2\nnameserver 198.18.0.3\n# a comment\noptions edns0\nsearch a.test\n")
    assert own_resolv_conf("") == ("nameserver 198.18.0.2\n", ["127.0.0.1"])
    assert len(own_resolv_conf("nameserver 192.0.2.1\n" * 5)[1]) == 3


@pytest.mark.parametrize("address", ["127.0.0.1", "169.254.169.254", "169.254.170.2", "100.100.100.200", "224.0.0.1"])
def test_what_is_closed_unless_it_is_listed(address: str) -> None:
    assert is_closed(address, Allowlist([]))
    assert not is_closed(address, Allowlist([address]))
    assert not is_closed("10.1.2.3", Allowlist([]))


def whole_sum(data: bytes) -> int:
    data += b"\0" * (len(data) % 2)
    total = sum(struct.unpack(f"!{len(data) // 2}H", data))
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    return total


def is_right(packet: bytes) -> bool:
    """Whether the checksums of an IP header and what it carries are right (RFC 1071)."""
    offset = (packet[0] & 15) * 4
    body = packet[offset:]
    pseudo = packet[12:20] + struct.pack("!BBH", 0, packet[9], len(body)) if packet[9] == packets.TCP else b""
    return whole_sum(packet[:offset]) == whole_sum(pseudo + body) == 0xFFFF


def checksum(data: bytes) -> bytes:
    return struct.pack("!H", ~whole_sum(data) & 0xFFFF)


@pytest.mark.parametrize("seed", range(50))
def test_checksums_of_rewritten_packets_are_right(seed: int) -> None:
    rng = random.Random(seed)
    ends, others = (Ends(rng.randbytes(4), rng.randbytes(2), rng.randbytes(4), rng.randbytes(2)) for _ in range(2))
    body = rng.randbytes(rng.randrange(40))
    tcp = ends.source_port + ends.target_port + rng.randbytes(8) + b"\x50\x02" + rng.randbytes(2) + b"\0\0\0\0" + body
    head = struct.pack("!BBHHHBBH", 0x45, 0, 20 + len(tcp), 1, 0, 64, 6, 0) + ends.source + ends.target
    head = head[:10] + checksum(head) + head[12:]
    tcp = tcp[:16] + checksum(head[12:20] + struct.pack("!BBH", 0, 6, len(tcp)) + tcp) + tcp[18:]
    packet = bytearray(head + tcp)
    assert is_right(bytes(packet))
    header = packets.read_header(packet)
    assert header == packets.Header(packets.TCP, ends, 20, True)
    assert is_right(packets.unreachable(packet, 20, packets.NO_PORT))
    packets.rewrite_tcp(packet, 20, others)
    assert is_right(bytes(packet))
    found = packets.read_header(packet)
    assert found is not None
    assert found.ends == others


@pytest.mark.parametrize("seed", range(200))
def test_what_is_no_packet_is_none(seed: int) -> None:
    rng = random.Random(seed)
    data = bytes([rng.choice((0x45, 0x4F, 0x40, 0x60))]) + rng.randbytes(rng.randrange(80))
    header = packets.read_header(data)
    assert header is None or header.offset + 8 <= len(data)


def test_a_datagram() -> None:
    ends = Ends(socket.inet_aton("192.0.2.1"), b"\0\x35", socket.inet_aton("192.0.2.2"), b"\x10\0")
    packet = packets.datagram(ends, b"hello")
    assert whole_sum(packet[:20]) == 0xFFFF
    assert packets.read_header(packet) == packets.Header(packets.UDP, ends, 20, False)
    assert packet[28:] == b"hello"
