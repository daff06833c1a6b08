"""What `rollout run show` prints of a run."""

from __future__ import annotations

import pytest
from rollout.cli import show, show_run
from rollout.wire.v1 import runs_pb2 as pb


def test_what_a_run_waits_for(capsys: pytest.CaptureFixture[str]) -> None:
    waits = [
        pb.Wait(reason="executor", message="no worker hosts the executor rank", items=12, impossible=True),
        pb.Wait(reason="caps", message="the lane slow is full", items=3),
    ]
    status = pb.RunStatus(state="running", waits=waits)
    assert show.run_json(status)["waits"] == [
        {"reason": "executor", "message": "no worker hosts the executor rank", "items": 12, "impossible": True},
        {"reason": "caps", "message": "the lane slow is full", "items": 3, "impossible": False},
    ]
    show_run.print_run(status)
    out = capsys.readouterr().out
    assert "12 items: no worker hosts the executor rank (impossible with the workers that are connected)" in out
    assert "3 items: the lane slow is full" in out
    show_run.print_run(pb.RunStatus(state="running"))
    assert "waits" not in capsys.readouterr().out
