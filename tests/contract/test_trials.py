"""Trials over the providers of this host: what a task, an agent and a verifier may do, and what comes of it."""

from __future__ import annotations

from pathlib import Path

import pytest
from job_files import make_task
from trial_rig import job, rig

TESTS = '[ "$(cat hello.txt 2>/dev/null)" = hello ] && reward=1 || reward=0; echo $reward > /logs/verifier/reward.txt\n'
MINE = {
    "name": "mine",
    "install": "touch /tmp/installed",
    "execute": "test -e /tmp/installed && echo hello > hello.txt",
}


@pytest.mark.parametrize("provider", ["process", "bubblewrap"])
async def test_the_oracle_passes_and_nobody_fails(provider: str, tmp_path: Path) -> None:
    task = make_task(tmp_path / "t", files={"tests/test.sh": TESTS})
    async with rig(job(provider, {"name": "oracle"}, {"name": "nop"}, MINE), tmp_path / "rig", task) as trials:
        rewards = {agent: (await trials.attempt(task, agent=agent)).rewards for agent in ("oracle", "nop", "mine")}
        assert trials.boxes() == []
    assert rewards == {"oracle": {"reward": 1.0}, "nop": {"reward": 0.0}, "mine": {"reward": 1.0}}
