"""Tests of frameworks that are commands, on a worker: one that ends or hangs its command costs itself."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import ClassVar

import pytest
from rollout.workloads.test.cases import Batch, BatchResult, CaseResult, Outcome, Try
from rollout.workloads.test.frameworks.port import Command, Discovered, Ended, Framework, Group
from rollout.workloads.test.project import Project
from rollout.workloads.test.run_config import GroupConfig
from rollout_worker.testing import commands
from rollout_worker.testing.commands import CommandHost
from rollout_worker.testing.place import LocalPlace

SCRIPT = """out=$1; shift
for id; do case $id in dies*) exit 9;; killed) kill -9 $$;; hangs*) sleep 60;; lost*) ;; *) echo "$id" >> "$out/passed";; esac; done"""


class Passing(Framework):
    """Each test that its command came to has passed."""

    name: ClassVar[str] = "passing"

    def group_config(self, project: Project, group: Group) -> GroupConfig:
        return GroupConfig(framework=self.name, options={})

    def discover(self, project: Project, group: Group, config: GroupConfig, tell: Callable[[str], None]) -> Discovered:
        return Discovered(())

    def command(self, batch: Batch, config: GroupConfig, result_dir: str) -> Command:
        return Command(("/bin/sh", "-c", SCRIPT, "sh", result_dir, *batch.ids), batch.limit_s)

    def results(self, batch: Batch, config: GroupConfig, result_dir: Path, ended: Ended) -> BatchResult:
        file = result_dir / "passed"
        ids = file.read_text().split() if file.exists() else []
        passed = (Try(outcome=Outcome.PASSED),)
        return BatchResult(cases=tuple(CaseResult(id=id, group="g", tries=passed) for id in ids))


async def test_what_ends_or_hangs_its_command_costs_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(commands, "GRACE_S", 0.0)
    host = CommandHost(LocalPlace(Path(), tmp_path, {}), Passing(), "g", GroupConfig(options={}))
    ids = ["dies1", "a", "b", "dies2", "c", "hangs", "d", "lost", "killed"]
    told: list[int] = []
    tries: dict[str, Try] = {}
    await host.run(ids, 1.0, lambda doing: told.append(doing.done), tries)
    assert {id: tries[id].outcome.value for id in ids} == dict.fromkeys(ids, "passed") | {
        "dies1": "error",
        "dies2": "error",
        "hangs": "timeout",
        "lost": "error",
        "killed": "crashed",
    }
    assert "9" in tries["dies1"].message and told[-1] == len(ids)
    assert all(one.started and one.process for one in tries.values())


async def test_a_command_that_cannot_be_started_is_an_error(tmp_path: Path) -> None:
    class Missing(Passing):
        def command(self, batch: Batch, config: GroupConfig, result_dir: str) -> Command:
            return Command(("nosuchprogram",))

    host = CommandHost(LocalPlace(Path(), tmp_path, {}), Missing(), "g", GroupConfig(options={}))
    tries: dict[str, Try] = {}
    await host.run(["a"], 0.0, lambda doing: None, tries)
    assert tries["a"].outcome is Outcome.ERROR and "nosuchprogram" in tries["a"].message
