"""Frames between a process and its children: length of the body (u32, little-endian), kind (a byte), body.

The blocking end, and what both ends share; `pipe` has the end in an event loop. Standard library only.
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
"""The kind of a frame whose body is a JSON object, on a pipe that has no other."""
_PIECE = 1 << 20


def send(connection: socket.socket, kind: int, *body: bytes) -> None:
    """`body`: in pieces, as it is at hand."""
    connection.sendall(b"".join([HEAD.pack(sum(map(len, body)), kind), *body]))


def send_message(connection: socket.socket, message: Mapping[str, Any]) -> None:
    send(connection, MESSAGE, json.dumps(message).encode())


def receive_message(connection: socket.socket, head: struct.Struct = HEAD) -> dict[str, Any] | None:
    """The next message; None at the end. `head`: of another framing, the length first."""
    begin = _exactly(connection, head.size)
    body = None if begin is None else _exactly(connection, head.unpack(begin)[0])
    return None if body is None else json.loads(body)


def _exactly(connection: socket.socket, count: int) -> bytes | None:
    """So many bytes, or None where the stream ends before."""
    data = bytearray()
    while len(data) < count:
        piece = connection.recv(min(count - len(data), _PIECE))
        if not piece:
            return None
        data += piece
    return bytes(data)
