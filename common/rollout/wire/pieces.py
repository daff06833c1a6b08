"""Messages between gateways and replicas, cut into pieces so that other traffic of the stream need not wait long."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from typing import Generic, TypeVar

from rollout.model.errors import InputError

MESSAGE_MAX = 4 << 20
"""Maximum bytes of one message to or from a replica."""
PIECE_MAX = 256 << 10


def pieces(data: bytes) -> Iterator[tuple[bytes, bool]]:
    """Yield (piece, whether there is more). Raises InputError above MESSAGE_MAX bytes."""
    if len(data) > MESSAGE_MAX:
        raise InputError(f"A message to or from a replica has at most {MESSAGE_MAX} bytes, this has {len(data)}.")
    for at in range(0, len(data) or 1, PIECE_MAX):
        yield data[at : at + PIECE_MAX], at + PIECE_MAX < len(data)


Source = TypeVar("Source", bound=Hashable)


class Assembly(Generic[Source]):
    """Assembles whole messages, separately for each source."""

    def __init__(self) -> None:
        self._parts: dict[Source, bytearray] = {}

    def add(self, source: Source, piece: bytes, more: bool) -> bytes | None:
        """Return the whole message with its last piece. One above MESSAGE_MAX, which no sender of ours makes, is
        cut."""
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
