"""A worker's Work stream: what is queued goes out, in order, whenever it was queued."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

from rollout.wire.epoch import EpochGuard
from rollout.wire.frames import frames_of
from rollout.wire.v1 import work_pb2
from rollout_worker.work_stream import WorkStream


class SlowCall:
    """Takes a message when `room` says so."""

    def __init__(self) -> None:
        self.room = asyncio.Semaphore(0)
        self.taken: list[list[int]] = []
        self.ended = False

    async def write(self, message: work_pb2.WorkUp) -> None:
        await self.room.acquire()
        self.taken.append([frame.credit.items for frame in frames_of(message)])

    async def done_writing(self) -> None:
        self.ended = True


async def turns() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_frames_that_come_while_a_message_is_written_go_out_with_the_next() -> None:
    stream = cast(Any, WorkStream(cast(Any, SimpleNamespace()), EpochGuard(), lambda event: None, str))
    stream._session = "S"
    call = SlowCall()
    writing = asyncio.create_task(stream._write(call))
    for number in (1, 2):
        stream.send(work_pb2.WorkUp(credit=work_pb2.Credit(items=number)))
    await turns()  # they are on their way, and nothing else is queued
    for number in (3, 4):
        stream.send(work_pb2.WorkUp(credit=work_pb2.Credit(items=number)))
    await turns()
    call.room.release()
    await turns()
    call.room.release()
    await turns()
    assert call.taken == [[1, 2], [3, 4]]
    stream._closing = True
    stream.send(work_pb2.WorkUp(credit=work_pb2.Credit(items=5)))
    call.room.release()
    await writing
    assert call.taken[2:] == [[5]] and call.ended, "what is queued goes before the end"
