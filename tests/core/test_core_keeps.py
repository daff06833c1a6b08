"""What results name: kept with them, and let go behind the last few that a policy keeps."""

from __future__ import annotations

import pytest
from core_world import FakeWorker, World
from rollout.model.errors import InputError
from rollout.model.item import Failure, ItemSpec
from rollout.model.run import Policy


def objects(seq: int) -> tuple[bytes, ...]:
    return (bytes([seq]) * 32,)


def chain(*policies: Policy) -> tuple[World, FakeWorker]:
    w = World()
    w.open(policies=policies)
    a = w.worker("A")
    w.submit(6, specs=ItemSpec(max_attempts=1))
    return w, a


def kept(w: World) -> list[int]:
    return sorted(seq for _, seq in w.ledger.kept)


LAST_TWO = Policy("keep_objects", (("last", "2"), ("from", "1")))


def test_the_last_ones_stay_and_those_before_from() -> None:
    w, a = chain(LAST_TWO)
    for seq in range(3):
        a.finish((w.root(), seq), keeps=objects(seq))
    assert kept(w) == [0, 1, 2]
    a.finish((w.root(), 3))
    assert kept(w) == [0, 1, 2], "a result that names nothing takes no place"
    w.restart()
    a.hello()
    a.finish((w.root(), 4), keeps=objects(4))
    assert kept(w) == [0, 2, 4], "a new leader counts on"


def test_nothing_is_let_go_before_what_replaces_it_is_committed() -> None:
    w, a = chain(LAST_TWO)
    for seq in (0, 2, 3):
        a.finish((w.root(), seq), keeps=objects(seq))
    assert kept(w) == [0, 2, 3]
    a.finish((w.root(), 1), keeps=objects(1))
    assert kept(w) == [0, 2, 3], "then all at once"


def test_what_a_failed_result_names_is_not_kept() -> None:
    w, a = chain()
    a.finish((w.root(), 0), keeps=objects(0), failure=Failure("broken", "it broke"))
    a.finish((w.root(), 1), keeps=objects(1))
    assert kept(w) == [1]


def test_none_is_no_number_to_keep() -> None:
    with pytest.raises(InputError, match="keep_objects: `last` must be at least 1"):
        World().open(policies=(Policy("keep_objects", (("last", "0"),)),))
