"""Cases to batches: what every schedule keeps to, and that it is a good one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rollout.workloads.test.cases import Batch, Case
from rollout.workloads.test.schedule import IDS_MAX, Rules, end_sessions, schedule

cases = st.lists(
    st.builds(
        Case,
        id=st.one_of(st.sampled_from(["a", "b", "c"]), st.text(min_size=1, max_size=20), st.just("x" * 8000)),
        group=st.sampled_from(["", "slow"]),
        scope=st.sampled_from(["", "m1", "m2"]),
    ),
    max_size=40,
)
rules = st.builds(Rules, individual=st.booleans(), split_scopes=st.booleans())


def uneven(case: Case) -> float:
    return len(case.id) % 7 * 1.5


@given(cases, st.integers(0, 5), rules)
def test_every_case_is_in_one_batch_and_no_batch_is_too_large(found: list[Case], slots: int, rule: Rules) -> None:
    batches = schedule(found, uneven, slots, {"slow": rule})
    assert Counter((case.group, case.id) for case in found) == Counter((b.group, id) for b in batches for id in b.ids)
    assert batches == schedule(found, uneven, slots, {"slow": rule})
    for batch in batches:
        assert len(set(batch.ids)) == len(batch.ids)
        assert len(batch.ids) == 1 or sum(len(id) + 1 for id in batch.ids) <= IDS_MAX
        assert batch.group == "" or not rule.individual or len(batch.ids) == 1


def named(count: int, scope: Callable[[int], str] = lambda n: "") -> list[Case]:
    return [Case(id=f"t{n}", scope=scope(n)) for n in range(count)]


def test_each_fixture_of_a_session_has_its_end_in_the_last_batch_that_uses_it() -> None:
    uses = [("a",), ("a", "b"), (), ("b",), ()]
    found = [Case(id=f"t{n}", session=names) for n, names in enumerate(uses)]
    batches = [Batch(group="", ids=ids) for ids in (("t0",), ("t1", "t2"), ("t3",), ("t4",))]
    assert [batch.ends_session for batch in end_sessions(batches, found)] == [False, True, True, False]


def makespan(batches: list[Batch], seconds: dict[str, float], slots: int) -> float:
    """Each slot takes the next batch when it is free."""
    free = [0.0] * slots
    for batch in batches:
        free[free.index(min(free))] += sum(seconds[id] for id in batch.ids)
    return max(free)


def test_sizes_fall_to_single_tests() -> None:
    sizes = [len(batch.ids) for batch in schedule(named(1000), lambda case: 1.0, 2)]
    assert sizes == sorted(sizes, reverse=True) and sizes[0] == 125 and sizes[-4:] == [1, 1, 1, 1] and len(sizes) < 60


def test_order_of_discovery_is_kept_among_short_tests() -> None:
    found = named(1000)
    batches = schedule(found, lambda case: 60.0 if case.id == "t900" else 0.001 * (int(case.id[1:]) % 5), 2)
    ids = [id for batch in batches for id in batch.ids]
    assert ids == ["t900", *(case.id for case in found if case.id != "t900")] and batches[0].ids == ("t900",)


@pytest.mark.parametrize("slots", [2, 4, 16])
def test_uneven_tests_end_together(slots: int) -> None:
    seconds = {f"t{n}": 20.0 if n % 100 == 99 else 0.01 + (n * 7919 % 100) / 100 for n in range(1000)}
    batches = schedule(named(1000), lambda case: seconds[case.id], slots)
    assert makespan(batches, seconds, slots) < 1.03 * max(sum(seconds.values()) / slots, 20.0)


def test_a_scope_stays_whole_unless_it_is_long_and_may_be_split() -> None:
    def place(n: int) -> str:
        return "long" if n < 60 else f"short{n // 10}"

    found = named(100, place)
    scopes = {case.id: case.scope for case in found}
    for split in (False, True):
        batches = schedule(found, lambda case: 1.0, 2, {"": Rules(split_scopes=split)})
        spread = {
            scope: sum(scope in {scopes[id] for id in batch.ids} for batch in batches) for scope in scopes.values()
        }
        assert (spread.pop("long") > 1) is split and set(spread.values()) == {1}


def test_a_batch_carries_what_its_group_says() -> None:
    rule = Rules(retries=2, limit_s=5.0)
    (batch,) = schedule([Case(id="a", group="g"), Case(id="b", group="g")][:1], lambda case: 2.0, 2, {"g": rule})
    assert batch == Batch(group="g", ids=("a",), retries=2, limit_s=5.0, expected_ms=2000)
