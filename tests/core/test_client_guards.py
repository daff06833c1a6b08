"""Each check of the client by itself: what it keeps, what it believes, in which order it writes."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rollout.client.batches import Batch
from rollout.client.pages import entries_of
from rollout.client.runs import Runs
from rollout.client.submit import Submission
from rollout.model.errors import ProtocolError, RolloutError, UnavailableError
from rollout.wire.v1 import common_pb2
from rollout.wire.v1 import runs_pb2 as pb
from rollout.workloads.output import OutputDirectory
from test_infer_collect import OTHER, RUN, config, entry, lines, opened


def collect(directory: Path, run: str = RUN, upto: int = 3) -> int:
    """The cursor that it began with."""
    with OutputDirectory.open(directory) as out:
        collector = opened(out, run, config(directory))
        start = collector.cursor
        collector.add(entry(n) for n in range(start, upto))
        collector.flush()
        collector.close()
    return start


def test_the_cursor_is_recorded_after_the_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []
    sync, replace = os.fsync, Path.replace

    def synced(fd: int) -> None:
        done.append(Path(f"/dev/fd/{fd}").resolve().name)
        sync(fd)

    def replaced(self: Path, target: Path) -> Path:
        done.append(f"-> {Path(target).name}")
        return replace(self, target)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(Path, "replace", replaced)
    collect(tmp_path)
    assert "completions.jsonl" in done[: done.index("-> .collect.json")]


def test_an_edited_file_of_the_same_length_is_written_anew(tmp_path: Path) -> None:
    collect(tmp_path)
    path = tmp_path / "completions.jsonl"
    path.write_bytes(path.read_bytes().replace(b"p2", b"p9"))
    assert collect(tmp_path) == 0
    assert [line["prompt"] for line in lines(path)] == ["p0", "p1", "p2"]


def test_the_record_of_another_run_counts_for_nothing(tmp_path: Path) -> None:
    collect(tmp_path)
    assert collect(tmp_path, OTHER) == 0


class Connected:
    """A connection that has no patience and takes note of nothing."""

    patience_s = 0.0
    epoch = 0

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

    connection: Any = Connected(None)
    spec = pb.RunSpec(run_id=RUN)
    made = Submission(connection, spec, nothing, seal=True, progress=None, opened=lambda reply: None)
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
