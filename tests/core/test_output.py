"""The output edge: what is in the files is what was written, or it is written anew."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rollout.cli.boundary import FAILED, exit_code_of
from rollout.model.errors import (
    ConfigError,
    OutputChangedError,
    StateError,
    StorageError,
    StorageFullError,
)
from rollout.workloads import output
from rollout.workloads.json_form import dump_line
from rollout.workloads.output import (
    STATE,
    OutputDirectory,
    ResultFiles,
    changed_files,
    holder_of,
    saved_state,
    seal,
    unseal,
)

RUN = "01J00000000000000000000000"
OTHER = "01J00000000000000000000001"
NAMES = ("results.jsonl", "errors.jsonl")
Change = Callable[[Path], Any]


def files(directory: Path, run: str = RUN, names: tuple[str, ...] = NAMES) -> ResultFiles:
    return ResultFiles(directory, run, names)


def collect(directory: Path, upto: int, *, finish: bool = False) -> tuple[int, list[str]]:
    """Entry n of the log is the line n; the cursor that was begun with, and what was wrong."""
    found = files(directory)
    faults = found.begin()
    begun = found.cursor
    for n in range(begun, upto):
        found.append(NAMES[n % 3 == 2], b"%d\n" % n)
    if finish:
        found.finish(upto, {"rows": upto}, {"run_id": RUN})
    else:
        found.save(upto, {"rows": upto})
    found.close()
    return begun, faults


def whole(directory: Path, upto: int) -> None:
    """Every entry once, in order, and nothing else."""
    for number, name in enumerate(NAMES):
        expected = b"".join(b"%d\n" % n for n in range(upto) if (n % 3 == 2) == number)
        assert (directory / name).read_bytes() == expected


def edit(path: Path) -> None:
    path.write_bytes(path.read_bytes().replace(b"0\n", b"8\n"))


def exchange(path: Path) -> None:
    path.with_suffix(".copy").write_bytes(path.read_bytes())
    path.with_suffix(".copy").replace(path)


def append(path: Path) -> None:
    with path.open("ab") as file:
        file.write(b"more")


DAMAGES: list[tuple[Change, str]] = [
    (lambda path: os.truncate(path, 0), "was cut from 8 to 0 bytes"),
    (lambda path: os.truncate(path, 5), "was cut from 8 to 5 bytes"),
    (append, "was written to by another program"),
    (edit, "was edited"),
    (Path.unlink, "was deleted"),
    (exchange, "was replaced"),
]


@pytest.mark.parametrize(("damage", "said"), DAMAGES)
@pytest.mark.parametrize("when", ["save", "finish"])
def test_damage_while_it_is_written(tmp_path: Path, damage: Change, said: str, when: str) -> None:
    found = files(tmp_path)
    for n in range(6):
        found.append(NAMES[n % 3 == 2], b"%d\n" % n)
    found.save(6, {})
    damage(tmp_path / NAMES[0])
    found.append(NAMES[0], b"6\n")
    with pytest.raises(OutputChangedError, match=said) as error:
        found.save(7, {}) if when == "save" else found.finish(7, {}, {})
    assert exit_code_of(error.value) == FAILED
    assert found.cursor == 6
    found.restart()
    assert found.cursor == 0
    for n in range(7):
        found.append(NAMES[n % 3 == 2], b"%d\n" % n)
    found.finish(7, {}, {"run_id": RUN})
    found.close()
    whole(tmp_path, 7)
    assert collect(tmp_path, 7) == (7, [])


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda path: os.truncate(path, 0), "was cut to 0 of 8 bytes"),
        (lambda path: os.truncate(path, 5), "was cut to 5 of 8 bytes"),
        (edit, "is not what was written"),
        (Path.unlink, "is missing"),
    ],
)
def test_damage_between_two_commands(tmp_path: Path, damage: Change, said: str) -> None:
    collect(tmp_path, 6)
    path, other = (tmp_path / name for name in NAMES)
    damage(path)
    left = path.read_bytes() if path.exists() else None
    found = files(tmp_path)
    (fault,) = found.begin()
    assert fault.startswith(f"{path} {said}") and found.cursor == 0
    found.close()
    assert (path.read_bytes() if path.exists() else None) == left and other.read_bytes() == b"2\n5\n"
    assert collect(tmp_path, 6)[0] == 0
    whole(tmp_path, 6)


def test_what_follows_the_saved_length_is_cut_off(tmp_path: Path) -> None:
    """The rest of a line, of a command that was killed."""
    collect(tmp_path, 6)
    append(tmp_path / NAMES[0])
    assert collect(tmp_path, 7) == (6, [])
    whole(tmp_path, 7)


def test_a_file_that_nobody_changed_is_not_written_anew(tmp_path: Path) -> None:
    found = files(tmp_path)
    for n in range(12):
        found.append(NAMES[0], b"%d\n" % n)
        found.save(n + 1, {})
        (tmp_path / NAMES[0]).touch()
        (tmp_path / NAMES[0]).chmod(0o600 + n % 2 * 0o40)
    found.finish(12, {}, {})
    found.close()
    assert (tmp_path / NAMES[0]).read_bytes().count(b"\n") == 12
    assert collect(tmp_path, 12) == (12, [])


def test_the_end_looks_at_all_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the times of the file system say nothing."""
    monkeypatch.setattr(output, "_FALSE_ALARMS", 0)
    found = files(tmp_path)
    found.append(NAMES[0], b"10\n")
    found.save(1, {})
    edit(tmp_path / NAMES[0])
    found.append(NAMES[0], b"2\n")
    found.save(2, {})
    with pytest.raises(OutputChangedError, match="was edited"):
        found.finish(2, {}, {})
    found.close()
    assert found.summary is None and not (tmp_path / "summary.json").exists()


