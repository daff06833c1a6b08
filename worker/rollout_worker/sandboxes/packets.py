"""IPv4 packets as a TUN device carries them: parsing, rewriting and building. Standard library only.

Ports and addresses are bytes as they are in the packet. No packet here is a fragment: the device's MTU is the largest.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

TCP, UDP, ICMP = 6, 17, 1
NO_NETWORK, NO_HOST, NO_PORT, PROHIBITED = 0, 1, 3, 13
"""Codes of "destination unreachable" (RFC 792, RFC 1812 5.2.7.1)."""
_SYN, _ACK = 0x02, 0x10


class Ends(NamedTuple):
    """Source and destination of a packet."""

    source: bytes
    source_port: bytes
    target: bytes
    target_port: bytes


class Header(NamedTuple):
    protocol: int
    ends: Ends
    offset: int  # where the transport header begins
    is_syn: bool  # the first packet of a TCP connection


def read_header(packet: bytes | bytearray | memoryview) -> Header | None:
    """Return the header, or None if it is not an IPv4 packet with complete TCP or UDP ports."""
    if len(packet) < 28 or packet[0] >> 4 != 4:
        return None
    offset = (packet[0] & 15) * 4
    protocol = packet[9]
    if offset < 20 or len(packet) < offset + (20 if protocol == TCP else 8) or protocol not in (TCP, UDP):
        return None
    ports = bytes(packet[offset : offset + 4])
    ends = Ends(bytes(packet[12:16]), ports[:2], bytes(packet[16:20]), ports[2:])
    return Header(protocol, ends, offset, protocol == TCP and packet[offset + 13] & (_SYN | _ACK) == _SYN)


def rewrite_tcp(packet: bytearray | memoryview, offset: int, ends: Ends) -> None:
    """Replace the packet's ends in place. Checksums are adjusted, not computed (RFC 1624)."""
    addresses = ends.source + ends.target
    ports = ends.source_port + ends.target_port
    old_addresses, old_ports = bytes(packet[12:20]), bytes(packet[offset : offset + 4])
    moved = _sum(addresses) - _sum(old_addresses)
    _adjust(packet, 10, moved)
    _adjust(packet, offset + 16, moved + _sum(ports) - _sum(old_ports))
    packet[12:20] = addresses
    packet[offset : offset + 4] = ports


def datagram(ends: Ends, payload: bytes) -> bytes:
    """Return a UDP packet, which over IPv4 needs no checksum (RFC 768)."""
    return _packet(UDP, ends, ends.source_port + ends.target_port + struct.pack("!HH", 8 + len(payload), 0) + payload)


def unreachable(packet: bytes | bytearray | memoryview, offset: int, code: int) -> bytes:
    """Return the ICMP "destination unreachable" for a packet (RFC 792), in the name of its target."""
    body = struct.pack("!BBHI", 3, code, 0, 0) + bytes(packet[: offset + 8])
    body = body[:2] + struct.pack("!H", ~_fold(_sum(body)) & 0xFFFF) + body[4:]
    there, here = bytes(packet[16:20]), bytes(packet[12:16])
    return _packet(ICMP, Ends(there, b"", here, b""), body)


def _packet(protocol: int, ends: Ends, body: bytes) -> bytes:
    head = struct.pack("!BBHHHBBH", 0x45, 0, 20 + len(body), 0, 0, 64, protocol, 0) + ends.source + ends.target
    return head[:10] + struct.pack("!H", ~_fold(_sum(head)) & 0xFFFF) + head[12:] + body


def _sum(data: bytes) -> int:
    return sum(struct.unpack(f"!{len(data) // 2}H", data[: len(data) & ~1])) + (data[-1] << 8 if len(data) & 1 else 0)


def _fold(total: int) -> int:
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    return total


def _adjust(packet: bytearray | memoryview, at: int, by: int) -> None:
    checksum = packet[at] << 8 | packet[at + 1]
    changed = ~(((~checksum & 0xFFFF) + by) % 0xFFFF) & 0xFFFF
    packet[at : at + 2] = changed.to_bytes(2, "big")
