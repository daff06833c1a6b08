"""A real engine process that is given more rows than it runs at once."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from rollout.model.item import DEFAULT_SPEC
from rollout.wire.v1 import common_pb2
from rollout.workloads.infer.payload import Payload, encode_payload
from rollout_worker.attempts import Held, Plan
from rollout_worker.executors.port import Run
from rollout_worker.processes.kinds import Kind
from runner_process import RunnerProcess

CONFIG: dict[str, Any] = {
    "model": {"uri": "mock"},
    "sampling": {},
    "backend": {"kind": "mock", "concurrency": 2, "delay_ms": 200},
}
RUN = Run("01ARZ3NDEKTSV4RRFFQ69G5FAV", "infer", CONFIG)


class Engine(RunnerProcess):
    def assign(self, *seqs: int) -> None:
        plan = Plan(RUN, "engine", "k")
        held = [
            Held(1, s, 1, bytes(32), encode_payload(Payload({"prompt": f"p{s}"}, s, "f", s)), DEFAULT_SPEC, plan)
            for s in seqs
        ]
        self.deliver(held)

    def recall(self, *seqs: int) -> None:
        self.send(Kind.RECALL, keys(*seqs))


def keys(*seqs: int) -> bytes:
    return common_pb2.AttemptKeys(log=1, seq=seqs, attempt=[1] * len(seqs)).SerializeToString()


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Engine]:
    made = Engine(RUN, tmp_path)
    try:
        assert made.frame() == (Kind.READY, json.dumps({"width": 2, "ahead": 2}).encode())
        yield made
    finally:
        made.close()


def returned(frame: tuple[int, bytes]) -> list[int]:
    kind, body = frame
    assert kind == Kind.RETURNED
    return list(common_pb2.AttemptKeys.FromString(body).seq)


def test_rows_before_their_turn_are_given_back_and_run_when_they_come_again(engine: Engine) -> None:
    engine.assign(0, 1, 2, 3, 4)
    engine.recall(0, 1, 2, 3, 4)
    assert sorted(returned(engine.frame())) == [2, 3, 4], "two have begun"
    assert sorted(s for g in engine.results(2) for s in g.seq) == [0, 1]
    engine.assign(2, 3)
    groups = engine.results(2)
    assert sorted(s for g in groups for s in g.seq) == [2, 3] and not any(g.errors for g in groups)


def test_a_row_cancelled_before_its_first_step_is_told(engine: Engine) -> None:
    engine.assign(0)
    engine.send(Kind.CANCEL, keys(0))
    (group,) = engine.results(1)
    assert [error.code for error in group.errors] == ["cancelled"]


def test_a_row_that_waits_for_its_turn_takes_no_longer_for_that(engine: Engine) -> None:
    engine.assign(0, 1, 2, 3)
    durations = [duration for group in engine.results(4) for duration in group.duration_ms]
    assert min(durations) >= 190 and max(durations) < 390, "each runs for 200 ms, two of them after the others"
