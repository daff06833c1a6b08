"""The policy `keep_objects`: which results' objects are let go when a newer result is committed."""

from __future__ import annotations

import pytest
from core_world import FakeWorker, World
from rollout.model.errors import InputError
from rollout.model.item import Blob, Failure, Outcome
from rollout.model.run import Policy
from rollout_coordinator.core import step as st
from rollout_coordinator.core.events import ResultGroup, WorkerResults

HOUR_S = 3600.0


class Kept:
    """A run of six items with this policy, each of which names an object in its result."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **options: int) -> None:
        self.world = World()
        self.worker: FakeWorker = self.world.worker("A", credit=20)
        self.world.open(policies=(Policy("keep_objects", tuple((k, str(v)) for k, v in options.items())),))
        self.world.submit(6)
        self.gone: list[int] = []
        commit = self.world.ledger.commit

        def watched(writes: st.Writes) -> None:
            self.gone += [seq for _, seq in writes.released]
            commit(writes)

        monkeypatch.setattr(self.world.ledger, "commit", watched)

    def finish(self, *seqs: int, keeps: bool = True) -> None:
        log = self.world.root()
        attempts = [self.worker.held.pop((log, seq)) for seq in seqs]
        named = {index: (bytes([seq]) * 32,) for index, seq in enumerate(seqs)} if keeps else {}
        data: list[Blob] = [b"r"] * len(seqs)
        group = ResultGroup(
            log, list(seqs), attempts, [Outcome.DONE] * len(seqs), data, {}, [5] * len(seqs), keeps=named
        )
        self.world.step(WorkerResults(self.worker.session, [group]))


def test_the_last_stay_and_those_before_from_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Kept(monkeypatch, last=2, **{"from": 1})
    run.finish(0, 1, 2)
    assert run.gone == []
    run.finish(3)
    assert run.gone == [1]
    run.finish(4, 5)
    assert run.gone == [1, 2, 3]


def test_results_ahead_of_the_cursor_count_once_they_are_committed(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Kept(monkeypatch, last=1)
    run.finish(1, 2)
    assert run.gone == []
    run.finish(0)
    assert run.gone == [0, 1]


def test_those_that_are_too_old_go_when_a_newer_one_comes_and_the_newest_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Kept(monkeypatch, max_age_s=int(HOUR_S))
    run.finish(0)
    run.world.pass_time(HOUR_S)
    run.finish(1)
    assert run.gone == []
    run.world.pass_time(1.0)
    run.finish(2)
    assert run.gone == [0]
    run.world.pass_time(3 * HOUR_S)
    assert run.gone == [0]
    run.finish(3)
    assert run.gone == [0, 1, 2]


def test_a_new_leader_knows_what_is_kept_and_since_when(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Kept(monkeypatch, last=2, max_age_s=int(HOUR_S))
    run.finish(0)
    run.world.pass_time(2 * HOUR_S)
    run.world.restart()
    run.worker.hello()
    run.finish(1)
    assert run.gone == [0]


def test_a_result_that_names_nothing_lets_nothing_go(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Kept(monkeypatch, last=1)
    run.finish(0)
    run.finish(1, keeps=False)
    assert run.gone == []


def test_a_rule_is_needed() -> None:
    with pytest.raises(InputError, match="give `last` or `max_age_s`"):
        World().open(policies=(Policy("keep_objects", (("from", "1"),)),))


def test_what_failures_name_is_kept_and_goes_with_the_first_result_behind_it_that_goes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = Kept(monkeypatch, last=1)
    log, broken = run.world.root(), Failure("broken", "it broke", retry_after_ms=0)
    run.worker.finish((log, 0), keeps=(b"a" * 32,), failure=broken)
    run.worker.finish((log, 0), keeps=(b"b" * 32,), failure=Failure("broken", "it broke", retryable=False))
    run.finish(1)
    assert run.world.ledger.kept[log, 0] == (b"a" * 32, b"b" * 32) and run.gone == []
    run.world.restart()
    run.worker.hello()
    run.finish(2)
    assert run.gone == [0, 1]
