"""Frames between the daemon and its child processes, on a socket pair: length, kind, body (protobuf or JSON)."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Callable
from enum import IntEnum
from typing import cast

_HEAD = struct.Struct("<IB")
FRAME_MAX = 1 << 30


class Kind(IntEnum):
    # daemon to child
    INIT = 1  # JSON {run, scratch, cache, secrets}
    ASSIGN = 2  # AssignGroup
    CANCEL = 3  # AttemptKeys
    CHILDREN = 4  # ChildResults
    RESUME = 5  # Resume
    REPLY = 6  # JSON {id, value | error}
    STOP = 7
    RECALL = 8  # AttemptKeys: give back those that have not begun
    LEAVE = 9  # JSON {budget_s}
    HOLD = 10  # JSON {on}: begin nothing outside, or go on
    # both ways
    RELAY = 11  # to a replica: WorkDown heard or hung_up; from it: WorkUp announce, withdraw or said
    # child to daemon
    READY = 20  # JSON {width}
    FAILED = 21  # JSON {code, message, retryable}
    RESULTS = 22  # ResultGroup
    SPAWN = 23  # Spawn
    WAITING = 24  # Waiting
    PROGRESS = 25  # Progress
    REQUEST = 26  # JSON {id, op, ...}
    RETURNED = 27  # AttemptKeys: of a recall, those that had not begun
    HINDERED = 28  # JSON {log, seq, attempt, code, message, retryable, returned}


class Pipe(asyncio.Protocol):
    """`on_frame(kind, body)` for each frame; `on_lost()` once, when the other side is gone or broke the framing."""

    def __init__(self, on_frame: Callable[[int, bytes], None], on_lost: Callable[[], None]) -> None:
        self._on_frame = on_frame
        self._on_lost = on_lost
        self._buffer = bytearray()
        self._broken = False
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        if self._broken:
            return
        buffer = self._buffer
        buffer += data
        at = 0
        try:
            while len(buffer) - at >= _HEAD.size:
                size, kind = _HEAD.unpack_from(buffer, at)
                if size > FRAME_MAX:
                    self._broken = True
                    at = len(buffer)
                    self.abort()
                    return
                end = at + _HEAD.size + size
                if len(buffer) < end:
                    break
                body = bytes(memoryview(buffer)[at + _HEAD.size : end])
                at = end
                self._on_frame(kind, body)
        finally:
            del buffer[:at]

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self._on_lost()

    def send(self, kind: int, body: bytes) -> None:
        """Never waits; nothing is sent once the other side is gone."""
        if self._transport is not None:
            self._transport.writelines([_HEAD.pack(len(body), kind), body])

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()

    def abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()
