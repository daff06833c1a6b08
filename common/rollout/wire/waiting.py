"""Connections of a plain HTTP port that have not asked for anything yet, and cost a descriptor each."""

from __future__ import annotations

import asyncio
from collections.abc import Generator
from contextlib import contextmanager

WAITING_MOST = 16
BACKLOG = 16
"""Also how many asyncio accepts in one turn, before any of them can be closed."""


class Waiting:
    """Who comes while `most` wait ends the one that has waited for longest: a probe says at once what it wants."""

    def __init__(self, most: int = WAITING_MOST) -> None:
        self._most = most
        self._writers: dict[asyncio.StreamWriter, None] = {}  # in the order they came

    @contextmanager
    def heard(self, writer: asyncio.StreamWriter) -> Generator[None]:
        """While its request is read."""
        while len(self._writers) >= self._most:
            longest = next(iter(self._writers))
            del self._writers[longest]
            longest.transport.abort()
        self._writers[writer] = None
        try:
            yield
        finally:
            self._writers.pop(writer, None)
