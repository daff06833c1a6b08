"""Files that are replaced whole, and locks that end with their holder."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from rollout.files import locked, replacing, try_lock


@pytest.mark.parametrize("shared", [False, True])
def test_a_file_is_replaced_whole_or_not_at_all(tmp_path: Path, shared: bool) -> None:
    path = tmp_path / "file"
    with replacing(path, shared=shared) as file:
        file.write(b"old")
    with pytest.raises(ZeroDivisionError), replacing(path, shared=shared) as file:
        file.write(b"ne")
        file.flush()
        assert path.read_bytes() == b"old"
        raise ZeroDivisionError
    assert path.read_bytes() == b"old" and list(tmp_path.iterdir()) == [path]


def test_a_secret_is_never_readable_by_others(tmp_path: Path) -> None:
    path = tmp_path / "key"
    path.with_name(".key.tmp").touch(0o644)  # of a write that was killed
    with replacing(path, durable=False, mode=0o600):
        (temporary,) = tmp_path.iterdir()
        assert temporary.stat().st_mode & 0o777 == 0o600
    assert path.stat().st_mode & 0o777 == 0o600


def test_several_processes_write_one_file(tmp_path: Path) -> None:
    path = tmp_path / "file"
    with replacing(path, shared=True) as first, replacing(path, shared=True) as second:
        first.write(b"first")
        second.write(b"second")
    assert path.read_bytes() == b"first"


def test_a_lock_ends_with_its_process(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    holds = f"import pathlib, sys; from rollout.files import locked\nwith locked(pathlib.Path({str(path)!r})):\n"
    holds += "    print(flush=True)\n    sys.stdin.read()\n"
    command = [sys.executable, "-c", holds]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder, path.open("ab") as file:
        assert holder.stdout is not None and holder.stdout.readline() == b"\n"
        assert not try_lock(file)
        holder.kill()
        holder.wait()
        assert try_lock(file)
    with locked(path), path.open("ab") as other:
        assert not try_lock(other)
