"""Ids in tables: short where a person reads, whole where a program does."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from rollout.cli.references import means, resolve_run
from rollout.cli.show import seen
from rollout.wire.v1 import runs_pb2 as pb

RUN = "01M8DRKDWQHJH10XCQ7C0EKZ52"


@pytest.mark.parametrize(("terminal", "shown"), [(True, "7C0EKZ52"), (False, RUN)])
def test_an_id_in_a_table(monkeypatch: pytest.MonkeyPatch, terminal: bool, shown: str) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: terminal)
    assert seen(RUN) == shown


def test_what_stands_for_an_id() -> None:
    assert all(means(RUN, text) for text in ("01M8", "01m8drkd", "7C0E", "7c0ekz52", "0", RUN))
    assert not any(means(RUN, text) for text in ("KZ52", "C0EK", "01M9", f"{RUN}X"))


async def test_the_last_run_is_none_that_only_looks_at_another(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    looks = pb.RunStatus(spec=pb.RunSpec(run_id="V" * 26, workload="train", config=b'{"verifies": "R"}'))
    trained = pb.RunStatus(spec=pb.RunSpec(run_id=RUN, workload="train", config=b"{}"))

    class Client:
        async def list(self, *, limit: int) -> list[pb.RunStatus]:
            return [looks, trained][:limit]

    client: Any = Client()
    assert await resolve_run(client, "@last") == RUN
