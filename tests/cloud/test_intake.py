"""An intake: what is taken once, what is deleted when, and what is left for others."""

from __future__ import annotations

import asyncio
import json
import sqlite3
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
from fake_queue import FakeQueue, FakeRun
from rollout.client import intake as module
from rollout.client.intake import Intake
from rollout.client.intake_index import NAME, Taken, body_of, item_id, key_of
from rollout.model.errors import ConfigError, ConflictError, InputError, StorageFullError, UnavailableError
from rollout.model.item import NewItem
from rollout.queues.port import Message
from rollout.workloads.input_lines import Line, json_of
from rollout.workloads.invalid import invalid_of


def make(line: Line) -> NewItem:
    json_of(line)
    return NewItem(b"what", line.raw)


class Scene:
    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.queue = FakeQueue()
        self.run = FakeRun()
        self.told: list[str] = []

    def intake(self, **options: Any) -> Intake:
        given = {"skip": True, "lease_s": 30.0, "stop_when_empty_s": 0.0}
        return Intake(
            self.queue, self.run, "R", make, **(given | options), directory=self.directory, tell=self.told.append
        )

    async def drained(self, intake: Intake, when: Callable[[], bool]) -> int:
        job = asyncio.ensure_future(intake.run(self.run.submit))
        await until(lambda: when() or job.done())
        intake.drain()
        return await job


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not condition():  # noqa: ASYNC110 - what is watched is in other tasks and threads
            await asyncio.sleep(0.002)


@pytest.fixture
def scene(tmp_path: Path) -> Scene:
    return Scene(tmp_path)


@pytest.fixture(autouse=True)
def short_polls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "POLL_S", 0.05)
    monkeypatch.setattr(module, "AWAY_S", (0.01, 0.02))


def bodies(count: int) -> list[bytes]:
    return [b'{"n":%d}' % n for n in range(count)]


async def test_rows_come_in_order_and_each_is_deleted_when_it_is_in_the_ledger(scene: Scene) -> None:
    scene.queue.put(*bodies(300))
    intake = scene.intake()

    def when() -> bool:
        intake.observe(final=len(scene.run.ids), running=4, per_s=10, active=True)
        return len(scene.queue.deleted) == 300

    assert await scene.drained(intake, when) == 300
    assert scene.run.payloads == bodies(300)
    assert scene.queue.deleted == [f"m{n + 1}" for n in range(300)]
    assert scene.run.sealed and not scene.queue.leased and intake.state == "ended"


async def test_nothing_is_deleted_before_it_is_durable(scene: Scene) -> None:
    scene.run.hold.clear()
    scene.queue.put(*bodies(3))
    job = asyncio.ensure_future(scene.intake().run(scene.run.submit))
    await until(lambda: len(scene.queue.leased) == 3)
    await asyncio.sleep(0.05)
    assert scene.queue.deleted == []
    scene.run.hold.set()
    await until(lambda: len(scene.queue.deleted) == 3)
    job.cancel()
    await asyncio.gather(job, return_exceptions=True)


async def test_a_message_that_comes_again_is_no_second_row_and_is_deleted_again(scene: Scene) -> None:
    scene.queue.put(b'{"n":1}', id="a")
    scene.queue.put(b'{"n":1}', id="b")  # the same body: another row
    intake = scene.intake()
    job = asyncio.ensure_future(intake.run(scene.run.submit))
    await until(lambda: len(scene.queue.deleted) == 2)
    scene.queue.put(b'{"n":1}', id="a")
    await until(lambda: scene.queue.deleted == ["a", "b", "a"])
    intake.drain()
    assert await job == 2


