"""Items of one run that name different executors: their configuration, their processes, and what cannot run here."""

from __future__ import annotations

import json
from typing import Any

import pytest
from rollout.model.errors import AttemptError, ConfigError
from rollout.model.item import ItemSpec
from rollout.wire.codec import spec_to_wire
from rollout.wire.v1 import work_pb2
from rollout_worker import session_events as ev
from rollout_worker.executors.port import Run
from rollout_worker.executors.script import ScriptExecutor
from rollout_worker.processes.plans import planner
from rollout_worker.wiring import offered
from session_world import LOG, RUN, Worker, delivered, of

CONFIG = {"mine": 1, "executors": {"infer": {"theirs": 2}, "broken": "no table"}}


def assign(w: Worker, *executors: str, config: dict[str, Any] = CONFIG) -> list[ev.Action]:
    """One item for each."""
    count = len(executors)
    group = work_pb2.AssignGroup(
        log=LOG, run=work_pb2.RunContext(run_id=RUN, workload="script", config=json.dumps(config).encode()),
        seq=range(count), attempt=[1] * count, ids=bytes(32) * count, length=[0] * count,
        specs=[spec_to_wire(ItemSpec(executor=name)) for name in executors], spec_index=range(count),
    )  # fmt: skip
    return w.down(assign=work_pb2.Assign(groups=[group]))


def causes_and_released(w: Worker, actions: list[ev.Action]) -> tuple[list[work_pb2.CannotStart], list[int]]:
    told = [frame.causes for frame in w.sent(actions) if frame.WhichOneof("body") == "causes"]
    released = [frame.released for frame in w.flush() if frame.WhichOneof("body") == "released"]
    assert all(r.reason == "engine_start" for r in released)
    return list(told[-1].causes), [seq for r in released for keys in r.keys for seq in keys.seq]


def test_each_executor_has_its_own_processes_and_its_own_configuration() -> None:
    w = Worker()
    started = of(assign(w, "", "infer", "script", "infer"), ev.StartChild)
    assert [(s.plan.run.executor, s.plan.run.config) for s in started] == [
        ("script", CONFIG),  # the workload's own sees everything
        ("infer", {"theirs": 2}),
    ]
    assert delivered(w.do(ev.ChildReady(1, 1))) == {1: [0]}
    assert delivered(w.do(ev.ChildReady(2, 8))) == {2: [1, 3]}
    assert delivered(w.end(1, 0)) == {1: [2]}


def test_items_of_a_run_that_goes_on_with_other_settings_have_these() -> None:
    """What was given before goes on as it began."""
    w = Worker()
    assign(w, "infer")
    changed = {"executors": {"infer": {"theirs": 3}}}
    group = work_pb2.AssignGroup(
        log=LOG, run=work_pb2.RunContext(run_id=RUN, workload="script", config=json.dumps(changed).encode()),
        seq=[1], attempt=[1], ids=bytes(32), length=[0], specs=[spec_to_wire(ItemSpec(executor="infer"))],
    )  # fmt: skip
    w.down(assign=work_pb2.Assign(groups=[group]))
    configs = {held.seq: held.plan.run.config for held in w.session.held.values()}
    assert configs == {0: {"theirs": 2}, 1: {"theirs": 3}}


def test_an_executor_without_a_section_has_an_empty_configuration() -> None:
    w = Worker()
    (start,) = of(assign(w, "infer", config={}), ev.StartChild)
    assert start.plan.run.config == {}


@pytest.mark.parametrize(("name", "code"), [("unknown", "executor_missing"), ("broken", "bad_run_config")])
def test_what_cannot_run_here_goes_back_with_its_cause_and_its_neighbours_run(name: str, code: str) -> None:
    w = Worker()
    causes, released = causes_and_released(w, assign(w, "script", name))
    assert [(c.executor, c.code, c.final, c.times) for c in causes] == [(name, code, True, 1)]
    assert released == [1] and not w.session.unacknowledged
    assert delivered(w.ready()) == {1: [0]}


def test_a_configuration_that_cannot_be_read_is_a_cause_also_for_frames_that_do_not_repeat_it() -> None:
    w = Worker()
    again = work_pb2.AssignGroup(
        log=LOG, run=work_pb2.RunContext(run_id=RUN), seq=[1], attempt=[1], ids=bytes(32), length=[0],
        specs=[spec_to_wire(ItemSpec(executor="infer"))],
    )  # fmt: skip
    first = work_pb2.AssignGroup()
    first.CopyFrom(again)
    first.run.workload, first.run.config, first.seq[0] = "script", b"[]", 0
    w.down(assign=work_pb2.Assign(groups=[first]))
    causes, released = causes_and_released(w, w.down(assign=work_pb2.Assign(groups=[again])))
    assert [(c.executor, c.code, c.final) for c in causes] == [("infer", "bad_run_config", True)]
    assert released == [1]  # that of the first frame was told before


def test_an_engine_that_does_not_start_does_not_throttle_what_else_its_run_does() -> None:
    w = Worker(slots=2, self_fence_s=1e9)
    assign(w, "script", "infer")
    w.do(ev.ChildReady(1, 1))
    w.do(ev.ChildEnded(2, "no driver"))
    assert dict(w.session.credit.current().run_items).get(RUN, w.session.credit.base) == 4


def test_an_executor_that_is_not_offered_here_is_said_by_name() -> None:
    installed: dict[str, Any] = {"script": ScriptExecutor}
    plan = planner(installed)
    assert plan(Run(RUN, "job", {}, executor="script")).run.executor == "script"
    with pytest.raises(AttemptError, match=r"no executor 'job' \(it has: script\)"):
        plan(Run(RUN, "job", {}))


def test_a_worker_offers_what_its_configuration_names() -> None:
    installed: dict[str, Any] = {"script": ScriptExecutor, "other": ScriptExecutor}
    assert list(offered(installed, [])) == ["script", "other"]
    assert list(offered(installed, ["other"])) == ["other"]
    with pytest.raises(ConfigError, match=r"\[worker\] executors names 'no', not installed here \(installed: other"):
        offered(installed, ["script", "no"])
