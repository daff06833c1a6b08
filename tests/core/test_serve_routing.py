"""Which replica gets a request."""

from __future__ import annotations

from rollout.workloads.serve.routing import SLACK, Router

A, B, C = (1, 0, 1), (1, 1, 1), (1, 2, 1)


def router(most: int = 100) -> Router:
    found = Router(most)
    found.up(A, "one")
    found.up(B, "two")
    return found


def test_the_least_busy_engine_gets_a_request() -> None:
    routing = router()
    routing.begin(A)
    assert [routing.choose() for _ in range(3)] == [B, B, B]


def test_idle_engines_take_turns() -> None:
    routing = router()
    assert {routing.choose() for _ in range(2)} == {A, B}


def test_a_beginning_goes_where_it_was_seen_unless_that_engine_has_much_more_to_do() -> None:
    routing = router()
    routing.begin(A, [7, 8])
    for _ in range(SLACK):
        assert routing.choose([7, 9]) == A
        routing.begin(A, [7, 9])
    assert routing.choose([7, 9]) == B


def test_an_engine_with_all_it_may_have_gets_nothing() -> None:
    routing = router(most=1)
    routing.begin(A, [7])
    assert routing.choose([7]) == B
    routing.begin(B)
    assert routing.choose() is None
    routing.end(A)
    assert routing.choose() == A


def test_replicas_of_one_engine_are_counted_together() -> None:
    routing = router(most=2)
    routing.up(C, "one")
    routing.begin(A)
    routing.begin(C)
    assert routing.engines == {"one": 2, "two": 0}
    assert routing.choose() == B


def test_a_draining_replica_gets_nothing_and_still_counts() -> None:
    routing = router()
    routing.begin(A)
    routing.drain(A)
    assert (routing.choose(), routing.replicas, routing.engines) == (B, [B], {"two": 0})
    routing.drain(B)
    assert routing.choose() is None


def test_beginnings_of_an_engine_that_is_gone_are_forgotten() -> None:
    routing = router()
    routing.begin(A, [7])
    routing.down(A)
    routing.up(C, "three")
    assert routing.choose([7]) in (B, C)
    routing.end(A)


def test_the_engine_that_gave_a_request_back_is_avoided_if_there_is_another() -> None:
    routing = router()
    routing.begin(B)
    assert routing.choose(avoid=A) == B
    routing.down(B)
    assert routing.choose(avoid=A) == A