async def test_one_that_comes_again_while_it_is_being_submitted_is_deleted_with_it(scene: Scene) -> None:
    scene.run.hold.clear()
    intake = scene.intake()
    scene.queue.put(b'{"n":1}', b'{"n":1}', id="a")
    job = asyncio.ensure_future(intake.run(scene.run.submit))
    await until(lambda: len(scene.queue.leased) == 2)
    scene.queue.put(b'{"n":1}', id="a")
    await until(lambda: len(scene.queue.leased) == 3)
    asked = scene.queue.asked
    await until(lambda: scene.queue.asked > asked)  # it asks for more once it knows what it has
    scene.run.hold.set()
    await until(lambda: bool(scene.queue.deleted))
    assert scene.queue.deleted == ["a"] and "r3" not in scene.queue.leased  # the delivery that holds the lease
    intake.drain()
    assert await job == 1


@pytest.mark.parametrize("together", [True, False])
async def test_an_id_that_comes_with_another_body_is_told_and_becomes_a_bad_row_once(
    scene: Scene, together: bool
) -> None:
    scene.queue.put(b'{"n":1}', id="a")
    intake = scene.intake()
    job = asyncio.ensure_future(intake.run(scene.run.submit))
    if not together:
        await until(lambda: len(scene.queue.deleted) == 1)
    scene.queue.put(b'{"n":2}', id="a")
    await until(lambda: len(scene.queue.deleted) == 2)
    scene.queue.put(b'{"n":2}', b'{"n":1}', id="a")
    await until(lambda: len(scene.queue.deleted) == 4)
    intake.drain()
    assert await job == 2
    bad = invalid_of(scene.run.payloads[1])
    assert bad is not None and "with another body" in bad.fault and bad.input == {"n": 2}
    assert any("message a came before, with another body" in text for text in scene.told)


POISON = [b"", b"   ", b"no JSON", b"AAECAwQ=", b"\xff\xfe", b'{"a":1}{"b":2}', b'{"n":NaN}']


async def test_poison_is_a_bad_row_and_stops_nothing(scene: Scene) -> None:
    scene.queue.put(*POISON, b'\xef\xbb\xbf {"n":7}\n')
    intake = scene.intake()
    assert await scene.drained(intake, lambda: len(scene.queue.deleted) == 8) == 8
    found = [invalid_of(payload) for payload in scene.run.payloads]
    assert [bad is not None for bad in found] == [True] * 7 + [False]
    assert found[0] is not None and found[0].fault == "it is empty" and found[0].file == "message m1"
    assert scene.run.payloads[7] == b'{"n":7}'


async def test_where_bad_rows_are_errors_the_first_one_ends_the_intake_and_is_given_back(scene: Scene) -> None:
    scene.queue.put(b'{"n":1}', b"no JSON", b'{"n":3}')
    with pytest.raises(InputError, match=r'message m2: .*on_bad_row = "skip"'):
        await scene.intake(skip=False).run(scene.run.submit)
    assert [message.id for message in scene.queue.waiting] == ["m2", "m3"]
    assert scene.queue.deleted == ["m1"] and not scene.run.sealed


async def test_a_drain_gives_back_what_was_received_ahead(scene: Scene) -> None:
    scene.run.hold.clear()
    scene.queue.put(*bodies(40))
    intake = scene.intake()
    job = asyncio.ensure_future(intake.run(scene.run.submit))
    await until(lambda: len(scene.queue.leased) == 40)
    intake.drain()
    await until(lambda: len(scene.queue.waiting) > 30)
    scene.run.hold.set()
    taken = await job
    assert taken + len(scene.queue.waiting) == 40 and len(scene.queue.deleted) == taken
    assert [message.body for message in scene.queue.waiting] == bodies(40)[taken:]


async def test_it_ends_by_itself_when_nothing_comes(scene: Scene) -> None:
    scene.queue.put(*bodies(5))
    async with asyncio.timeout(20):
        assert await scene.intake(stop_when_empty_s=0.1).run(scene.run.submit) == 5
    assert scene.run.sealed and "for 0.1 s" in scene.told[-1]


