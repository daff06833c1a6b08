"""The input edge: what is found, what is said of it, and that rows come out as they were checked or not at all."""

from __future__ import annotations

import errno
import gzip
import json
import os
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from backports import zstd
from rollout.cli.boundary import FAILED, exit_code_of
from rollout.model.errors import InputChangedError, InputError, StorageFullError
from rollout.workloads import input_lines
from rollout.workloads.input_lines import Line, fail, json_of
from rollout.workloads.source import FAULTS_MAX, Source, UniqueIds


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write(path: str, *lines: Any) -> Path:
    found = Path(path)
    found.parent.mkdir(parents=True, exist_ok=True)
    found.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return found


def opened(*patterns: str, **options: Any) -> Source:
    options.setdefault("exclude", Path("out"))
    return Source.open(patterns, **options)


def names(*patterns: str, **options: Any) -> list[str]:
    with opened(*patterns, **options) as found:
        return [file.name for file in found.files]


def checked(*patterns: str, **options: Any) -> Source:
    found = opened(*patterns, **options)
    found.check(json_of)
    return found


def values(found: Source, start: int = 0) -> list[Any]:
    return [json.loads(line.raw) for line in found.rows(start)]


# ---- what patterns name


def test_each_pattern_sorted_and_no_file_twice(place: Path) -> None:
    for name in ("b", "a", "c"):
        write(f"d/{name}.jsonl", name)
    (place / "d" / "z.jsonl").symlink_to("a.jsonl")
    (place / "d" / "sub.jsonl").mkdir()
    write("[odd].jsonl", 1)
    assert names("d/c.jsonl", "d/*.jsonl", str(place / "d/b.jsonl")) == ["d/c.jsonl", "d/a.jsonl", "d/b.jsonl"]
    assert names("[odd].jsonl") == ["[odd].jsonl"]
    with opened("d/c.jsonl", "d/*.jsonl") as found:
        (note,) = found.notes
    assert note.startswith("input.glob: read once") and note.endswith(": d/c.jsonl, d/z.jsonl")


def test_every_pattern_that_is_wrong_is_named(place: Path) -> None:
    (place / "d").mkdir()
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind("s.jsonl")
        with pytest.raises(InputError) as error:
            opened("*.csv", "d", "s.jsonl", "/dev/null", "d/*")
    heading, *lines = error.value.message.splitlines()
    assert heading == "5 problems:" and [line.split(":")[0] for line in lines] == ["  input.glob"] * 5
    named = ("'*.csv'", "d/*.jsonl", "socket", "device", "'d/*'")
    assert [what in line for what, line in zip(named, lines, strict=True)] == [True] * 5


def test_a_wildcard_never_reaches_what_runs_write(place: Path) -> None:
    results = ("completions.jsonl", "errors.jsonl", "own.jsonl", "completions.01J00000000000000000000000.jsonl")
    for name in ("in.jsonl", *results, ".input/0.jsonl", "run-id", "deep/in.jsonl"):
        write(name, 1)
    for name in ("completions.jsonl", "more.jsonl", "run-id"):
        write(f"other/{name}", 1)
    here = {"exclude": place, "written": ["own.jsonl"]}
    assert names("*.jsonl", **here) == ["in.jsonl"]
    with pytest.raises(InputError, match=r"'\.\*/\*' .*: 1 were left out"):
        names(".*/*", **here)
    assert names("**/*.jsonl", **here) == ["deep/in.jsonl", "in.jsonl", "other/more.jsonl"]
    with opened("*.jsonl", "other/*.jsonl", **here) as found:
        (note,) = found.notes
    assert all(name in note for name in (*results, "other/completions.jsonl")) and "in.jsonl" not in note


def test_results_of_another_run_are_input_when_they_are_named(place: Path) -> None:
    for run in ("one", "two"):
        write(f"{run}/completions.jsonl", run)
        write(f"{run}/run-id", 1)
    assert names("one/completions.jsonl") == ["one/completions.jsonl"]
    assert names("*/completions.jsonl", exclude=place / "two") == ["one/completions.jsonl"]
    with pytest.raises(InputError, match=r"two/completions\.jsonl is what this run writes"):
        opened("two/completions.jsonl", exclude=place / "two")
    with pytest.raises(InputError, match="2 were left out"):
        opened("one/*", exclude=place)


# ---- the first reading


