"""A private run that nobody works at: which command goes on with it."""

from __future__ import annotations

from pathlib import Path

import pytest
from rollout.cli.commands.run import refuse_idle
from rollout.client.private import remember_command
from rollout.model.errors import StateError
from rollout.wire.v1 import runs_pb2 as pb


@pytest.mark.parametrize(
    ("state", "ended_by", "command"),
    [
        ("interrupted", "", "rollout map a:b --output out"),
        ("killed", "operator on host desk", "rollout map a:b --output out --resume @last"),
        ("killed", "", "rollout map a:b --output out"),
        ("completed", "", ""),
    ],
)
def test_the_command_that_goes_on_is_one_that_works(tmp_path: Path, state: str, ended_by: str, command: str) -> None:
    remember_command(tmp_path, "rollout map a:b --output out")
    said = ""
    try:
        refuse_idle(pb.RunStatus(state=state, ended_by=ended_by), "pause", tmp_path)
    except StateError as error:
        said = error.message
    assert said.partition("there is nothing to pause; it goes on with: ")[2] == command


def test_a_workload_may_name_a_command_of_its_own(tmp_path: Path) -> None:
    remember_command(tmp_path, "rollout experiment run e.yaml")
    with pytest.raises(StateError, match="goes on with: rollout experiment continue e"):
        refuse_idle(pb.RunStatus(state="killed", ended_by="me"), "resume", tmp_path, "rollout experiment continue e")