async def test_an_outage_is_no_empty_queue(scene: Scene) -> None:
    """Also of a service that knows no depth, and whose receive calls say nothing of it."""
    scene.queue.blind = True
    scene.queue.put(*bodies(1))
    intake = scene.intake(stop_when_empty_s=0.1)
    job = asyncio.ensure_future(intake.run(scene.run.submit))
    await until(lambda: len(scene.queue.deleted) == 1)
    scene.queue.away = True
    await until(lambda: intake.state == "away")
    await asyncio.sleep(0.3)
    assert not job.done() and not any("can be reached again" in text for text in scene.told)
    scene.queue.away = False
    scene.queue.put(b'{"n":1}')
    assert await job == 2


async def test_what_the_cluster_does_not_want_stays_in_the_queue(scene: Scene) -> None:
    scene.queue.put(*bodies(1000))
    intake = scene.intake()
    job = asyncio.ensure_future(intake.run(scene.run.submit))
    await until(lambda: len(scene.run.ids) == module.WINDOW_MIN)
    await asyncio.sleep(0.1)
    assert len(scene.queue.waiting) == 1000 - module.WINDOW_MIN
    intake.observe(final=0, running=100, per_s=0, active=True)
    await until(lambda: len(scene.run.ids) == 200)
    intake.observe(final=200, running=0, per_s=0, active=False)  # paused
    await asyncio.sleep(0.1)
    assert len(scene.run.ids) == 200
    intake.drain()
    assert await job == 200


async def test_no_more_is_held_than_the_queue_lets_anybody_hold(scene: Scene) -> None:
    scene.queue = FakeQueue(max_in_flight=7)
    scene.run.hold.clear()
    scene.queue.put(*bodies(50))
    intake = scene.intake()
    job = asyncio.ensure_future(intake.run(scene.run.submit))
    await until(lambda: len(scene.queue.leased) == 7)
    await asyncio.sleep(0.05)
    assert len(scene.queue.leased) == 7
    scene.run.hold.set()
    await until(lambda: len(scene.queue.deleted) == 50)
    intake.drain()
    assert await job == 50


async def test_a_queue_that_is_away_is_told_once_and_waited_for(scene: Scene) -> None:
    scene.queue.away = True
    intake = scene.intake()
    job = asyncio.ensure_future(intake.run(scene.run.submit))
    await until(lambda: intake.state == "away")
    await asyncio.sleep(0.1)
    scene.queue.away = False
    scene.queue.put(*bodies(2))
    await until(lambda: len(scene.queue.deleted) == 2)
    intake.drain()
    assert await job == 2
    assert ["reached again" in text for text in scene.told] == [False, True]


async def test_a_run_stays_open_while_what_it_took_cannot_be_deleted(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "DELETE_S", 0.2)
    scene.run.hold.clear()
    scene.queue.put(*bodies(3))
    intake = scene.intake()
    job = asyncio.ensure_future(intake.run(scene.run.submit))
    await until(lambda: scene.run.taken > 0)
    scene.queue.away = True
    intake.drain()
    scene.run.hold.set()
    with pytest.raises(UnavailableError):
        await job
    assert not scene.run.sealed


async def test_a_deletion_under_way_is_waited_for(scene: Scene) -> None:
    """Also one that is tried again: the run is not sealed before it is known."""
    trying, answered, ack = asyncio.Event(), asyncio.Event(), scene.queue.ack
    tries = 0

    async def slow(messages: list[Message]) -> list[Message]:
        nonlocal tries
        tries += 1
        if tries == 1:
            raise UnavailableError("no route to it")
        trying.set()
        await answered.wait()
        return await ack(messages)

    scene.queue.ack = slow  # type: ignore[method-assign]
    scene.queue.put(*bodies(1))
    intake = scene.intake()
    job = asyncio.ensure_future(intake.run(scene.run.submit))
    await trying.wait()
    intake.drain()
    await until(lambda: intake.state == "draining")
    await asyncio.sleep(0.5)
    assert not job.done() and not scene.run.sealed
    answered.set()
    assert await job == 1 and scene.queue.deleted == ["m1"]


