"""Both ends of the pipe to a child process agree: on the runs that they remember, and on the order of its attempts."""

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


def test_attempts_of_parents_and_children_go_to_a_process_in_the_order_in_which_the_session_counts_them() -> None:
    # Else it takes another for the one that runs, and never stops the one that runs beyond its timeout.
    plan = Plan(Run("R", "script", {}), "slot", "script")
    order = [(1, 6), (2, 0), (1, 9), (1, 10), (2, 1)]
    groups = held_to_wire([Held(log, seq, 1, b"i" * 32, b"", DEFAULT_SPEC, plan) for log, seq in order], {})
    assert [(group.log, seq) for group in groups for seq in group.seq] == order
