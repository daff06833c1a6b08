"""Streams a run's items to the leader, across failovers: what is not durable yet is kept and sent again."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable
from typing import Any

import grpc
import grpc.aio

from rollout.client.batches import Batch
from rollout.client.connection import EOF, Connection, Patience, raise_status, unless_replaced
from rollout.model.errors import ProtocolError, RolloutError, UnavailableError
from rollout.telemetry.spans import Spans
from rollout.wire.v1 import runs_pb2 as pb

WINDOW = 24
"""Maximum number of batches that were sent and are not durable."""

Source = Callable[[int], AsyncGenerator[Batch, None]]


class Submission:
    """A submission: call `run` until everything is durable and sealed.

    `source(durable)` yields the batches from the first seq that the ledger lacks; it is called once.
    """

    def __init__(
        self,
        connection: Connection,
        spec: Any,
        source: Source,
        *,
        seal: bool,
        progress: Callable[[int], None] | None,
        opened: Callable[[pb.SubmitDown], None],
        spans: Spans | None = None,
    ) -> None:
        self._connection = connection
        self._spans = spans
        self._log = 0
        self._spec = spec
        self._source = source
        self._seal = seal
        self._progress = progress
        self._opened = opened
        self._window: deque[Batch] = deque()
        self._batches: AsyncGenerator[Batch, None] | None = None
        self._taking: asyncio.Future[Batch | None] | None = None
        self._exhausted = False
        self._count = 0
        self._durable = 0
        self._sealing = False
        self._sealed = False
        self._moved = asyncio.Event()
        self._turn = connection.turn  # that of the channel its stream is on

    async def run(self) -> int:
        """Submit, and return the number of durable items. Raises errors of the source and of the leader, and
        UnavailableError."""
        patience = Patience(self._connection)
        try:
            while True:
                try:
                    await self._stream(patience)
                except grpc.aio.AioRpcError as error:
                    await patience.failed(self._connection.moved_on(error, self._turn))
                except UnavailableError as error:
                    self._connection.leave(self._turn)
                    await patience.failed(error)
                else:
                    return self._durable
        finally:
            if self._batches is not None:
                if self._taking is not None:
                    self._taking.cancel()
                    await asyncio.gather(self._taking, return_exceptions=True)
                await self._batches.aclose()

    async def _stream(self, patience: Patience) -> None:
        stub = await self._connection.stub()
        self._turn = self._connection.turn
        call: Any = stub.Submit()
        try:
            with self._connection.telling():
                await unless_replaced(call.write(pb.SubmitUp(epoch=self._connection.epoch, open=self._spec)))
                reply = await unless_replaced(call.read())
            if reply is EOF:
                await _raise_end(call)
            if self._batches is None:
                self._acknowledged(reply)
            else:
                self._opened_again(reply)
            patience.succeeded()
            self._log = reply.status.root_log
            self._opened(reply)
            if self._batches is None:
                self._batches = self._source(self._durable)
                self._count = self._durable
            if self._sealed:
                return
            await self._exchange(call, patience)
        finally:
            call.cancel()

    async def _exchange(self, call: Any, patience: Patience) -> None:
        reader = asyncio.create_task(self._read(call, patience))
        writer = asyncio.create_task(self._write(call))
        try:
            await asyncio.wait({reader, writer}, return_when=asyncio.FIRST_COMPLETED)
            if writer.done() and isinstance(writer.exception(), RolloutError):
                writer.result()
            # A broken stream shows in both; only the reader knows why.
            await reader
            if not self._finished():
                raise UnavailableError("the coordinator ended the stream before everything was durable")
        finally:
            for task in (reader, writer):
                task.cancel()
            await asyncio.gather(reader, writer, return_exceptions=True)

    def _finished(self) -> bool:
        return self._sealed if self._seal else self._exhausted and not self._window

    async def _read(self, call: Any, patience: Patience) -> None:
        while not self._finished():
            with self._connection.telling(self._owed):
                reply = await unless_replaced(call.read())
            if reply is EOF:
                if self._finished():
                    return
                await _raise_end(call)
            self._acknowledged(reply)
            patience.succeeded()

    def _owed(self) -> bool:
        """Return whether the coordinator has something to acknowledge, rather than this side something to send."""
        return self._sealing or bool(self._window)

    def _opened_again(self, reply: pb.SubmitDown) -> None:
        """Continue after a reconnect. Some of the run's items may be another submitter's: the window is sent again, and
        the coordinator compares it."""
        self._compare(reply)
        if reply.sealed and not self._window:
            self._sealed, self._durable = True, reply.durable

    def _acknowledged(self, reply: pb.SubmitDown) -> None:
        self._compare(reply)
        self._durable = reply.durable
        while self._window and self._window[0].end <= self._durable:
            self._trace(self._window.popleft())
        ours = self._sealing or self._batches is None
        self._sealed = self._sealed or (reply.sealed and ours and not self._window)
        self._moved.set()
        if self._progress is not None:
            self._progress(self._durable)

    def _trace(self, batch: Batch) -> None:
        if self._spans is None or not self._log:
            return
        traces, now_ns = self._spans.of(self._spec.run_id, self._log), time.time_ns()
        for seq in filter(traces.is_sampled, range(batch.first, batch.end)):
            self._spans.add((traces, seq), "submit", 0, batch.sent_ns, now_ns)

    def _compare(self, reply: pb.SubmitDown) -> None:
        self._connection.seen(reply, self._turn)
        if reply.durable < self._durable:
            raise ProtocolError(
                f"run {self._spec.run_id} had {self._durable} durable items and now has {reply.durable}: the ledger "
                "was restored from an older backup; submit it again under a new run id"
            )

    async def _write(self, call: Any) -> None:
        assert self._batches is not None
        for batch in list(self._window):
            await unless_replaced(call.write(pb.SubmitUp(epoch=self._connection.epoch, items=batch.message)))
        while not self._exhausted:
            while len(self._window) >= WINDOW:
                self._moved.clear()
                await self._moved.wait()
            batch = await self._next()
            if batch is None:
                break
            batch.sent_ns = time.time_ns()
            self._window.append(batch)
            self._count = batch.end
            await unless_replaced(call.write(pb.SubmitUp(epoch=self._connection.epoch, items=batch.message)))
        if self._seal:
            self._sealing = True
            await unless_replaced(
                call.write(pb.SubmitUp(epoch=self._connection.epoch, seal=pb.Seal(count=self._count)))
            )
        await unless_replaced(call.done_writing())

    async def _next(self) -> Batch | None:
        assert self._batches is not None
        # Not cancelled with the stream: a batch taken from the source must not be lost.
        if self._taking is None:
            self._taking = asyncio.ensure_future(anext(self._batches, None))
        batch = await asyncio.shield(self._taking)
        self._taking = None
        if batch is None:
            self._exhausted = True
        return batch


async def _raise_end(call: Any) -> None:
    """Raise the error with which the stream ended, or one for ending early."""
    await raise_status(call)
    raise UnavailableError("the coordinator closed the stream")
