"""Collecting a run: what a Ctrl-C in the middle leaves, and what else can happen to it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from rollout.cli import telling
from rollout.cli.collecting import CollectedRun
from rollout.cli.progress import Snapshot
from rollout.cli.run_rows import InputRows, QueueRows
from rollout.cli.session import run_workload
from rollout.cli.telling import Telling
from rollout.cli.work_options import Options
from rollout.client import Page
from rollout.client.run_session import RunSession
from rollout.model.errors import (
    ConfigError,
    IncompleteError,
    InputChangedError,
    OutputChangedError,
)
from rollout.model.item import NewItem
from rollout.wire.v1 import runs_pb2 as pb
from rollout.workloads.infer.config import InferConfig
from rollout.workloads.infer.workload import Infer
from rollout.workloads.output_place import OutputPlace
from rollout.workloads.port import Checked, Totals
from rollout.workloads.sections import RunSection

CONFIG: dict[str, Any] = {"backend": {"kind": "mock"}}


def run_of(runs: Any, collector: Any, display: Any, directory: Path = Path(), rows: Any = None) -> CollectedRun:
    given = rows or InputRows(Infer(), Checked(config={}, total=1), CONFIG)
    return CollectedRun(Infer(), runs, "R", CONFIG, given, collector, display, OutputPlace(directory))


class Lines:
    """A collector whose workload has nothing but lines of files."""

    cursor = 0
    shows = False

    async def place(self, entries: list[Any], ledger: object) -> list[str]:
        return []

    def flush(self) -> None:
        return

    def watch(self, state: str, reason: str) -> None:
        return

    def refresh(self, state: str = "") -> None:
        return


class Slow(Lines):
    """A collector that is in the middle of writing until it is let go; two writers at once are an error."""

    def __init__(self, fault: Exception | None) -> None:
        self.fault = fault
        self.began, self.go, self.one = threading.Event(), threading.Event(), threading.Lock()
        self.done: list[str] = []

    def add(self, entries: list[Any]) -> None:
        assert self.one.acquire(blocking=False)
        self.began.set()
        self.go.wait(60)
        self.done.append("add")
        self.one.release()
        fault, self.fault = self.fault, None
        if fault is not None:
            raise fault

    def restart(self) -> None:
        self.done.append("restart")

    def flush(self) -> None:
        assert self.one.acquire(blocking=False)
        self.done.append("flush")
        self.one.release()

    def close(self) -> None:
        self.done.append("close")


class OnePage:
    """A run with one page, whose submission never ends."""

    async def watch(self, *_: Any, **__: Any) -> AsyncGenerator[Page]:
        yield Page([cast(Any, object())])
        await asyncio.Event().wait()

    async def submit(self, *_: Any, **__: Any) -> int:
        await asyncio.Event().wait()
        return 0


@pytest.mark.parametrize("fault", [None, OutputChangedError("out/completions.jsonl was edited")])
async def test_a_batch_that_is_stopped_while_it_writes_closes_its_files_afterwards(fault: Exception | None) -> None:
    slow = Slow(fault)
    run = run_of(OnePage(), slow, SimpleNamespace(note=lambda _: None))
    job = asyncio.ensure_future(run.carry_out())
    await asyncio.to_thread(slow.began.wait, 60)
    for _ in range(2):  # a second cancellation does not cut it short either
        job.cancel()
        await asyncio.sleep(0.05)
        assert not job.done()
    slow.go.set()
    with pytest.raises(asyncio.CancelledError):
        await job
    run.close()
    assert slow.done == ["add", "flush", "close"]


class Taking:
    """An intake that has received ten rows more than the run has."""

    taken, draining = 15, False

    def drain(self) -> None:
        self.draining = True


def queue_rows() -> tuple[QueueRows, Taking]:
    intake = Taking()
    return QueueRows(Infer(), Checked(config={}, total=0), CONFIG, cast(Any, intake)), intake


def test_a_drain_counts_what_is_in_the_run_and_not_what_is_given_back() -> None:
    said: list[str] = []
    display: Any = SimpleNamespace(event=lambda _, text, **__: said.append(text))
    rows, _ = queue_rows()
    session = RunSession(cast(Any, None), "R")
    session.submitted = 5
    assert rows.drain(session, pb.RunStatus(state="running", submitted=4, done=2), display)
    assert "the 3 rows that are in the run are being finished" in said[0]
    assert rows.drain(session, pb.RunStatus(state="running", submitted=5, done=5), display)
    assert "are given back, and the run ends." in said[1]


@pytest.mark.parametrize("lost", [True, False])
async def test_a_place_that_another_command_writes_to_ends_the_intake(lost: bool, tmp_path: Path) -> None:
    class Taken(OutputPlace):
        @property
        def lost(self) -> bool:
            return lost

    said: list[str] = []
    rows, intake = queue_rows()
    for name in ("committed", "observe"):
        setattr(intake, name, lambda *_, **__: None)
    intake.state, intake.depth = "receiving", None  # type: ignore[attr-defined]
    display: Any = SimpleNamespace(note=said.append, progress=lambda _: None)
    run = CollectedRun(Infer(), cast(Any, None), "R", CONFIG, rows, cast(Any, Lines()), display, Taken(tmp_path))
    await run._take(Page([], pb.RunStatus(state="running")))  # pyright: ignore[reportPrivateUsage]
    assert intake.draining == lost and bool(said) == lost


class Idle:
    """A run that has a worker, then none for long, then one again and none."""

    async def watch(self, *_: Any, **__: Any) -> AsyncGenerator[Page]:
        for running in (1, 0, 0, 1):
            yield Page([], status=pb.RunStatus(state="running", running=running))
        wait = pb.Wait(message="nobody hosts the executor rank", items=3, impossible=True)
        yield Page([], status=pb.RunStatus(state="running", waits=[wait]))
        yield Page([], status=pb.RunStatus(state="completed"))

    async def submit(self, *_: Any, **__: Any) -> int:
        return 0


async def test_a_run_that_nobody_works_at_says_where_to_look(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(telling, "IDLE_S", 0.0)
    monkeypatch.setattr(telling, "IMPOSSIBLE_S", 0.0)
    said: list[str] = []

    def progress(snapshot: Snapshot) -> None:
        said.append(f"{snapshot.running} running")

    display = SimpleNamespace(note=said.append, progress=progress)
    run = run_of(Idle(), Edited(0), display)
    assert (await run._collect())[0].state == "completed"  # pyright: ignore[reportPrivateUsage]
    told = ["note" if "`rollout workers`" in line else line[0] for line in said]
    assert told == ["1", "0", "note", "0", "1", "0", "note", "0"], said
    assert "3 items: nobody hosts the executor rank (impossible" in said[6]


def test_work_that_runs_may_wait_for_what_nobody_can_take(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(telling, "IDLE_S", 0.0)
    monkeypatch.setattr(telling, "IMPOSSIBLE_S", 0.0)
    said: list[str] = []
    told = Telling(cast(Any, SimpleNamespace(note=said.append)))
    for running, reason, impossible in ((1, "busy", False), (1, "labels", True), (0, "chain", False)):
        wait = pb.Wait(reason=reason, message=f"it waits ({reason})", items=2, impossible=impossible)
        told.tell(pb.RunStatus(state="running", running=running, waits=[wait]), is_waiting=False)
        told._idle_told = False  # pyright: ignore[reportPrivateUsage]
    assert ["it waits (labels)" in line for line in said] == [True, False] and "chain" not in said[1]


class Twice:
    """A run of one row, which is read from wherever it is asked for."""

    def __init__(self) -> None:
        self.asked: list[int] = []

    async def watch(self, run_id: str, cursor: int, **_: Any) -> AsyncGenerator[Page]:
        self.asked.append(cursor)
        if cursor == 0:
            yield Page([cast(Any, object())])
        yield Page([], status=pb.RunStatus(state="completed"))


class Edited(Lines):
    """A collector whose file somebody edits `times` times before the end."""

    def __init__(self, times: int) -> None:
        self.cursor, self.times, self.complete = 0, times, True

    def add(self, entries: list[Any]) -> None:
        self.cursor += len(entries)

    def restart(self) -> None:
        self.cursor = 0

    def finish(self, *_: Any, **__: Any) -> dict[str, Any]:
        self.times -= 1
        if self.times >= 0:
            raise OutputChangedError("out/completions.jsonl was edited")
        return {"rows": {"committed": self.cursor}}


async def test_files_that_somebody_edits_are_written_anew_a_few_times() -> None:
    said: list[str] = []
    display = SimpleNamespace(note=said.append, progress=lambda _: None)
    runs = Twice()
    _, summary = await run_of(runs, Edited(2), display)._collect()  # pyright: ignore[reportPrivateUsage]
    assert summary == {"rows": {"committed": 1}} and runs.asked == [0, 0, 0]
    assert said == ["note: out/completions.jsonl was edited; it is written anew from the ledger"] * 2
    with pytest.raises(OutputChangedError):
        await run_of(Twice(), Edited(99), display)._collect()  # pyright: ignore[reportPrivateUsage]


@pytest.mark.parametrize(("option", "configured"), [("@x", ""), ("", "@x")])
def test_a_name_that_stands_for_other_things_is_refused(option: str, configured: str) -> None:
    settings = InferConfig.model_construct(run=RunSection(name=configured))
    with pytest.raises(ConfigError, match="'@x' begins with @"):
        run_workload(Infer(), settings, Options(words=("rollout",), name=option))


def test_a_run_that_is_complete_without_every_row_is_no_success(tmp_path: Path) -> None:
    told: list[str] = []
    collector, display = Edited(0), SimpleNamespace(close=lambda: None, event=lambda _, text, **__: told.append(text))
    collector.complete = False
    run = run_of(None, collector, display, tmp_path)
    units = {"completed": 1, "committed": 1, "total": 2, "failed": 5, "invalid": 3}
    summary = {
        "run_id": "R",
        "state": "completed",
        "rows": units,
        "durations": {"wall_s": 1},
        "attempts": {"worker_lost": 0},
    }
    summary |= {"rows_per_s": 1.0, "tokens_per_s": 1.0}
    collector.totals = Totals()  # type: ignore[attr-defined]
    with pytest.raises(IncompleteError, match="is completed with 0 of the 1 row of the input"):
        run._finish(pb.RunStatus(state="completed"), summary, [])  # pyright: ignore[reportPrivateUsage]
    assert "warning: 2 rows failed for good" in told[0] and "\n3 rows left out as invalid" in told[0]


@pytest.mark.parametrize(("rows", "message"), [(1, "now has only 1"), (3, "now has more")])
def test_another_number_of_rows_than_was_checked_is_never_submitted(rows: int, message: str) -> None:
    class Other(Infer):
        def plan(self, checked: Checked, config: dict[str, Any], start: int) -> Iterator[NewItem]:
            return iter([NewItem(bytes(32), b"")] * (rows - start))

    items = InputRows(Other(), Checked(config={}, total=2), CONFIG)._items(0)  # pyright: ignore[reportPrivateUsage]
    submitted: list[NewItem] = []
    with pytest.raises(InputChangedError, match=message):
        submitted += items
    assert len(submitted) <= 2


def test_a_cause_is_said_once_and_again_when_it_reaches_more_workers() -> None:
    said: list[str] = []
    told = Telling(cast(Any, SimpleNamespace(event=lambda name, message, /, **fields: said.append(message))))

    def cause(*workers: str, everywhere: bool = False) -> pb.RunStatus:
        one = pb.Cause(
            executor="infer", code="model_missing", message="no such model", workers=workers,
            hosts=[f"gpu-{n}" for n, _ in enumerate(workers)], times=2 * len(workers), everywhere=everywhere,
        )  # fmt: skip
        return pb.RunStatus(state="running", causes=[one])

    for status in (cause("A"), cause("A"), cause("A", "B"), cause("A", "B"), cause("A", "B", everywhere=True)):
        told._tell_causes(status)  # pyright: ignore[reportPrivateUsage]
    assert said == [
        "worker A on gpu-0 cannot start the model: no such model",
        "the same on 2 workers now (4 tries): no such model",
        "the same on all workers that could run it now (4 tries): no such model",
    ]


def test_work_that_waits_for_room_says_so_and_when_it_goes_on() -> None:
    said: list[str] = []
    told = Telling(cast(Any, SimpleNamespace(event=lambda name, message, /, **fields: said.append(message))))

    def status(*messages: str) -> pb.RunStatus:
        causes = [pb.Cause(executor="train", code="disk_full", message=m, workers=["A"]) for m in messages]
        return pb.RunStatus(state="running", causes=causes)

    for one in (status("full at step 10"), status("full at step 20"), status(), status()):
        told.tell(one, is_waiting=True)
    assert said == [
        "worker A waits for room: full at step 10",
        "worker A waits for room: full at step 20",
        "the run goes on: there is room again",
    ]


async def test_that_the_rest_is_skipped_is_told_once_with_why() -> None:
    told: list[tuple[str, str]] = []
    status = pb.RunStatus(state="running", skips_rest=True, reason="5 tokens were used, of at most 5", running=3)

    class Display:
        def event(self, name: str, message: str, **_: Any) -> None:
            told.append((name, message))

        def progress(self, _: Snapshot) -> None: ...

    class Statuses:
        async def watch(self, *_: Any, **__: Any) -> AsyncGenerator[Page]:
            yield Page([], status)
            yield Page([], status)
            yield Page([], pb.RunStatus(state="completed"))

    await run_of(Statuses(), Lines(), Display())._follow()  # pyright: ignore[reportPrivateUsage]
    why = "5 tokens were used, of at most 5; 3 still running"
    assert told == [("rest_skipped", f"what has not begun is skipped: {why}")]
