"""An input that grows: which rows are new, how they are counted, and that they come out as they were checked."""

from __future__ import annotations

import gzip
import json
import os
import time
from pathlib import Path
from typing import Any

import pytest
from rollout.cli.followed_input import FollowedInput
from rollout.cli.progress import NotesOnly
from rollout.model.errors import ConfigError, InputChangedError, InputError
from rollout.workloads.following import SETTLED_S, NoRowsYetError, Parts, seen
from rollout.workloads.input_format import InputFormat
from rollout.workloads.input_lines import json_of
from rollout.workloads.port import InputReader, input_section
from rollout.workloads.sections import QueuedInput
from rollout.workloads.source import Source


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def add(name: str, text: str, age_s: float = 0) -> None:
    with Path(name).open("a") as file:
        file.write(text)
    at = time.time() - age_s
    os.utime(name, (at, at))


def look(parts: Parts) -> tuple[list[tuple[Any, str]], Parts]:
    """(value, place) of all rows, and the parts in which they came."""
    with Source.open(["*"], exclude=Path("out"), form=InputFormat(), parts=parts) as source:
        report = source.check(json_of)
        found = [(json.loads(line.raw), line.where) for line in source.rows()]
        for start in range(0, len(found), 1 + len(found) // 10):
            assert [line.index for line in source.rows(start)] == list(range(start, len(found)))
    assert len(found) == report.rows
    return found, Parts.of({"input": input_section(["*"], report)}, grows=True)


def test_new_rows_stand_at_the_end_wherever_they_came() -> None:
    add("b.jsonl", "1\n\n2\n")
    found, parts = look(Parts())
    add("a.jsonl", "3\n")
    add("b.jsonl", "4\n")
    found, parts = look(parts)
    assert found == [(1, "b.jsonl:1"), (2, "b.jsonl:3"), (3, "a.jsonl:1"), (4, "b.jsonl:4")]
    assert parts.known == (("b.jsonl", 2), ("a.jsonl", 1), ("b.jsonl", 1))
    add("b.jsonl", "5\n")
    add("a.jsonl", "6\n")
    found, parts = look(parts)
    assert [value for value, _ in found] == [1, 2, 3, 4, 6, 5]
    add("c.jsonl", "7\n")
    assert look(Parts(parts.known, grows=False)) == (found, parts)


def test_a_line_without_its_end_waits() -> None:
    add("a.jsonl", "1\n2")
    assert [value for value, _ in look(Parts())[0]] == [1]
    add("a.jsonl", "3\n")
    assert [value for value, _ in look(Parts())[0]] == [1, 23]


def test_files_that_are_no_lines_wait_until_nobody_writes_to_them() -> None:
    add("a.csv", "n\n1\n")
    with pytest.raises(NoRowsYetError):
        look(Parts())
    add("a.csv", "2", age_s=2 * SETTLED_S)
    found, parts = look(Parts())
    assert [value for value, _ in found] == [{"n": "1"}, {"n": "2"}]
    add("a.csv", "\n3\n")
    assert look(parts)[0] == found


def test_a_packed_file_that_is_settled_has_a_last_line_without_its_end() -> None:
    Path("a.jsonl.gz").write_bytes(gzip.compress(b"1\n2"))
    add("a.jsonl.gz", "", age_s=2 * SETTLED_S)
    assert [value for value, _ in look(Parts())[0]] == [1, 2]


def test_nothing_yet_and_a_file_that_is_gone() -> None:
    with pytest.raises(NoRowsYetError):
        look(Parts())
    with pytest.raises(InputError, match=r"a\.jsonl"):
        look(Parts((("a.jsonl", 1),)))


def test_what_comes_after_the_check_waits_and_what_was_checked_must_stay() -> None:
    add("a.jsonl", "1\n")
    with Source.open(["*"], exclude=Path("out"), parts=Parts()) as source:
        source.check(json_of)
        add("a.jsonl", "2\n")
        assert [line.raw for line in source.rows()] == [b"1"]
        Path("a.jsonl").write_text("3\n")
        with pytest.raises(InputChangedError):
            list(source.rows())


def test_many_files_that_grow_in_turn() -> None:
    """More than may be open at a time."""
    parts = Parts()
    for turn in range(2):
        for number in range(300):
            add(f"{number:03}.jsonl", f"{300 * turn + number}\n")
        found, parts = look(parts)
        assert [value for value, _ in found] == list(range(300 * (turn + 1)))


def test_only_files_of_this_machine() -> None:
    read, write = os.pipe()
    try:
        with pytest.raises(InputError, match=r"input\.glob: .*followed"):
            Source.open([f"/dev/fd/{read}"], exclude=Path("out"), parts=Parts())
        with pytest.raises(InputError, match=r"input\.glob: .*followed"):
            Source.open(["s3://rows/*"], exclude=Path("out"), parts=Parts())
    finally:
        os.close(read)
        os.close(write)


def test_what_was_added_is_known_where_the_hashes_of_the_run_are_not() -> None:
    add("a.jsonl", "1\n2\n")
    with Source.open(["*"], exclude=Path("out"), parts=Parts()) as source:
        digest = source.check(json_of).digest
    add("a.jsonl", "3\n")
    with Source.open(["*"], exclude=Path("out"), parts=Parts((("a.jsonl", 2),))) as source:
        source.check(json_of)
        assert source.added(Path("lost"), digest) == 1
        assert source.added(Path("lost"), "of other rows") == 0


def test_what_the_command_writes_is_nothing_that_comes() -> None:
    add("a.jsonl", "1\n")
    Path("out").mkdir()
    there = seen(["**"], InputFormat(), Path("out"))
    add("out/completions.jsonl", "1\n")
    assert seen(["**"], InputFormat(), Path("out")) == there
    add("b.jsonl", "2\n")
    assert seen(["**"], InputFormat(), Path("out")) != there


def test_a_followed_input_has_no_part_that_is_read() -> None:
    reading = InputReader(exclude=Path("out"), parts=Parts())
    with pytest.raises(ConfigError, match=r"input\.limit"):
        reading.input(QueuedInput(glob="*", limit=1), json_of)


class Said(NotesOnly):
    def __init__(self) -> None:
        super().__init__(lambda _: None)
        self.events: list[str] = []

    def event(self, name: str, message: str, /, **fields: Any) -> None:
        self.events.append(name)


async def test_a_followed_input_goes_on_when_a_file_changes_and_ends_when_it_is_told_to() -> None:
    add("a.jsonl", "1\n")
    said = Said()
    followed = FollowedInput(QueuedInput(glob=["a.jsonl"], follow=True), Path("out"), said)
    assert await followed.goes_on() and followed.turn == 1
    followed.ran(0.0)
    add("a.jsonl", "2\n")
    assert await followed.goes_on() and said.events == ["following"]
    followed.end()
    assert not await followed.goes_on() and said.events == ["following", "followed"]


async def test_a_followed_input_ends_when_nothing_came_for_long() -> None:
    followed = FollowedInput(QueuedInput(glob=["a.jsonl"], follow=True, stop_when_empty_s=1e-9), Path("out"), Said())
    assert await followed.goes_on() and not await followed.goes_on() and not followed.ending
