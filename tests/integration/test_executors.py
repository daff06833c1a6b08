"""Runs of several executors on workers that host one each, through real processes."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import prefork
import pytest
from cluster import Node, binary
from engine_cluster import Engine, done, until
from rollout.client.runs import new_ulid
from rollout.model.run import RunSpec

THIRD_PARTY = Path(__file__).parent / "third_party"
TOLD = {"warm": {"degrees": 40, "executors": {"cold": {"degrees": 4}}}, "cold": {"degrees": 4}}
"""What each executor reads of the run's configuration: the workload's own all of it, another its section."""


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What pip leaves of a package with these entry points, for the daemons that start from here on."""
    about = tmp_path / "site" / "two_tones-1.0.dist-info"
    about.mkdir(parents=True)
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: two_tones\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text("[rollout.executors]\nwarm = two_tones:Warm\ncold = two_tones:Cold\n")
    monkeypatch.setenv("PYTHONPATH", f"{about.parent}:{THIRD_PARTY}")


def hosting(engine: Engine, executor: str) -> Node:
    options: dict[str, Any] = {"slots": 2, "executors": [executor]}
    return engine.cluster.add_worker(worker=options)


def shown(engine: Engine, run_id: str) -> str:
    """What `rollout run show` prints."""
    command = [binary("rollout"), "run", "show", run_id, *engine.cluster.operator()]
    return prefork.run(command, text=True).stdout


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize("rough_cluster", ["sqlite"], indirect=True)
async def test_a_run_of_two_executors_on_workers_that_host_one_each(rough: Engine) -> None:
    """Parents of one ask children of the other. The only worker of those is killed while it runs some."""
    warm, cold = hosting(rough, "warm"), hosting(rough, "cold")
    pids = {"warm": {warm.process.pid}, "cold": {cold.process.pid}} if warm.process and cold.process else {}
    does = {"effects": rough.effects_file}
    gated = does | {"until": str(rough.gate())}
    items = [
        rough.item(does | {"ask": ["cold", [gated, gated, does | {"ask": ["warm", [does]]}]]}) if n % 2 else
        rough.item(does, executor="cold")
        for n in range(12)
    ]  # fmt: skip
    run = RunSpec(new_ulid(), "warm", json.dumps(TOLD["warm"]).encode())
    await rough.client.submit(run, lambda seq: iter(items[seq:]))

    def begun(name: str) -> list[str]:
        path = Path(rough.effects_file)
        return [line for line in path.read_text().splitlines() if line.startswith(name)] if path.exists() else []

    # Children that wait for the gate may have both slots before the items of the run itself begin.
    await until(lambda: begun("warm") and len(begun("cold")) >= 2, "items of both executors to begin")
    await asyncio.to_thread(cold.kill)
    status = await rough.status(
        run.run_id, lambda status: any(wait.impossible for wait in status.waits), "somebody to say what it waits for"
    )
    assert "'cold'" in status.waits[0].message
    assert status.waits[0].message in await asyncio.to_thread(shown, rough, run.run_id)

    rough.gate().touch()
    cold = hosting(rough, "cold")
    assert cold.process is not None
    pids["cold"].add(cold.process.pid)
    entries, status = await rough.finish(run.run_id, payloads=True)

    answer = {"told": TOLD["cold"], "answers": []}
    asked = {"told": TOLD["cold"], "answers": [{"told": TOLD["warm"], "answers": []}]}
    parent = {"told": TOLD["warm"], "answers": [answer, answer, asked]}
    assert [json.loads(data) for data in done(entries)] == [parent if n % 2 else answer for n in range(12)]
    assert (status.state, status.done, list(status.waits)) == ("completed", 12, [])
    for name, own in pids.items():
        assert {int(line.split()[1]) for line in begun(name)} == own
