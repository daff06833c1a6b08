"""A replica in this process, and its gateway's side."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any, TypeVar, cast

from rollout.model.item import DEFAULT_SPEC, Key
from rollout.workloads.infer.payload import Payload, encode_payload
from rollout.workloads.serve.frames import (
    EMPTY,
    ChoiceDelta,
    Deltas,
    End,
    Fault,
    FromReplica,
    ToReplica,
    encoded,
    frames_of,
    from_replica,
)
from rollout_worker.executors.infer import InferExecutor
from rollout_worker.executors.port import Attempt, Context, Done, Run

T = TypeVar("T")


class FakeReplica:
    def __init__(self) -> None:
        self.frames_in: asyncio.Queue[tuple[int, bytes | None]] = asyncio.Queue()
        self.heard: list[tuple[int, FromReplica]] = []
        self.beats: list[int] = []
        self.moved = asyncio.Event()
        self.withdrawn = self.closed = False

    async def __aenter__(self) -> FakeReplica:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.closed = True

    async def frames(self) -> AsyncIterator[tuple[int, bytes | None]]:
        while True:
            yield await self.frames_in.get()

    def send(self, channel: int, data: bytes) -> None:
        if data == EMPTY:
            self.beats.append(channel)
        self.heard += [(channel, message) for message in from_replica(data)]
        self.moved.set()

    def withdraw(self) -> None:
        self.withdrawn = True
        self.moved.set()

    # ---- the test's side

    def ask(self, *messages: ToReplica, channel: int = 1) -> None:
        for frame in frames_of(map(encoded, messages)):
            self.frames_in.put_nowait((channel, frame))

    def of(self, number: int, kind: type[T], channel: int = 1) -> list[T]:
        return [one for at, one in self.heard if at == channel and one.id == number and isinstance(one, kind)]

    def deltas(self, number: int) -> list[ChoiceDelta]:
        return [choice for one in self.of(number, Deltas) for choice in one.choices]

    async def until(self, happened: Callable[[], T]) -> T:
        async with asyncio.timeout(20):
            while not (found := happened()):
                self.moved.clear()
                await self.moved.wait()
        return found

    async def end(self, number: int) -> End:
        ended = await self.until(lambda: self.of(number, End) + self.of(number, Fault))
        assert isinstance(ended[0], End), ended
        return ended[0]

    async def fault(self, number: int) -> Fault:
        ended = await self.until(lambda: self.of(number, End) + self.of(number, Fault))
        assert isinstance(ended[0], Fault), ended
        return ended[0]


class FakeContext:
    def __init__(self) -> None:
        self.served = FakeReplica()
        self.figures: dict[str, Any] = {}

    def progress(self, note: str, **figures: float | str | None) -> None:
        self.figures = figures
        self.served.moved.set()

    def hindered(self, message: str, *, code: str = "") -> None: ...

    def replica(self) -> FakeReplica:
        return self.served


class Rig:
    def __init__(self, executor: InferExecutor, config: dict[str, Any]) -> None:
        self.executor = executor
        self.config = config
        self.context = FakeContext()
        self.replica = self.context.served
        run = Run("01J00000000000000000000001", "serve", config, executor="infer")
        attempt = Attempt(Key(1, 0), 1, b"r" * 32, b'{"replica":0}', DEFAULT_SPEC, run)
        self.task = asyncio.create_task(executor.run(attempt, cast(Context, self.context)))

    async def row(self, row: dict[str, Any], sampling: dict[str, Any]) -> Done:
        run = Run("01J00000000000000000000002", "infer", {**self.config, "sampling": sampling})
        payload = encode_payload(Payload(row, 0, "in.jsonl", 1))
        attempt = Attempt(Key(2, 0), 1, b"i" * 32, payload, DEFAULT_SPEC, run)
        return await self.executor.run(attempt, cast(Context, self.context))


@asynccontextmanager
async def serving(model: str = "m", **backend: Any) -> AsyncGenerator[Rig]:
    """An executor of [backend] `backend` (default: mock) with one replica."""
    config: dict[str, Any] = {"model": {"uri": model}, "backend": {"kind": "mock", **backend}, "sampling": {}}
    executor = InferExecutor()
    await executor.start(Run("01J00000000000000000000001", "serve", config), cast(Context, FakeContext()))
    rig = Rig(executor, config)
    try:
        yield rig
    finally:
        rig.task.cancel()
        await asyncio.gather(rig.task, return_exceptions=True)
        await executor.close()
    assert rig.replica.closed
