"""Results to the output queue: in order, at least once, after the files, and never in their way."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncGenerator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from fake_queue import FakeQueue
from rollout.client import Page
from rollout.client import publish as module
from rollout.client.publish import NAME, Publisher, published
from rollout.model.errors import ConfigError, StorageFullError, UnavailableError
from rollout.model.item import Outcome
from rollout.workloads.commit import CommitEntry

BIG = 7
"""The row whose result is too large for the queue."""


def entry(n: int) -> CommitEntry:
    return CommitEntry(n, n, 1, Outcome.DONE, b"", b"", b"")


def lines(one: CommitEntry) -> Iterator[tuple[str, bytes]]:
    text = "x" * (2 << 20) if one.seq == BIG else "y"
    yield "results.jsonl", json.dumps({"row": one.seq + 1, "result": text}).encode() + b"\n"


class Log:
    """A commit log of `count` entries, then no more; or what it raises."""

    def __init__(self, count: int, error: Exception | None = None) -> None:
        self.count, self.error = count, error

    async def watch(self, run_id: str, cursor: int = 0, *, payloads: bool = False) -> AsyncGenerator[Page, None]:
        for start in range(cursor, self.count, 4):
            yield Page([entry(n) for n in range(start, min(start + 4, self.count))])
        if self.error is not None:
            raise self.error


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not condition():  # noqa: ASYNC110 - what is watched is in another task
            await asyncio.sleep(0.002)


class Scene:
    def __init__(self, directory: Path) -> None:
        self.directory, self.queue, self.told = directory, FakeQueue(), list[str]()

    def publisher(self, log: Log) -> Publisher:
        made = Publisher(self.queue, log, "R", lines, directory=self.directory, where="out/", tell=self.told.append)
        made.start()
        return made

    @property
    def rows(self) -> list[int]:
        return [int(message.attributes["seq"]) for message in self.queue.sent]


async def unsent(publisher: Publisher, count: int, **options: float) -> int:
    await publisher.finish(count, **options)
    return publisher.unsent


@pytest.fixture
def scene(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Scene:
    monkeypatch.setattr(module, "PAUSE_S", (0.01, 0.02))
    return Scene(tmp_path)


async def test_each_result_is_sent_in_order_with_an_id_of_its_own(scene: Scene) -> None:
    publisher = scene.publisher(Log(10))
    assert await unsent(publisher, 10) == 0
    assert scene.rows == list(range(10))
    assert scene.queue.sent[3].deduplication == "R-3" and json.loads(scene.queue.sent[3].body)["row"] == 4
    assert scene.queue.sent[3].attributes == {"run_id": "R", "seq": "3", "file": "results.jsonl"}


async def test_one_that_is_too_large_says_where_it_is(scene: Scene) -> None:
    assert await unsent(scene.publisher(Log(10)), 10) == 0
    said = json.loads(scene.queue.sent[BIG].body)
    assert said == {
        "run_id": "R", "seq": BIG, "too_large": True, "bytes": said["bytes"], "file": "out/results.jsonl",
    }  # fmt: skip
    assert said["bytes"] > 2 << 20


async def test_nothing_is_sent_before_it_is_in_the_files(scene: Scene) -> None:
    publisher = scene.publisher(Log(8))
    publisher.flushed(4)
    await until(lambda: publisher.cursor == 4)
    await asyncio.sleep(0.02)
    assert scene.rows == [0, 1, 2, 3]
    assert await unsent(publisher, 8) == 0


@pytest.mark.parametrize("error", [None, ConfigError("sqs:SendMessage is not allowed")])
async def test_a_queue_that_is_away_is_told_and_caught_up_with(scene: Scene, error: Exception | None) -> None:
    async def refused(*_: Any) -> Any:
        raise error or AssertionError

    there = scene.queue.enqueue
    scene.queue.away = True
    if error is not None:
        scene.queue.enqueue = refused  # type: ignore[method-assign]
    publisher = scene.publisher(Log(10))
    publisher.flushed(10)
    await until(lambda: bool(scene.told))
    await asyncio.sleep(0.1)
    assert len(scene.told) == 1 and "10 of them wait to be sent" in scene.told[0]
    scene.queue.away = False
    scene.queue.enqueue = there  # type: ignore[method-assign]
    assert await unsent(publisher, 10) == 0 and scene.rows == list(range(10))
    assert "takes results again" in scene.told[1]


async def test_the_end_does_not_wait_for_ever(scene: Scene) -> None:
    scene.queue.away = True
    publisher = scene.publisher(Log(10))
    assert await unsent(publisher, 10, budget_s=0.1) == 10
    with pytest.raises(UnavailableError, match="no route to it"):
        publisher.check()
    publisher.job.cancel()
    await asyncio.gather(publisher.job, return_exceptions=True)


async def test_the_next_command_goes_on_behind_what_was_sent(scene: Scene) -> None:
    first = scene.publisher(Log(6))
    assert await unsent(first, 6) == 0
    first.save()
    assert published(scene.directory, "R") == 6 and published(scene.directory, "another") == 0
    assert await unsent(scene.publisher(Log(10)), 10) == 0
    assert scene.rows == list(range(10))


async def test_it_is_saved_by_one_at_a_time(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """At the end a thread may still be at it."""
    publisher = scene.publisher(Log(3))
    assert await unsent(publisher, 3) == 0
    await publisher.job
    publisher.cursor += 1
    busy, go, write = threading.Event(), threading.Event(), module.write_atomically

    def slow(path: Path, data: bytes) -> None:
        assert not busy.is_set()
        busy.set()
        go.wait(20)
        write(path, data)
        busy.clear()

    monkeypatch.setattr(module, "write_atomically", slow)
    saves = [asyncio.ensure_future(asyncio.to_thread(publisher.save)) for _ in range(2)]
    await until(busy.is_set)
    await asyncio.sleep(0.02)
    go.set()
    await asyncio.gather(*saves)
    assert published(scene.directory, "R") == 4


@pytest.mark.parametrize("ordered", [True, False])
async def test_results_are_of_one_group_where_the_queue_keeps_an_order(scene: Scene, ordered: bool) -> None:
    scene.queue = FakeQueue(ordered=ordered)
    assert await unsent(scene.publisher(Log(1)), 1) == 0
    assert scene.queue.sent[0].group == ("R" if ordered else "")


async def test_a_damaged_record_sends_again_rather_than_not_at_all(scene: Scene) -> None:
    (scene.directory / NAME).write_text("{}")
    assert await unsent(scene.publisher(Log(3)), 3) == 0 and scene.rows == [0, 1, 2]


async def test_what_ends_it_is_told_at_the_end(scene: Scene) -> None:
    publisher = scene.publisher(Log(4, StorageFullError("no space left")))
    with pytest.raises(StorageFullError):
        await publisher.finish(8)
