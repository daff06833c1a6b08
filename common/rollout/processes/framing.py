"""Frames between a process and its children: length of the body (u32, little-endian), kind (one byte), body.

This is the blocking end and what both ends share; `pipe` is the end in an event loop. Standard library only.
"""

from __future__ import annotations

import json
import socket
import struct
from collections.abc import Mapping
from typing import Any

HEAD = struct.Struct("<IB")
FRAME_MAX = 1 << 30
MESSAGE = 0
"""Kind of a frame with a JSON object, on a pipe with no other kind."""
_PIECE = 1 << 20


def send(connection: socket.socket, kind: int, *body: bytes) -> None:
    """Send a frame; `body` may come in pieces."""
    connection.sendall(b"".join([HEAD.pack(sum(map(len, body)), kind), *body]))


def send_message(connection: socket.socket, message: Mapping[str, Any]) -> None:
    send(connection, MESSAGE, json.dumps(message).encode())


def receive_message(connection: socket.socket, head: struct.Struct = HEAD) -> dict[str, Any] | None:
    """Return the next message, or None at the end. `head` is the header of another framing, the length first."""
    begin = _exactly(connection, head.size)
    body = None if begin is None else _exactly(connection, head.unpack(begin)[0])
    return None if body is None else json.loads(body)


def _exactly(connection: socket.socket, count: int) -> bytes | None:
    """Return `count` bytes, or None if the stream ends before."""
    data = bytearray()
    while len(data) < count:
        piece = connection.recv(min(count - len(data), _PIECE))
        if not piece:
            return None
        data += piece
    return bytes(data)
