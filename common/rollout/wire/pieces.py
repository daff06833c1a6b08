"""Messages between gateways and replicas, cut into pieces: what else travels on a stream need not wait for long."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from typing import Generic, TypeVar

from rollout.model.errors import InputError

MESSAGE_MAX = 4 << 20
"""Bytes of one message to a replica, or from one."""
PIECE_MAX = 256 << 10


def pieces(data: bytes) -> Iterator[tuple[bytes, bool]]:
    """(piece, whether there is more). InputError: more than MESSAGE_MAX bytes."""
    if len(data) > MESSAGE_MAX:
        raise InputError(f"A message to or from a replica has at most {MESSAGE_MAX} bytes, this has {len(data)}.")
    for at in range(0, len(data) or 1, PIECE_MAX):
        yield data[at : at + PIECE_MAX], at + PIECE_MAX < len(data)


Source = TypeVar("Source", bound=Hashable)


class Assembly(Generic[Source]):
    """Whole messages again, of each source by itself."""

    def __init__(self) -> None:
        self._parts: dict[Source, bytearray] = {}

    def add(self, source: Source, piece: bytes, more: bool) -> bytes | None:
        """The whole, with its last piece. One that grows above MESSAGE_MAX, which no sender of ours makes, is cut."""
        part = self._parts.get(source)
        if part is None:
            if not more:
                return piece
            part = self._parts[source] = bytearray()
        if len(part) < MESSAGE_MAX:
            part += piece
        return None if more else bytes(self._parts.pop(source))

    def forget(self, source: Source) -> None:
        self._parts.pop(source, None)

    def clear(self) -> None:
        self._parts.clear()
