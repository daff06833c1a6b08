"""Both edges of the ledger under random damage at random moments, as every workload has them.

The command is the real one, from `rollout.cli.session` down to the files; the ledger is a list. Input and output are
damaged while rows are checked, submitted and collected, between commands, and when a command is killed. Whatever
happens, what is submitted is what the run's input was, exit code 0 means that every row is in the files, and when the
input is whole again the same command gets there.
"""

from __future__ import annotations

import asyncio
import gzip
import json
import os
import tempfile
from collections.abc import AsyncGenerator, Iterable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar
from unittest.mock import patch

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import BaseModel
from rollout.cli import command_cluster, session
from rollout.cli.boundary import exit_code_of
from rollout.cli.progress import Display, Snapshot
from rollout.cli.work import Work
from rollout.cli.work_options import Options
from rollout.client import Page
from rollout.client.target import Target
from rollout.model.errors import NotFoundError, RolloutError
from rollout.model.item import ItemSpec, NewItem, Outcome
from rollout.model.run import RunSpec
from rollout.wire.v1 import runs_pb2 as pb
from rollout.workloads.commit import CommitEntry
from rollout.workloads.input_lines import json_of
from rollout.workloads.json_form import JsonObject
from rollout.workloads.output import ResultFiles
from rollout.workloads.port import Checked, InputReader, Totals, Workload, input_section
from rollout.workloads.source import UniqueIds

ROWS = 12
INPUT = ("a.jsonl", "b.jsonl.gz")
RESULTS = ("good.jsonl", "bad.jsonl")
KEPT = (".collect.json", ".run.json", ".input.idx", "summary.json")


class Nothing(BaseModel):
    pass


class Echo(Workload[Any, Checked]):
    """Every third row fails; the others are their own result."""

    name = "echo"
    help = "Echo."
    settings = Nothing
    result_files = (*RESULTS, "summary.json")

    def __init__(self, place: Path) -> None:
        self._place = place

    def directory(self, settings: Any) -> Path:
        return self._place

    def check(self, settings: Any, reading: InputReader) -> Checked:
        ids = UniqueIds()
        patterns = [str(self._place / "*.jsonl*")]
        source, report = reading.rows(patterns, lambda line: ids.add(line, "id", json_of(line)))
        return Checked(config={"input": input_section(patterns, report)}, total=report.rows, source=source)

    def plan(self, checked: Checked, config: JsonObject, start: int) -> Iterator[NewItem]:
        assert checked.source is not None
        for line in checked.source.rows(start):
            yield NewItem(line.index.to_bytes(32), line.raw, ItemSpec())

    def writer(self, config: JsonObject) -> EchoWriter:
        return EchoWriter()

    def describe(self, settings: Any, checked: Checked) -> list[str]:
        return []


class EchoWriter:
    files = RESULTS

    def lines(self, entry: CommitEntry) -> Iterable[tuple[str, bytes]]:
        yield RESULTS[entry.outcome is Outcome.FAILED], entry.payload + b"\n"

    def summary(self, summary: JsonObject, totals: Totals) -> JsonObject:
        return summary


class KilledError(BaseException):
    pass