def test_lines_of_every_kind_of_file(place: Path) -> None:
    (place / "a.gz").write_bytes(gzip.compress(b'"a1"\n') + gzip.compress(b'"a2"'))
    (place / "b").write_bytes(b'\xef\xbb\xbf"b1"\r\n\n  \n"b2"\r\n')
    pack = zstd.compress
    (place / "c.zst").write_bytes(pack(b'"c1"\n"c') + pack(b'2"\n'))
    seen: list[tuple[int, int]] = []
    with opened("a.gz", "b", "c.zst") as found:
        report = found.check(json_of, progress=lambda rows, size: seen.append((rows, size)))
        lines = list(found.rows())
    assert [json.loads(line.raw) for line in lines] == ["a1", "a2", "b1", "b2", "c1", "c2"]
    assert [(line.index, line.where) for line in lines] == [
        (0, "a.gz:1"), (1, "a.gz:2"), (2, "b:1"), (3, "b:4"), (4, "c.zst:1"), (5, "c.zst:2")
    ]  # fmt: skip
    assert [(file.path, file.rows, file.bytes) for file in report.files] == [
        ("a.gz", 2, 8),
        ("b", 2, 8),
        ("c.zst", 2, 8),
    ]
    assert (report.rows, report.bytes) == (6, 24) and seen[-1] == (6, 24)


