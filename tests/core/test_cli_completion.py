"""What a shell offers for a run: asked of the cluster that stands earlier on the line."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rollout.cli.__main__ import app
from rollout.cli.program import command_of
from rollout.client import target as targets
from rollout.client.private import DATABASE, STATE_DIR, remember_address
from rollout.wire.v1 import runs_pb2 as pb

RUN = "01M8DRKDWQHJH10XCQ7C0EKZ52"


class Known:
    async def list(self, limit: int) -> list[pb.RunStatus]:
        return [pb.RunStatus(spec=pb.RunSpec(run_id=RUN, name="mine"), state="running")]


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """The addresses of the clusters that were asked. There is a private one in `out`, and a context `east`."""
    found: list[str] = []

    @asynccontextmanager
    async def connected(target: targets.Target, **_: Any) -> AsyncGenerator[Known, None]:
        found.extend(target.addresses)
        yield Known()

    monkeypatch.setattr(targets, "connected", connected)
    contexts = SimpleNamespace(known={}, current="", get=lambda name: SimpleNamespace(  # pyright: ignore
        tls_dir="tls", coordinator_addrs=[f"{name}:1"], cluster="rollout"))  # fmt: skip
    monkeypatch.setattr(targets.Contexts, "read", lambda: contexts)
    monkeypatch.chdir(tmp_path)
    state = tmp_path / "out" / STATE_DIR
    state.mkdir(parents=True)
    for name in (DATABASE, "coordinator.toml"):
        (state / name).touch()
    remember_address(state, "127.0.0.1:7")
    return found


@pytest.mark.parametrize(
    ("typed", "address"),
    [
        ("--dir out", "127.0.0.1:7"),
        ("--context east", "east:1"),
        ("--coordinator h:1", "h:1"),
        ("", "127.0.0.1:7"),
    ],
)
def test_the_cluster_that_the_line_names_is_asked(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], asked: list[str], typed: str, address: str
) -> None:
    line = f"rollout run show {typed}".split()
    monkeypatch.setenv("_ROLLOUT_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", " ".join([*line, ""]))
    monkeypatch.setenv("COMP_CWORD", str(len(line)))
    with pytest.raises(SystemExit):
        command_of(app, "rollout")(prog_name="rollout")
    assert capsys.readouterr().out.split() == ["@last", "mine"]
    assert asked == [address]
