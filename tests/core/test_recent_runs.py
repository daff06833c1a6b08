"""A child process outlives its runs: both ends of its pipe remember the newest few, and the same ones."""

from __future__ import annotations

import random

from rollout.model.item import DEFAULT_SPEC
from rollout_worker.attempts import Held, Plan, held_to_wire, run_from_wire
from rollout_worker.executors.port import RUNS_KEPT, Run, remember


def test_the_child_knows_every_run_it_is_not_told_of() -> None:
    runs = [Run(f"R{n}", "script", {"n": n}) for n in range(4 * RUNS_KEPT)]
    known: dict[str, None] = {runs[0].run_id: None}  # both begin with the run the process was started for
    child: dict[str, Run] = {runs[0].run_id: runs[0]}
    dice, told = random.Random(7), 0
    for turn in range(2000):
        run = runs[min(len(runs) - 1, max(0, turn // 10 - dice.choice([0, 0, 0, 1, 40])))]
        held = Held(1, turn, 1, b"i" * 32, b"", DEFAULT_SPEC, Plan(run, "slot", "script"))
        (group,) = held_to_wire([held], known)
        if group.run.run_id not in child:
            assert group.run.workload == "script", "its configuration came along"
            remember(child, group.run.run_id, run_from_wire(group.run))
            told += 1
        assert child[run.run_id].config == run.config
        assert list(known) == list(child) and len(known) <= RUNS_KEPT
    assert told > len(runs), "some were forgotten and told of again"
