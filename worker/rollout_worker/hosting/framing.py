"""Frames between host and plugin: a big-endian u32 length, then UTF-8 JSON.

Request: `{"id": N, "method": STR, "payload": JSON}`. Reply: `{"id": N, "payload": JSON}` or
`{"id": N, "error": {"code": STR, "message": STR}}`. Bytes stand in `payload_b64` instead of `payload`.
"""

from __future__ import annotations

import base64
import json
import socket
import struct
from typing import Any

from rollout.processes.framing import receive_message

HEADER = struct.Struct(">I")


def with_payload(frame: dict[str, Any], payload: Any) -> dict[str, Any]:
    if isinstance(payload, bytes | bytearray):
        frame["payload_b64"] = base64.b64encode(payload).decode()
    else:
        frame["payload"] = payload
    return frame


def payload_of(frame: dict[str, Any]) -> Any:
    """Return the payload of a frame. Raises ValueError if neither form is present."""
    if "payload_b64" in frame:
        return base64.b64decode(frame["payload_b64"], validate=True)
    if "payload" not in frame:
        raise ValueError("neither payload, payload_b64 nor error")
    return frame["payload"]


def encode(frame: dict[str, Any]) -> bytes:
    """Encode a frame. Raises ValueError or TypeError if it is not JSON (NaN, a set, an object)."""
    body = json.dumps(frame, allow_nan=False, separators=(",", ":")).encode()
    return HEADER.pack(len(body)) + body


def refusal(number: int, code: str, message: str) -> bytes:
    """Return a reply with an error."""
    return encode({"id": number, "error": {"code": code, "message": message}})


def receive(connection: socket.socket) -> dict[str, Any] | None:
    """Return the next frame, blocking, or None at the end."""
    return receive_message(connection, HEADER)


class Refused(Exception):
    """Reply with an error code."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code
