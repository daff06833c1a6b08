"""Each check of the client by itself: what it keeps and what it believes."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
from rollout.client import connection
from rollout.client.batches import Batch
from rollout.client.pages import entries_of
from rollout.client.runs import Runs
from rollout.client.submit import Submission
from rollout.model.errors import NotFoundError, ProtocolError, RolloutError, UnavailableError
from rollout.model.item import ObjectSlice
from rollout.wire import silence
from rollout.wire.codec import pack_blobs
from rollout.wire.v1 import common_pb2
from rollout.wire.v1 import runs_pb2 as pb

RUN = "01J00000000000000000000000"


class Connected:
    """A connection that has no patience and takes note of nothing."""

    patience_s = patience_now_s = 0.0
    epoch = 0
    telling = staticmethod(nullcontext[None])

    def __init__(self, stub: Callable[[], Awaitable[Any]] | None) -> None:
        self.stub = stub

    def gave_up(self, error: RolloutError, waited: float) -> RolloutError:
        return error

    def __getattr__(self, name: str) -> Any:
        return lambda *_: None


def submission() -> Submission:
    async def nothing(durable: int) -> AsyncGenerator[Batch, None]:
        return
        yield

    connected: Any = Connected(None)
    spec = pb.RunSpec(run_id=RUN)
    made = Submission(connected, spec, nothing, seal=True, progress=None, opened=lambda reply: None)
    made._window = deque(Batch(first, first + 5, common_pb2.ItemBatch()) for first in (0, 5, 10))
    return made


def test_what_was_not_acknowledged_is_sent_again() -> None:
    one = submission()
    one._acknowledged(pb.SubmitDown(durable=7))
    assert [batch.first for batch in one._window] == [5, 10]


def test_a_ledger_that_lost_acknowledged_items_is_noticed() -> None:
    one = submission()
    one._acknowledged(pb.SubmitDown(durable=10))
    with pytest.raises(ProtocolError, match="older backup"):
        one._acknowledged(pb.SubmitDown(durable=5))


async def test_after_a_reconnect_the_window_is_sent_again_whatever_the_run_has_by_now() -> None:
    """Rows that the run has more than before may be another submitter's."""
    told: list[int] = []
    one = submission()
    one._progress = told.append
    one._batches = one._source(0)
    one._acknowledged(pb.SubmitDown(durable=5))
    one._opened_again(pb.SubmitDown(durable=15, sealed=True))
    assert [batch.first for batch in one._window] == [5, 10] and told == [5] and not one._sealed
    one._sealing = True  # our own seal, whose answer was lost
    one._acknowledged(pb.SubmitDown(durable=10, sealed=True))
    assert not one._finished()
    one._acknowledged(pb.SubmitDown(durable=15, sealed=True))
    assert one._finished() and told == [5, 10, 15]


def client(*messages: pb.WatchDown) -> Runs:
    """One whose coordinator says these things, and that has no patience."""
    said = list(messages)

    async def read() -> Any:
        return said.pop(0)

    async def stub() -> Any:
        return SimpleNamespace(Watch=lambda request: SimpleNamespace(read=read, cancel=lambda: None))

    runs: Any = object.__new__(Runs)
    runs._objects = {}
    runs.objects = lambda run_id: nullcontext(SimpleNamespace(get=None))
    runs._connection = Connected(stub)
    return runs


async def test_a_page_of_another_place_is_refused() -> None:
    with pytest.raises(ProtocolError, match="wanted was 1"):
        async for _ in client(pb.WatchDown(epoch=0, batch=pb.CommitBatch(from_cursor=3))).watch(RUN, 1):
            pass


async def test_an_end_before_the_last_row_is_not_believed() -> None:
    end = pb.WatchDown(epoch=0, status=pb.RunStatus(state="completed", cursor=5))
    with pytest.raises(UnavailableError, match="ended at 2"):
        async for _ in client(end).watch(RUN, 2):
            pass


async def test_columns_of_a_page_agree() -> None:
    batch = pb.CommitBatch(seq=[0, 1], attempt=[1], length=[0, 0], worker_index=[0, 0])

    async def read(object_id: bytes, offset: int, length: int) -> bytes:
        raise AssertionError("nothing to resolve")

    with pytest.raises(ProtocolError, match="columns"):
        await entries_of(batch, read)


async def test_what_was_in_an_object_that_is_gone_is_said() -> None:
    gone = bytes(31) + b"x"
    length, data, refs = pack_blobs([b"1", ObjectSlice(gone, 0, 5), ObjectSlice(gone, 5, 5)])
    same = [1, 1, 1]
    batch = pb.CommitBatch(
        seq=[4, 9, 7], attempt=same, outcome=["OUTCOME_DONE"] * 3, length=length, data=data, refs=refs,
        duration_ms=same, accepted_ms=same, worker_index=[0, 0, 0], workers=["w"],
    )  # fmt: skip

    async def read(object_id: bytes, offset: int, length: int) -> bytes:
        raise NotFoundError(f"no object {object_id.hex()} in s3://b/")

    with pytest.raises(
        NotFoundError, match=r"in s3://b/: 2 rows of the run are in it \(the first is row 8\).*Put it back"
    ):
        await entries_of(batch, read)


async def test_only_an_answer_that_is_owed_is_waited_for_aloud(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(silence, "SILENCE_S", 0.01)
    said: asyncio.Queue[RolloutError | None] = asyncio.Queue()
    credentials: Any = None
    one = connection.Connection(["a:1"], credentials, on_trouble=lambda error, _: said.put_nowait(error))
    sending = submission()
    sending._window.clear()
    asked = asyncio.Event()

    def owed() -> bool:
        asked.set()
        return sending._owed()

    with one.telling(owed):
        await asked.wait()
        assert said.empty()
        sending._sealing = True
        assert "has not answered yet" in str(await said.get())
    while (error := await said.get()) is not None:
        assert "has not answered yet" in str(error)
