"""How long a batch waits for a coordinator that does not answer."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, ClassVar

import pytest
from rollout.cli import command_cluster, session
from rollout.cli.work_options import Options
from rollout.config.load import load_settings
from rollout.model.errors import UnavailableError
from rollout.workloads.infer.config import InferConfig
from rollout.workloads.infer.workload import Infer


class Away:
    """A client of a coordinator that is away."""

    address = "10.0.0.1:7000"
    addresses: ClassVar = [address]

    async def get(self, run_id: str) -> None:
        raise UnavailableError("nobody answers")

    async def open(self, *_: Any, **__: Any) -> None:
        raise UnavailableError("nobody answers")


def test_a_batch_that_was_begun_waits_for_its_coordinator_for_longer_than_one_that_was_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A new one has probably been given a wrong address; one that goes on has spoken to it."""
    waited: list[float] = []

    @asynccontextmanager
    async def connected(*_: Any, patience_s: float, **__: Any) -> AsyncGenerator[Any]:
        waited.append(patience_s)
        yield Away()

    monkeypatch.setattr(command_cluster, "connected", connected)
    (tmp_path / "in.jsonl").write_text('{"prompt": "x"}\n')
    config = tmp_path / "batch.toml"
    config.write_text(
        f'[model]\nuri = "mock"\n[backend]\nkind = "mock"\n[input]\nglob = "{tmp_path}/in.jsonl"\n'
        f'[output]\ndir = "{tmp_path}/out"\n'
    )
    settings = load_settings(InferConfig, config)
    options = Options(words=("rollout",), coordinators=(Away.address,), tls_dir=tmp_path, json=True)
    for _ in range(2):
        with pytest.raises(UnavailableError):
            session.run_workload(Infer(), settings, options)
    assert waited == [20.0, 900.0]