def test_the_summary_is_believed_only_as_it_was_written(tmp_path: Path) -> None:
    collect(tmp_path, 6, finish=True)

    def summary() -> Any:
        found = files(tmp_path)
        found.begin()
        found.close()
        return found.summary

    assert summary() == {"run_id": RUN}
    (tmp_path / "summary.json").write_text('{"run_id": "another"}')
    assert summary() is None
    (tmp_path / "summary.json").unlink()
    assert summary() is None
    collect(tmp_path, 7, finish=True)
    assert summary() == {"run_id": RUN}
    os.truncate(tmp_path / NAMES[1], 1)
    assert summary() is None


def test_a_state_that_is_damaged_or_of_something_else(tmp_path: Path) -> None:
    collect(tmp_path, 6)
    state = (tmp_path / STATE).read_bytes()
    for damaged in (b"", b"{", b"[]", state[:-5], state.replace(b'"cursor":6', b'"cursor":5')):
        (tmp_path / STATE).write_bytes(damaged)
        begun, faults = collect(tmp_path, 6)
        assert begun == 0 and "is damaged or missing" in faults[0]
        whole(tmp_path, 6)
    other = files(tmp_path, OTHER)
    assert other.begin() == [] and other.cursor == 0
    more = files(tmp_path, names=("results.jsonl",))
    assert "other result files" in more.begin()[0]
    more.close()
    assert unseal(seal({"a": [1.5, None, "\u2028"]})) == {"a": [1.5, None, "\u2028"]}


def test_a_command_that_was_killed_before_it_saved_anything_left_no_damage(tmp_path: Path) -> None:
    began = files(tmp_path)
    began.restart()
    began.close()
    assert collect(tmp_path, 3) == (0, [])
    whole(tmp_path, 3)


@pytest.mark.parametrize("damage", [edit, Path.unlink, lambda path: os.truncate(path, 2)])
def test_files_are_compared_with_what_was_saved_and_left_as_they_are(tmp_path: Path, damage: Change) -> None:
    collect(tmp_path, 6)
    append(tmp_path / NAMES[1])  # by a command that goes on
    assert changed_files(tmp_path) == []
    damage(tmp_path / NAMES[0])
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    (fault,) = changed_files(tmp_path)
    assert fault.startswith(f"{tmp_path / NAMES[0]} ")
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_who_holds_a_directory_is_said(tmp_path: Path) -> None:
    assert holder_of(tmp_path) == ""
    with OutputDirectory.open(tmp_path, "rollout of a test"):
        assert holder_of(tmp_path).startswith(f"pid {os.getpid()} on ")
    assert holder_of(tmp_path) == ""


def test_an_empty_file_that_is_missing_is_made(tmp_path: Path) -> None:
    collect(tmp_path, 2)
    (tmp_path / NAMES[1]).unlink()
    assert collect(tmp_path, 3) == (2, [])
    whole(tmp_path, 3)


def test_something_else_in_the_place_of_a_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / NAMES[0])
    found = files(tmp_path)
    with pytest.raises(StorageError, match="it is no regular file"):
        found.save(0, {})
    found.close()