def test_all_faults_at_once_each_with_its_place(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(input_lines, "MAX_LINE", 100)
    (place / "a").write_bytes(b'1\n{"\n\xff\n' + b"[" * 90 + b'\n"' + b"x" * 200)
    (place / "t.gz").write_bytes(gzip.compress(b"1\n" * 9)[:-9])
    (place / "u.zst").write_bytes(zstd.compress(b"1\n" * 9)[:-1])
    with opened("a", "t.gz", "u.zst") as found, pytest.raises(InputError) as error:
        found.check(json_of)
    places = [line.split(": ")[:2] for line in error.value.message.replace("\n  ", "\n").splitlines()[1:]]
    assert [place for place, _ in places] == ["a:2", "a:3", "a:4", "a:5", "t.gz:10", "u.zst:1"]
    assert "not UTF-8 at byte 0" in places[1][1] and "the line is longer than" in places[3][1]
    assert places[4][1] == places[5][1] == "cannot read on"
    write("many", *(None for _ in range(3 * FAULTS_MAX)))
    with opened("many") as found, pytest.raises(InputError) as error:
        found.check(lambda line: fail(line.file, line.line, "no"))
    lines = error.value.message.splitlines()
    assert len(lines) == FAULTS_MAX + 3 and lines[100] == "  many:100: no" and lines[-2] == "  and 200 more: 200 x no"


def test_an_empty_input_and_a_file_that_cannot_be_read(place: Path) -> None:
    (place / "a").write_text("\n \n")
    with pytest.raises(InputError, match="the input is empty: no row in a"):
        checked("a")
    (place / "b").symlink_to("nowhere")
    with pytest.raises(InputError, match="cannot read b: No such file"):
        opened("*")


def test_ids_are_told_apart_by_the_text_they_become(place: Path) -> None:
    ids = UniqueIds()
    ids.add(Line(0, "a", 1, b""), "id", 1)
    ids.add(Line(1, "a", 3, b""), "id", "01")
    ids.add(Line(2, "b", 7, b""), "custom_id", "\ud800")
    with pytest.raises(InputError, match=r"^b:9: .*\"1\" is used by a:1"):
        ids.add(Line(3, "b", 9, b""), "id", "1")
    with pytest.raises(InputError, match=r"^c:1: .* is used by b:7"):
        ids.add(Line(4, "c", 1, b""), "id", "\ud800")
    for value in (True, 1.5, [1]):
        with pytest.raises(InputError, match="must be a string or an integer"):
            ids.add(Line(5, "c", 2, b""), "id", value)


def test_a_disk_that_is_full_is_said_to_be(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    write("a", 1)
    monkeypatch.setattr(Source, "_check", full)
    with opened("a") as found, pytest.raises(StorageFullError, match=r"index\.new"):
        found.check(json_of, index=place / "index")
    assert sorted(path.name for path in place.iterdir()) == ["a"]


# ---- the second reading


def test_rows_from_any_place_on(place: Path) -> None:
    write("a", 0, 1, 2)
    write("b")
    write("c", 3, 4)
    with checked("a", "b", "c") as found:
        for start in range(6):
            assert values(found, start) == list(range(start, 5))
            assert [line.index for line in found.rows(start)] == list(range(start, 5))


@pytest.mark.parametrize(
    ("content", "right", "said"),
    [
        (b"0\n1\n9\n3\n", 2, r"row 3 \(b:3\) is another than when it was checked"),
        (b"0\n1\n", 2, "b ends at row 2, 4 were checked: row 3 is missing"),
        (b"", 0, "b ends at row 0, 4 were checked: row 1 is missing"),
        (b"0\n1\n2\n3\n4\n", 4, r"row 5 \(b:5\) was not there when the input was checked: b grew beyond its 4 rows"),
        (b"0\n0\n1\n2\n3\n", 1, r"row 2 \(b:2\) is another"),
        (None, 0, "cannot read b: No such file.*\nrow 1 could be read"),
    ],
)
def test_a_file_that_changed_since_it_was_checked(place: Path, content: bytes | None, right: int, said: str) -> None:
    path = write("b", 0, 1, 2, 3)
    write("c", 4)
    with checked("b", "c") as found:
        if content is None:
            path.unlink()
        else:
            path.write_bytes(content)
        got: list[Any] = []
        with pytest.raises(InputChangedError, match=said) as error:
            got.extend(json.loads(line.raw) for line in _into(got, found.rows()))
        assert got == list(range(right)) and exit_code_of(error.value) == FAILED
        path.write_bytes(b"0\n1\n2\n3\n")  # whole again
        assert values(found) == [0, 1, 2, 3, 4]


def _into(got: list[Any], lines: Iterator[Line]) -> Iterator[Line]:
    for line in lines:
        got.append(json.loads(line.raw))
    return iter(())


def test_a_pipe_in_the_place_of_a_file_is_not_waited_for(place: Path) -> None:
    path = write("a", 0)
    with checked("a") as found:
        path.unlink()
        os.mkfifo(path)
        with pytest.raises(InputChangedError, match="no regular file any more"):
            values(found)


def test_a_file_that_appears_later_is_no_input(place: Path) -> None:
    write("a.jsonl", 0)
    with checked("*.jsonl") as found:
        write("b.jsonl", 1)
        assert values(found) == [0]


# ---- what changed since an earlier command


def test_the_first_row_that_changed_between_two_commands(place: Path) -> None:
    write("a", 1, 2, 3)
    index = place / "index"
    with opened("a") as found:
        digest = found.check(json_of, index=index).digest
        assert found.first_change(index, digest) is None  # nothing is known of an earlier one
        found.keep()
        assert values(found) == [1, 2, 3]

    def change(*rows: int) -> str | None:
        write("a", *rows)
        with opened("a") as found:
            found.check(json_of, index=index)
            return found.first_change(index, digest)

    assert change(1, 2, 3) is None
    for rows, place_, what in (
        ((1, 9, 3), "a:2", "another"),
        ((1, 2), "a:2", "removed"),
        ((1, 2, 3, 4), "a:4", "added"),
    ):
        told = change(*rows)
        assert told and f"({place_}) " in told and what in told
    index.write_bytes(index.read_bytes()[3:])
    assert change(1, 9, 3) is None  # damaged: nothing is known
    assert sorted(path.name for path in place.iterdir()) == ["a", "index"]


# ---- streams


def pipe(data: bytes) -> str:
    """A name for the reading end of a pipe that holds `data` and is closed."""
    reading, writing = os.pipe()
    os.write(writing, data)
    os.close(writing)
    return f"/dev/fd/{reading}"


def reused(name: str, data: bytes) -> None:
    """Another pipe, under the descriptor of `name`."""
    fresh = int(pipe(data).rpartition("/")[2])
    os.dup2(fresh, int(name.rpartition("/")[2]))
    os.close(fresh)


def stream(name: str, spool: Path, *, resumed: bool = True, said: list[str] | None = None) -> list[Any]:
    with opened(name, spool=spool, resumed=resumed) as found:
        if said is not None:
            said.extend(found.notes)
        found.check(json_of)
        return values(found)


def test_a_pipe_is_read_to_its_end_and_can_be_read_again(place: Path) -> None:
    name = pipe(b"1\n2\n")
    with checked(name, name) as found:  # no spool: as in a dry run
        assert values(found) == values(found) == [1, 2]
        assert [line.where for line in found.rows()] == [f"{name}:1", f"{name}:2"]
    assert list(place.iterdir()) == []
    assert stream(pipe(gzip.compress(b"3\n")), place / "s", resumed=False) == [3]


def test_standard_input_by_its_names(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = os.dup(0)
    try:
        for name in ("-", "/dev/stdin", "/dev/fd/0"):
            reused("/dev/fd/0", b"1\n")
            with checked(name, "-") as found:
                assert [line.where for line in found.rows()] in (["<stdin>:1"], ["/dev/fd/0:1"])
        reused("/dev/fd/0", b"")
        with pytest.raises(InputError, match=r"empty: .*<stdin>"):
            checked("-")
        os.close(0)
        with pytest.raises(InputError, match=r"<stdin>: .*not open"):
            checked("-")
    finally:
        os.dup2(kept, 0)
        os.close(kept)


def test_the_same_command_goes_on_with_the_copy_of_its_stream(place: Path) -> None:
    spool, name = place / "spool", pipe(b"1\n2\n3\n")
    assert stream(name, spool, resumed=False) == [1, 2, 3]
    said: list[str] = []
    assert stream(name, spool, said=said) == [1, 2, 3]  # nothing comes any more
    (told,) = said
    assert name in told and "copy" in told
    reused(name, b"1\n2\n3\n")
    assert stream(name, spool) == [1, 2, 3]  # the same comes again
    for other, line in ((b"1\n9\n3\n", 2), (b"1\n2\n", 3), (b"1\n2\n3\n4\n", 4)):
        reused(name, other)
        with pytest.raises(InputError, match=f"^{name}:{line}: "):
            stream(name, spool)
    os.close(int(name.rpartition("/")[2]))
    assert stream(name, spool) == [1, 2, 3]  # the descriptor is gone
    with pytest.raises(InputError, match="it is not open"):
        stream(name, spool, resumed=False)


def test_a_copy_that_is_damaged_is_made_anew(place: Path) -> None:
    spool, name = place / "spool", pipe(b"1\n2\n")
    stream(name, spool, resumed=False)
    (copy,) = spool.glob("*.stream")
    copy.write_bytes(b"1\n3\n")
    reused(name, b"1\n2\n")
    assert stream(name, spool) == [1, 2]
    (spool / "streams.json").write_text("{")
    reused(name, b"1\n2\n")
    assert stream(name, spool) == [1, 2]


def test_half_a_stream_is_none(place: Path) -> None:
    """Stopped while it is read: nothing is left that a later command could take for all of it."""
    name, spool = pipe(b"1\n"), place / "spool"

    def stop(text: str) -> None:
        raise InputError("stopped")

    with pytest.raises(InputError, match="stopped"):
        opened(name, spool=spool, tell=stop)
    assert not (spool / "streams.json").exists() and not list(spool.glob("*.stream"))
    reused(name, b"1\n2\n")
    assert stream(name, spool) == [1, 2]


def test_a_fifo_waits_for_its_writer_and_says_so(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rollout.workloads.spool._PATIENCE_S", 0.0)
    os.mkfifo("f")
    said = threading.Event()
    texts: list[str] = []

    def tell(text: str) -> None:
        texts.append(text)
        said.set()

    def write_late() -> None:
        said.wait()
        with (place / "f").open("wb") as file:
            for piece in (b"1\n", b"2\n"):
                file.write(piece)
                file.flush()

    writer = threading.Thread(target=write_late)
    writer.start()
    with checked("f", spool=place / "spool", tell=tell) as found:
        assert values(found) == [1, 2]
    writer.join()
    assert texts[0].startswith("waiting for somebody to write to f: it is a named pipe")
    assert stream("f", place / "spool") == [1, 2]  # nobody writes: the copy
    Path("f").unlink()
    assert stream("f", place / "spool") == [1, 2]  # it is gone: the copy
    os.mkfifo("f")
    writing = os.open("f", os.O_RDWR)
    os.write(writing, b"3\n")
    with pytest.raises(InputError, match="f:1: "):
        stream("f", place / "spool")  # somebody writes: it is heard
    os.close(writing)


def test_nobody_at_a_fifo_can_be_interrupted(place: Path) -> None:
    os.mkfifo("f")

    def stop(text: str) -> None:
        raise InputError("stopped")

    with pytest.raises(InputError, match="stopped"):
        opened("f", tell=stop)


def test_rows_left_out_come_again_with_their_fault(place: Path) -> None:
    (place / "a").write_bytes(b'1\n{"\n2\n')
    (place / "b").write_bytes(b'{"k": 1, "k": 2}\n3\n' + b"9" * 5000 + b"\n")
    with opened("a", "b") as found:
        report = found.check(json_of, skip=True)
        assert (report.rows, report.invalid, len(report.faults)) == (6, 3, 3)
        faults = [line.fault for line in found.rows()]
        assert [bool(fault) for fault in faults] == [False, True, False, True, False, True]
        assert faults[1].startswith("malformed JSON: ") and "b:1" not in faults[3]
        assert "'k' stands twice" in faults[3] and "4,300 digits" in faults[5]
        assert [line.fault for line in found.rows(3)] == faults[3:]
    with opened("a", "b") as found, pytest.raises(InputError, match=r"(?s)a:2: .*b:1: .*b:3: "):
        found.check(json_of)


def test_an_input_without_a_usable_row_is_refused(place: Path) -> None:
    write("a", 1, 2)
    with opened("a") as found, pytest.raises(InputError, match="a:1: no\n  a:2: no"):
        found.check(lambda line: fail(line.file, line.line, "no"), skip=True)


def test_compressed_files_are_known_by_their_content(place: Path) -> None:
    (place / "plain").write_bytes(gzip.compress(b"1\n"))
    (place / "other.gz").write_bytes(zstd.compress(b"2\n"))
    with checked("plain", "other.gz") as found:
        assert values(found) == [1, 2]
