"""Temporary directories of processes that were killed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from rollout.config.scratch import Scratch

KILLED = """
import os, sys
from rollout.config.scratch import Scratch
made = Scratch("rollout-test-")
os.kill(os.getpid(), 9)
"""


def test_what_a_killed_process_left_goes_with_the_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    subprocess.run([sys.executable, "-c", KILLED], env={**os.environ, "TMPDIR": str(tmp_path)}, check=False)
    (left,) = tmp_path.iterdir()
    (left / "file").touch()
    with Scratch("rollout-test-") as alive:
        assert left.exists(), "who made it may still be about to lock it"
        for one in (left, Path(alive)):
            os.utime(one, (1, 1))
        with Scratch("rollout-test-") as other:
            assert sorted(tmp_path.iterdir()) == sorted([Path(alive), Path(other)])
    assert not list(tmp_path.iterdir())