async def test_what_could_not_be_deleted_when_it_ended_is_told(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "GIVE_BACK_S", 0.1)
    scene.run.hold.clear()
    scene.queue.put(*bodies(1))
    intake = scene.intake()
    job = asyncio.ensure_future(intake.run(scene.run.submit))
    await until(lambda: bool(scene.queue.leased))
    scene.queue.away = True
    scene.run.hold.set()
    await until(lambda: bool(intake._deleting))
    job.cancel()
    await asyncio.gather(job, return_exceptions=True)
    assert "1 messages are in the ledger, and could not be deleted" in scene.told[-1]


async def test_a_late_row_of_a_killed_command_is_neither_doubled_nor_an_error(scene: Scene) -> None:
    scene.queue.put(*bodies(3))
    body = b'{"n":0}'
    scene.run.late = NewItem(item_id(key_of("m1"), body_of(body), b"what"), body)
    await scene.drained(scene.intake(), lambda: len(scene.queue.deleted) == 3)
    assert scene.run.payloads == bodies(3) and scene.run.sealed
    assert any("another command wrote to this run" in text for text in scene.told)


async def test_another_command_that_goes_on_writing_is_an_error_in_the_end(scene: Scene) -> None:
    async def conflict(*_: Any) -> int:
        raise ConflictError("seq 1 holds another item")

    with pytest.raises(ConflictError, match="seq 1 "):
        await scene.intake().run(conflict)


async def killed(scene: Scene, condition: Callable[[], bool], intake: Intake) -> None:
    """SIGKILL: nothing is cleaned up that others see."""
    queue, job = scene.queue, asyncio.ensure_future(intake.run(scene.run.submit))
    await until(lambda: condition() or job.done())
    leased = list(queue.leased.values())
    deleted = list(queue.deleted)
    job.cancel()
    await asyncio.gather(job, return_exceptions=True)
    scene.queue = FakeQueue()
    scene.queue.deleted, scene.queue.receipts = deleted, queue.receipts
    left = {message.id: message for message in [*leased, *queue.waiting]}
    for message in sorted(left.values(), key=lambda one: int(one.id[1:])):
        if message.id not in deleted:
            scene.queue.put(message.body, id=message.id)


async def test_killed_between_the_ledger_and_the_deletion_it_doubles_nothing(scene: Scene) -> None:
    scene.queue.put(*bodies(10))
    scene.run.cut_off = 4  # in the ledger; the client was not told
    await killed(scene, lambda: False, scene.intake())
    assert len(scene.run.ids) == 4 and len(scene.queue.deleted) <= 3
    scene.run.cut_off = None
    await scene.drained(scene.intake(), lambda: not scene.queue.waiting and not scene.queue.leased)
    assert scene.run.payloads == bodies(10) and sorted(set(scene.queue.deleted)) == sorted(
        f"m{n}" for n in range(1, 11)
    )


async def killed_while_deletions_fail(scene: Scene, *ids: str) -> None:
    """Rows are in the ledger, and leases go on. `ids`: of messages whose lease the service says is lost."""
    ack, scene.queue.ack = scene.queue.ack, unavailable  # type: ignore[method-assign]
    scene.queue.put(*bodies(6))
    first = scene.intake()
    job = asyncio.ensure_future(first.run(scene.run.submit))
    await until(lambda: len(first._deleting) == 6 and not first._coming)
    job.cancel()
    await asyncio.gather(job, return_exceptions=True)
    assert len(scene.run.ids) == 6 and len(scene.queue.leased) == 6
    scene.queue.ack = ack  # type: ignore[method-assign]
    scene.queue.lose = set(ids)


async def unavailable(*_: Any) -> Any:
    raise UnavailableError("500: Internal Error")


