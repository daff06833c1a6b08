"""Daemons that load their modules and wait: they run when they are given a log, and else end without a word."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from rollout.processes.standby import standby


@pytest.mark.parametrize("package", ["rollout_coordinator", "rollout_worker"])
def test_it_runs_with_its_output_in_the_log(tmp_path: Path, package: str) -> None:
    log = tmp_path / "log"
    log.write_text("before\n")
    done = subprocess.run(standby(package, "version"), input=bytes(log), stdout=subprocess.PIPE, timeout=60)
    assert done.returncode == 0 and done.stdout == b""
    before, line = log.read_text().splitlines()
    assert before == "before" and package.replace("_", "-") in line


def test_without_a_log_it_ends(tmp_path: Path) -> None:
    words = standby("rollout_worker", "run", "--config", str(tmp_path / "nosuch.toml"))
    done = subprocess.run(words, input=b"", capture_output=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")
