"""A child process that breaks its protocol, and a database with another cluster's CA: who pays."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rollout.config.settings import EmbeddedStorage, StorageSection
from rollout.model.errors import ConfigError
from rollout.security.authority import Authority
from rollout.storage import open_storage
from rollout_coordinator.lifecycle import Coordinator
from rollout_worker import session_events as ev
from rollout_worker.attempts import Plan
from rollout_worker.executors.port import Run
from rollout_worker.processes.child import ChildProcess
from rollout_worker.processes.kinds import Kind


async def test_a_process_that_breaks_the_protocol_is_killed_and_tells_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[Any] = []
    killed: list[int] = []
    guard: Any = SimpleNamespace(add=lambda group: None, remove=lambda group: None)
    plan = Plan(Run("01ARZ3NDEKTSV4RRFFQ69G5FAV", "script", {}, ""), "slot", "k")
    handlers: Any = SimpleNamespace(event=told.append, shipper=None)
    child = ChildProcess(ev.StartChild(7, plan), tmp_path, tmp_path, guard, handlers)
    monkeypatch.setattr(child, "kill", lambda: killed.append(7))
    child._frame(Kind.RESULTS, b"\xff\xff garbage")
    assert killed == [7] and not told


async def test_a_coordinator_with_another_ca_is_refused(tmp_path: Path) -> None:
    storage = open_storage(StorageSection(embedded=EmbeddedStorage(path=str(tmp_path / "db"))))
    await storage.open()
    coordinator: Any = object.__new__(Coordinator)
    coordinator._parts = SimpleNamespace(storage=storage)
    for name in ("one", "one"):
        await coordinator._check_authority(Authority.load_or_create(tmp_path / name, "c"), tmp_path / name)
    with pytest.raises(ConfigError, match="not the one of the other coordinators"):
        await coordinator._check_authority(Authority.load_or_create(tmp_path / "two", "c"), tmp_path / "two")
    await storage.close()