async def test_what_a_killed_command_could_not_delete_the_next_one_deletes_before_it_seals(scene: Scene) -> None:
    await killed_while_deletions_fail(scene)
    assert await scene.intake(stop_when_empty_s=0.05).run(scene.run.submit) == 6
    assert scene.run.sealed and sorted(scene.queue.deleted) == [f"m{n}" for n in range(1, 7)] and not scene.queue.leased


async def test_a_run_is_not_sealed_while_the_next_command_cannot_delete_either(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "DELETE_S", 0.2)
    await killed_while_deletions_fail(scene)
    scene.queue.ack = unavailable  # type: ignore[method-assign]
    with pytest.raises(UnavailableError, match="6 messages are in the ledger"):
        await scene.intake(stop_when_empty_s=0.05).run(scene.run.submit)
    assert not scene.run.sealed


async def test_a_run_is_not_sealed_before_messages_whose_lease_was_lost_came_back(scene: Scene) -> None:
    await killed_while_deletions_fail(scene, "m2", "m5")
    intake = scene.intake()
    with pytest.raises(UnavailableError, match=r"up to 2 messages .* the run stays open"):
        await scene.drained(intake, lambda: len(intake._astray) == 2)
    assert not scene.run.sealed
    intake = scene.intake()
    job = asyncio.ensure_future(intake.run(scene.run.submit))
    await until(lambda: len(intake._astray) == 2)
    scene.queue.lose.clear()
    for n in (2, 5):
        scene.queue.put(b'{"n":%d}' % (n - 1), id=f"m{n}")
    await until(lambda: not intake._astray)
    intake.drain()
    assert await job == 6 and scene.run.sealed and not scene.queue.waiting


async def test_an_intake_that_ends_by_itself_waits_for_the_leases_of_a_command_whose_receipts_are_lost(
    scene: Scene,
) -> None:
    await killed_while_deletions_fail(scene)
    (scene.directory / NAME).unlink()
    now = [0.0]
    intake = scene.intake(stop_when_empty_s=0.01, now=lambda: now[0])
    job = asyncio.ensure_future(intake.run(scene.run.submit))
    await until(lambda: intake.state == "receiving")
    for now[0] in (10.0, 20.0, 29.0):
        await asyncio.sleep(0.1)
    assert not job.done()
    now[0] = 31.0
    for message in scene.queue.leased.values():
        scene.queue.put(message.body, id=message.id)
    scene.queue.leased.clear()
    while not job.done():
        now[0] += 0.1
        await asyncio.sleep(0.01)
    assert job.result() == 6 and len(scene.run.ids) == 6 and len(scene.queue.deleted) == 6


async def test_leases_are_extended_until_messages_are_deleted(scene: Scene) -> None:
    extended: list[str] = []
    extend = scene.queue.extend

    async def noted(messages: list[Message], lease_s: float) -> list[Message]:
        extended.extend(message.id for message in messages)
        return await extend(messages, lease_s)

    scene.queue.extend = noted  # type: ignore[method-assign]
    scene.queue.ack = unavailable  # type: ignore[method-assign]
    scene.queue.put(*bodies(1))
    job = asyncio.ensure_future(scene.intake(lease_s=0.4).run(scene.run.submit))
    await until(lambda: len(extended) >= 3)
    job.cancel()
    await asyncio.gather(job, return_exceptions=True)
    assert set(extended) == {"m1"} and len(scene.run.ids) == 1