def test_a_disk_that_is_full_for_a_while(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was written of a line before the disk was full is not written again."""
    found = files(tmp_path)
    real = os.write

    def full(fd: int, data: bytes) -> int:
        if len(data) > 3:
            return real(fd, data[:3])
        raise OSError(errno.ENOSPC, "No space left on device")

    for n in range(6):
        found.append(NAMES[n % 3 == 2], b"%d\n" % n)
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", full)
        with pytest.raises(StorageFullError, match="free some space and run the same command again"):
            found.save(6, {})
    assert (tmp_path / NAMES[0]).stat().st_size == 6
    found.save(6, {})
    found.close()
    whole(tmp_path, 6)
    state = saved_state(tmp_path)
    assert state is not None and state["cursor"] == 6


@pytest.mark.parametrize("kill_at", range(1, 30))
def test_killed_anywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kill_at: int) -> None:
    """The n-th system call that makes something durable is the last one before the process dies."""
    calls = 0
    real_sync, real_replace = os.fsync, Path.replace

    class KilledError(BaseException):
        pass

    def tick() -> None:
        nonlocal calls
        calls += 1
        if calls == kill_at:
            raise KilledError

    def sync(fd: int) -> None:
        tick()
        real_sync(fd)

    def replace(self: Path, target: Path) -> Path:
        tick()
        return real_replace(self, target)

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", sync)
        patch.setattr(Path, "replace", replace)
        try:
            for upto in (4, 8, 12):
                collect(tmp_path, upto, finish=upto == 12)
        except KilledError:
            pass
        else:
            assert kill_at > calls
    _, faults = collect(tmp_path, 12, finish=True)
    assert faults == [] or not saved_before(kill_at)
    whole(tmp_path, 12)


def saved_before(kill_at: int) -> bool:
    """Whether the first state was in its place: two files and the temporary one are synced, then it is renamed."""
    return kill_at > 4


# ---- whose directory


def test_whose_directory(tmp_path: Path) -> None:
    settings = {"a": 1}
    with OutputDirectory.open(tmp_path) as out:
        assert out.check(None) is None and out.check(OTHER) == OTHER
        out.claim(RUN, settings, kept={"b": 2})
        assert (tmp_path / "run-id").read_text() == f"{RUN}\n"
        assert out.check(None) == RUN and (out.stored_config, out.kept) == (settings, {"b": 2})
        with pytest.raises(ConfigError, match=f"belongs to run {RUN[-8:]}, not {OTHER[-8:]}"):
            out.check(OTHER)
        with pytest.raises(StateError, match=f"another command .pid {os.getpid()} on "):
            OutputDirectory.open(tmp_path)
        collect(tmp_path, 3)
    (tmp_path / "run-id").unlink()  # forces a fresh run; what is there is moved aside
    with OutputDirectory.open(tmp_path) as out:
        assert out.check(None) is None
        assert f"results.{RUN}.jsonl" in out.claim(OTHER, settings)
    assert (tmp_path / f"results.{RUN}.jsonl").read_bytes() == b"0\n1\n"
    for number in (1, 2):  # nobody knows whose these are; the second replaces nothing
        (tmp_path / "run-id").unlink()
        (tmp_path / "results.jsonl").write_text(f"{number}\n")
        with OutputDirectory.open(tmp_path) as out:
            out.claim(OTHER, settings)
    assert [(tmp_path / f"results.unknown{n}.jsonl").read_text() for n in ("", ".2")] == ["1\n", "2\n"]
    (tmp_path / "run-id").write_text("nonsense")
    with OutputDirectory.open(tmp_path) as out, pytest.raises(ConfigError, match="no run id"):
        out.check(None)


def test_a_directory_that_nobody_claimed_is_gone(tmp_path: Path) -> None:
    fresh = tmp_path / "out"
    with OutputDirectory.open(fresh) as out:
        out.spool_path.mkdir()
        (out.spool_path / "copy").touch()
    assert not fresh.exists()
    with OutputDirectory.open(fresh) as out:
        out.claim(RUN, {})
    with OutputDirectory.open(fresh) as out:
        assert out.run_id == RUN


def test_the_stored_configuration_is_believed_only_as_it_was_written(tmp_path: Path) -> None:
    with OutputDirectory.open(tmp_path) as out:
        out.claim(RUN, {"seed": 1})
        path = tmp_path / ".run.json"
        path.write_bytes(path.read_bytes().replace(b'"seed":1', b'"seed":2'))
        assert (out.stored_config, out.kept) == (None, {})


def test_a_directory_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"output\.dir: cannot write"):
        OutputDirectory.open(tmp_path / "file" / "out")
    (tmp_path / "dead").symlink_to("nowhere")
    for name, why in (
        ("dead", "link that leads nowhere"),
        ("file", "it is a file"),
        ("x" * 300, "File name too long"),
        ("a\0b", "null (byte|character)"),
    ):
        with pytest.raises(ConfigError, match=f"cannot write .*{why}"):
            OutputDirectory.open(tmp_path / name)


def test_atomic_write_keeps_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "f"
    output.write_atomically(path, b"old")

    def full(fd: int) -> None:
        raise OSError(errno.ENOSPC, "full")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(StorageFullError):
        output.write_atomically(path, b"new")
    assert path.read_bytes() == b"old"


def test_the_cursor_is_saved_after_the_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
    collect(tmp_path, 3)
    assert set(NAMES) <= set(done[: done.index(f"-> {STATE}")])
    assert json.loads((tmp_path / STATE).read_text())["value"]["cursor"] == 3


def test_a_line_is_one_line_to_every_reader() -> None:
    value = {"a\u2028": "x\x85y\u2029z\x0b\x1c é"}
    line = dump_line(value).decode()
    assert len(line.splitlines()) == 1 and json.loads(line) == value and "é" in line
