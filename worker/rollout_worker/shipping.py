"""Ships output of child processes to the runs it belongs to, bounded in rate and memory, and never in the way of work.

It takes one small call per second and run. What comes faster is dropped on arrival, and a line says how much. While
there is no leader, output waits within the same bound. A worker that leaves first ships everything that waits.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Iterable
from contextlib import suppress
from typing import Any

import grpc
import grpc.aio
import structlog
from rollout.config.logging import redact_text
from rollout.model.errors import RolloutError
from rollout.wire.epoch import EpochGuard
from rollout.wire.v1 import history_pb2 as pb
from rollout.wire.v1 import history_pb2_grpc as rpc

from rollout_worker.attempts import AttemptKey
from rollout_worker.link import Link, told_to_stop, typed

log = structlog.get_logger()

FIRST_S, EVERY_S = 0.1, 1.0
AGAIN_S = 0.1
"""Seconds between attempts of a worker that leaves."""
CALL_S = 5.0
CHUNK_BYTES = 60 << 10  # of a request of at most 64 KiB
WAITING_BYTES = 256 << 10
"""Bytes that may wait on a worker, for all runs together."""
LINE_BYTES = 64  # what a line costs beside its text


class Shipper:
    """Shipper of output: `add` lines at any time; `run` ships them."""

    def __init__(self, link: Link, guard: EpochGuard, incarnation: str) -> None:
        self._link = link
        self._guard = guard
        self._incarnation = incarnation
        self._waiting: dict[str, deque[pb.OutputLine]] = {}
        self._bytes = 0
        self._numbers: dict[str, int] = {}
        self._shipped: dict[str, int] = {}  # lines by run, those that were left out included
        self._unanswered: dict[str, pb.OutputLines] = {}
        """Chunks by run that were shipped without an answer. They are shipped again unchanged, because their number
        identifies those lines."""
        self._turn = asyncio.Lock()
        self._news = asyncio.Event()

    def add(self, run_id: str, executor: str, stream: str, text: str, key: AttemptKey | None) -> None:
        """Add one line; what exceeds the bound is counted instead."""
        queue = self._waiting.setdefault(run_id, deque())
        now = time.time_ns() // 1_000_000
        if self._bytes + len(text) + LINE_BYTES > WAITING_BYTES:
            self._left_out(queue, now, executor, 1, len(text.encode()) + 1)
        else:
            line = pb.OutputLine(at_ms=now, executor=executor, stream=stream, text=_clean(text))
            if key is not None:
                line.log, line.seq, line.attempt = key
            queue.append(line)
            self._bytes += line.ByteSize()
        self._news.set()

    def left_out(self, run_id: str, executor: str, lines: int, size: int) -> None:
        """Count what was dropped before it arrived here."""
        queue = self._waiting.setdefault(run_id, deque())
        self._left_out(queue, time.time_ns() // 1_000_000, executor, lines, size)
        self._news.set()

    @staticmethod
    def _left_out(queue: deque[pb.OutputLine], now: int, executor: str, lines: int, size: int) -> None:
        if not queue or not queue[-1].left_out_bytes:
            queue.append(pb.OutputLine(at_ms=now, executor=executor))
        queue[-1].left_out_lines += lines
        queue[-1].left_out_bytes += size

    async def run(self) -> None:
        while True:
            await self._news.wait()
            self._news.clear()
            await asyncio.sleep(FIRST_S)  # what is printed together travels together
            while self._waiting or self._unanswered:
                await self.ship()
                await asyncio.sleep(EVERY_S)

    async def drain(self, timeout_s: float) -> int:
        """Ship all that waits; return the number of lines that could not be shipped in time."""
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while self._waiting or self._unanswered:
                    if not await self.ship():
                        await asyncio.sleep(AGAIN_S)
        return sum(map(_count, [*self._waiting.values(), *(chunk.lines for chunk in self._unanswered.values())]))

    async def ship(self) -> bool:
        """Ship a chunk of each run, CHUNK_BYTES in all. Returns False if one was not accepted and waits."""
        async with self._turn:
            room = CHUNK_BYTES
            for run_id in dict.fromkeys([*self._unanswered, *self._waiting]):
                chunk = self._unanswered.get(run_id)
                if chunk is None:
                    chunk = self._chunk(run_id, room)
                if not chunk.lines or room <= 0:
                    break
                room -= chunk.ByteSize()
                self._unanswered[run_id] = chunk
                if not await self._ship(run_id, chunk):
                    return False
                del self._unanswered[run_id]
                self._bytes -= sum(line.ByteSize() for line in chunk.lines if not line.left_out_bytes)
                self._numbers[run_id] = chunk.number
                self._shipped[run_id] = chunk.lines_before + _count(chunk.lines)
                if run_id in self._waiting:
                    self._waiting[run_id] = self._waiting.pop(run_id)  # the others first, next time
            return True

    def _chunk(self, run_id: str, room: int) -> pb.OutputLines:
        """Take a chunk's lines out of the queue; what is left out while it is in transit is counted after it."""
        number, before = self._numbers.get(run_id, 0) + 1, self._shipped.get(run_id, 0)
        chunk = pb.OutputLines(number=number, lines_before=before)
        queue = self._waiting[run_id]
        while queue and (room := room - queue[0].ByteSize() - 8) >= 0:
            chunk.lines.append(queue.popleft())
        if not queue:
            del self._waiting[run_id]
        return chunk

    async def _ship(self, run_id: str, chunk: pb.OutputLines) -> bool:
        stub: Any = rpc.HistoryStub(self._link.channel)
        request = pb.ShipRequest(epoch=self._guard.current, incarnation=self._incarnation, run_id=run_id, output=chunk)
        try:
            self._guard.check_peer(await stub.Ship(request, timeout=CALL_S))
        except (grpc.aio.AioRpcError, grpc.aio.UsageError) as error:
            failed = typed(error)
        except RolloutError as error:
            failed = error
        except asyncio.CancelledError:
            if told_to_stop():
                raise
            return False  # the channel was replaced
        else:
            return True
        log.debug("output_not_shipped", run_id=run_id, error=failed.message)
        return not failed.retryable  # else it would never be taken


def _count(lines: Iterable[pb.OutputLine]) -> int:
    return sum(line.left_out_lines if line.left_out_lines or line.left_out_bytes else 1 for line in lines)


def _clean(text: str) -> str:
    """Return the text without secrets and without characters that no message can carry."""
    return redact_text(text).encode("utf-8", "replace").decode()