async def test_killed_between_the_deletion_and_the_index_it_doubles_nothing(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene.queue.put(*bodies(6))
    first = scene.intake()
    monkeypatch.setattr(first._index, "add", lambda *_: None)
    monkeypatch.setattr(first._index, "release", lambda *_, **__: None)
    await killed(scene, lambda: len(scene.queue.deleted) == 6, first)
    scene.queue.put(*bodies(6))  # other ids: other rows
    scene.queue.put(b'{"n":0}', id="m1")  # standard queues deliver more than once
    await scene.drained(scene.intake(), lambda: not scene.queue.waiting and not scene.queue.leased)
    assert len(scene.run.ids) == 12 and scene.queue.deleted.count("m1") == 2


DAMAGE: dict[str, Callable[[Path], object]] = {
    "other bytes": lambda path: path.write_bytes(b"no database at all" * 1000),
    "cut": lambda path: path.write_bytes(path.read_bytes()[:5000]),
    "gone": lambda path: path.unlink(),
    "a directory": lambda path: (path.unlink(), path.mkdir(), (path / "x").touch()),
    "other tables": lambda path: (
        path.unlink(),
        sqlite3.connect(path).execute("CREATE TABLE taken (a)").connection.close(),
    ),
}


@pytest.mark.parametrize("how", DAMAGE)
async def test_a_damaged_index_is_made_anew_from_the_ledger(scene: Scene, how: str) -> None:
    scene.queue.put(*bodies(8))
    await killed(scene, lambda: len(scene.queue.deleted) == 8, scene.intake())
    for end in ("-wal", "-shm"):
        (scene.directory / (NAME + end)).unlink(missing_ok=True)
    DAMAGE[how](scene.directory / NAME)
    for n in range(8):
        scene.queue.put(b'{"n":%d}' % n, id=f"m{n + 1}")
    scene.queue.put(b'{"n":8}')
    with pytest.raises(UnavailableError, match="the run stays open"):  # receipts are lost: there may be leases
        await scene.drained(scene.intake(), lambda: not scene.queue.waiting and not scene.queue.leased)
    assert len(scene.run.ids) == 9 and not scene.run.sealed


async def test_a_ledger_that_is_older_than_the_index_is_believed(scene: Scene) -> None:
    scene.queue.put(*bodies(8))
    first = scene.intake()
    await killed(scene, lambda: len(scene.queue.deleted) == first._index.count == 8, first)
    del scene.run.ids[3:], scene.run.payloads[3:]
    for n in range(8):
        scene.queue.put(b'{"n":%d}' % n, id=f"m{n + 1}")
    await scene.drained(scene.intake(), lambda: not scene.queue.waiting and not scene.queue.leased)
    assert scene.run.payloads == bodies(8) and any("fewer rows than were taken" in text for text in scene.told)


async def test_an_index_that_is_damaged_at_work_is_made_anew_and_told(scene: Scene) -> None:
    intake = scene.intake()
    job = asyncio.ensure_future(intake.run(scene.run.submit))
    scene.queue.put(*bodies(8))
    await until(lambda: len(scene.queue.deleted) == 8)
    db = sqlite3.connect(scene.directory / NAME)
    db.execute("DROP TABLE taken")
    db.close()
    scene.queue.put(b'{"n":0}', id="m1")
    scene.queue.put(b'{"n":8}', id="new")
    await until(lambda: len(scene.queue.deleted) == 10)
    intake.drain()
    assert await job == 9 and any("made anew from the ledger" in text for text in scene.told)


async def test_a_full_disk_is_told_as_that(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    intake = scene.intake()
    scene.queue.put(*bodies(2000))
    job = asyncio.ensure_future(intake.run(scene.run.submit))
    await until(lambda: bool(scene.queue.deleted))
    (connection,) = [intake._index._db]
    assert connection is not None
    pages = connection.execute("PRAGMA page_count").fetchone()[0]
    connection.execute(f"PRAGMA max_page_count = {pages}")
    intake.observe(final=0, running=2000, per_s=0, active=True)
    with pytest.raises(StorageFullError, match="no space left"):
        await job


@pytest.mark.parametrize("failure", ["missing", "credentials"])
@pytest.mark.parametrize("mended", [True, False])
async def test_a_queue_that_was_deleted_or_credentials_that_expired_end_no_rows(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, failure: str, mended: bool
) -> None:
    """The rows that are in the ledger go on, also to the end of the run if the queue stays away."""
    monkeypatch.setattr(module, "DELETE_S", 0.3)
    queue = scene.queue
    names = ("dequeue", "extend", "ack", "nack", "depth", "is_empty")
    own = {name: getattr(queue, name) for name in names}

    async def refused(*_: Any) -> Any:
        raise ConfigError("queue_url", failure=failure)

    queue.put(*bodies(2))
    scene.run.hold.clear()
    intake = scene.intake()
    job = asyncio.ensure_future(intake.run(scene.run.submit))
    await until(lambda: len(queue.leased) == 2)
    for name in names:
        setattr(queue, name, refused)
    scene.run.hold.set()
    await until(lambda: len(scene.run.ids) == 2 and intake.state == "away")
    await asyncio.sleep(0.1)
    assert not job.done() and any("cannot be reached" in text for text in scene.told)
    if mended:
        for name, call in own.items():
            setattr(queue, name, call)
        queue.put(b'{"n":2}')
        await until(lambda: len(queue.deleted) == 3)
    intake.drain()
    if mended or failure == "missing":
        assert await job == 2 + mended and scene.run.sealed
    else:
        with pytest.raises(UnavailableError, match="could not be deleted"):
            await job


async def test_a_fault_that_a_person_must_mend_ends_it_and_gives_back(scene: Scene) -> None:
    async def refused(*_: Any) -> Any:
        raise ConfigError("sqs:ReceiveMessage is not allowed", failure="denied")

    intake = scene.intake()
    scene.queue.put(*bodies(1))
    job = asyncio.ensure_future(intake.run(scene.run.submit))
    await until(lambda: len(scene.queue.deleted) == 1)
    scene.queue.dequeue = refused  # type: ignore[method-assign]
    with pytest.raises(ConfigError, match="not allowed"):
        await job
    assert not scene.run.sealed


async def test_a_message_whose_lease_ended_is_not_handed_on(scene: Scene) -> None:
    scene.run.hold.clear()
    scene.queue.put(*bodies(5))
    intake = scene.intake()
    job = asyncio.ensure_future(intake.run(scene.run.submit))
    await until(lambda: intake._feed.waiting == 4)
    intake._lost([scene.queue.leased["r4"]], "taken")
    scene.run.hold.set()
    await until(lambda: len(scene.queue.deleted) == 4)
    intake.drain()
    assert await job == 4
    assert [json.loads(payload)["n"] for payload in scene.run.payloads] == [0, 1, 2, 4]


async def test_one_that_comes_again_while_its_lease_ends_is_handed_on(scene: Scene) -> None:
    scene.run.hold.clear()
    scene.queue.put(*bodies(5))
    intake = scene.intake()
    job = asyncio.ensure_future(intake.run(scene.run.submit))
    await until(lambda: intake._feed.waiting == 4)
    asked, go, find = threading.Event(), threading.Event(), intake._index.find

    def slow(keys: Iterable[bytes]) -> dict[bytes, Taken]:
        asked.set()
        go.wait(20)
        return find(keys)

    intake._index.find = slow  # type: ignore[method-assign]
    scene.queue.put(b'{"n":3}', id="m4")
    await until(asked.is_set)
    intake._lost([scene.queue.leased["r4"]], "taken")
    go.set()
    scene.run.hold.set()
    await until(lambda: len(scene.queue.deleted) == 5)
    intake.drain()
    assert await job == 5
    assert [json.loads(payload)["n"] for payload in scene.run.payloads] == [0, 1, 2, 4, 3]


async def test_a_sealed_run_takes_nothing(scene: Scene) -> None:
    scene.run.sealed = True
    scene.queue.put(*bodies(2))
    assert await scene.intake().run(scene.run.submit) == 0
    assert len(scene.queue.waiting) == 2