@dataclass
class World:
    """A directory, a ledger with one run, and what is still to happen to them."""

    place: Path
    damages: dict[int, list[Any]] = field(default_factory=dict[int, list[Any]])
    moment: int = 0
    killed: bool = False
    quiet: bool = True
    """Nothing happened since the last moment."""
    spec: RunSpec | None = None
    items: list[bytes] = field(default_factory=list[bytes])
    sealed: bool = False

    def pass_moment(self) -> None:
        self.quiet = True
        for damage in self.damages.pop(self.moment, []):
            self.quiet = False
            damage(self)
        self.moment += 1

    def heal(self) -> None:
        rows = [b'"%d"\n' % n for n in range(ROWS)]
        for name in INPUT:
            (self.place / name).unlink(missing_ok=True)
        (self.place / INPUT[0]).write_bytes(b"".join(rows[: ROWS // 2]))
        (self.place / INPUT[1]).write_bytes(gzip.compress(b"".join(rows[ROWS // 2 :])))

    def check_ledger(self) -> None:
        assert self.items == [b'"%d"' % n for n in range(len(self.items))]
        assert not self.sealed or len(self.items) == ROWS

    def check_files(self) -> None:
        for number, name in enumerate(RESULTS):
            expected = b"".join(b'"%d"\n' % n for n in range(ROWS) if (n % 3 == 0) == bool(number))
            assert (self.place / name).read_bytes() == expected, name
        assert json.loads((self.place / "summary.json").read_text())["rows"]["committed"] == ROWS


class Ledger:
    """What a `Runs` is to a command."""

    address = "ledger"
    addresses: ClassVar = [address]
    patience_s = 0.0

    def __init__(self, world: World) -> None:
        self._world = world

    def _status(self) -> pb.RunStatus:
        world = self._world
        assert world.spec is not None
        return pb.RunStatus(
            spec=pb.RunSpec(run_id=world.spec.run_id, config=world.spec.config, name=world.spec.name),
            state="completed" if world.sealed else "running",
            submitted=len(world.items),
            cursor=len(world.items),
            done=len(world.items),
        )

    async def get(self, run_id: str) -> pb.RunStatus:
        if self._world.spec is None or self._world.spec.run_id != run_id:
            raise NotFoundError
        return self._status()

    async def open(self, spec: RunSpec) -> pb.RunStatus:
        assert self._world.spec in (None, spec)
        self._world.spec = spec
        self._world.pass_moment()
        return self._status()

    async def submit(self, spec: RunSpec, items: Any, progress: Any) -> int:
        world = self._world
        found = items(len(world.items))
        while (item := await asyncio.to_thread(next, found, None)) is not None:
            assert item.id == len(world.items).to_bytes(32)
            world.items.append(item.payload)
            world.pass_moment()
        world.sealed = True
        return len(world.items)

    async def watch(self, run_id: str, cursor: int, *, payloads: bool, status_only: bool) -> AsyncGenerator[Page]:
        world = self._world
        while True:
            sealed = world.sealed
            upto = min(len(world.items), cursor + 3)
            yield Page([entry(position, world.items[position]) for position in range(cursor, upto)])
            cursor = upto
            world.pass_moment()
            ended = sealed and cursor == len(world.items)
            status = self._status()
            status.state = "completed" if ended else "running"
            yield Page([], status=status)
            if ended:
                return
            await asyncio.sleep(0)


def entry(position: int, payload: bytes) -> CommitEntry:
    outcome = Outcome.DONE if position % 3 else Outcome.FAILED
    return CommitEntry(position, position, 1, outcome, b"", payload, bytes(32), accepted_ms=1)


class Said(Display):
    def __init__(self) -> None:
        self.lines: list[str] = []

    def note(self, message: str) -> None:
        self.lines.append(message)

    def event(self, name: str, message: str, **fields: Any) -> None:
        self.lines.append(message)

    def progress(self, snapshot: Snapshot) -> None:
        return


def command(world: World) -> tuple[int, str]:
    """One invocation: its exit code, and what it said."""
    said = Said()

    @asynccontextmanager
    async def connected(*_: Any, **__: Any) -> AsyncGenerator[Ledger]:
        yield Ledger(world)

    save = ResultFiles.save

    def saved(self: ResultFiles, cursor: int, totals: JsonObject) -> None:
        world.pass_moment()
        if world.killed:
            return  # nobody is there to save anything
        save(self, cursor, totals)

    world.moment, world.killed = 0, False
    options = Options(words=("rollout", "echo"))
    target = Target(["ledger:1"], Path(), "rollout", explicit=True)
    invocation = session.Invocation(Work(Echo(world.place), Nothing(), options, target, said))
    with (
        patch.object(command_cluster, "connected", connected),
        patch.object(ResultFiles, "save", saved),
        patch.object(os, "fsync", lambda fd: None),  # no power fails here
    ):
        try:
            code = asyncio.run(invocation.run())
        except KilledError:
            code = -9
        except RolloutError as error:
            said.note(error.message)
            code = exit_code_of(error)
    return code, "\n".join(said.lines)


# ---- damage


def changed(name: str, change: Any) -> Any:
    def damage(world: World) -> None:
        path = world.place / name
        data = path.read_bytes() if path.exists() else b""
        packed = name.endswith(".gz")
        new = change(gzip.decompress(data) if packed and data else data)
        if new is None:
            path.unlink(missing_ok=True)
        else:
            path.write_bytes(gzip.compress(new) if packed else new)

    return damage


def kill(world: World) -> None:
    world.killed = True
    raise KilledError


def other(byte: int) -> int:
    return byte ^ 1


changes = st.one_of(
    st.just(lambda data: None),
    st.just(lambda data: b""),
    st.floats(0, 1).map(lambda at: lambda data: data[: int(at * len(data))]),
    st.floats(0, 1).map(
        lambda at: lambda data: bytes(other(b) if n == int(at * (len(data) - 1)) else b for n, b in enumerate(data))
    ),
    st.just(lambda data: data + b'"99"\n'),
    st.just(lambda data: data + data),
    st.just(lambda data: b"\n" + data),
    st.just(lambda data: data),
)
inputs = st.builds(changed, st.sampled_from(INPUT), changes)
outputs = st.builds(changed, st.sampled_from([*RESULTS, *KEPT]), changes)


def script(damage: Any, latest: int) -> Any:
    """What happens at which moments of a command."""
    return st.dictionaries(st.integers(0, latest), st.lists(damage, min_size=1, max_size=2), max_size=3)


def between(damage: Any) -> Any:
    """What happens before a command, and whether the input is whole again then."""
    return st.tuples(st.lists(damage, max_size=2), st.booleans())


seeded = settings(
    max_examples=25,
    derandomize=True,
    database=None,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("edges")


def tell(place: Path, story: list[Any]) -> None:
    """Commands with what happens before and during each, then commands in peace."""
    world = World(Path(tempfile.mkdtemp(dir=place)))
    world.heal()
    for (before, heal), during in story:
        if heal or world.spec is None:
            world.heal()
        if world.spec is not None:  # damage to the input before that makes another input
            for damage in before:
                damage(world)
        world.damages = {moment: list(what) for moment, what in during.items()}
        code, said = command(world)
        world.check_ledger()
        assert code in (0, 1, 2, -9), said
        if code == 0 and world.quiet:
            world.check_files()
    world.damages = {}
    world.heal()
    for complete in (False, True):
        code, said = command(world)
        assert code == 0 and (not complete or "is complete already" in said), said
        world.check_ledger()
        world.check_files()


# The files are small enough to be read at once when they are opened: the first is open before the first item comes.
@seeded
@given(st.lists(st.tuples(between(inputs), script(inputs | st.just(kill), 7)), min_size=1, max_size=3))
def test_damage_to_the_input(place: Path, story: list[Any]) -> None:
    tell(place, story)


@seeded
@given(st.lists(st.tuples(between(outputs), script(outputs | st.just(kill), 3 * ROWS)), min_size=1, max_size=3))
def test_damage_to_the_output(place: Path, story: list[Any]) -> None:
    tell(place, story)


@seeded
@given(
    st.lists(st.tuples(between(inputs | outputs), script(inputs | outputs | st.just(kill), 20)), min_size=2, max_size=4)
)
def test_damage_to_both(place: Path, story: list[Any]) -> None:
    tell(place, story)


def test_what_is_missing_is_said_when_the_ledger_is_gone(place: Path) -> None:
    world = World(Path(tempfile.mkdtemp(dir=place)))
    world.heal()
    assert command(world)[0] == 0
    os.truncate(world.place / RESULTS[0], 10)
    world.spec = None  # the run was deleted
    code, said = command(world)
    assert code == 2 and f"{RESULTS[0]} was cut to 10 of" in said and "only the ledger has what is missing" in said
    assert (world.place / RESULTS[0]).stat().st_size == 10  # what is left is left
