"""Lanes, priorities, fair shares, retries, requirements, groups and policies through real processes."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from typing import Any

import pytest
from engine_cluster import Engine, done, outcomes, overlap
from rollout.model.item import NewItem, Outcome
from rollout.model.run import Lane, Order, Policy
from rollout.workloads.commit import CommitEntry

SOLO = (("node", "3"),)
"""One worker only: where attempts are counted, none may be stolen before it began, as slow machines have it."""


async def test_lanes_never_exceed_their_caps(calm: Engine) -> None:
    items = [
        calm.item({"sleep_ms": pause_ms, "effects": calm.effects_file, "data": lane}, lane=lane)
        for _ in range(12)
        for lane, pause_ms in (("a", 60), ("b", 60), ("free", 400))
    ]
    entries, _ = await calm.run(items, lanes=(Lane("a", 1), Lane("b", 2)))
    assert done(entries) == ["a", "b", "free"] * 12
    effects = calm.effects()
    for lane, cap in (("a", 1), ("b", 2)):
        assert overlap([e for e in effects if e.name == lane]) <= cap
    assert overlap([e for e in effects if e.name == "free"]) > 2


async def test_a_run_never_exceeds_its_own_cap(calm: Engine) -> None:
    items = [calm.item({"sleep_ms": 30, "effects": calm.effects_file}) for _ in range(12)]
    entries, _ = await calm.run(items, max_in_flight=3)
    assert len(done(entries)) == 12
    assert overlap(calm.effects()) <= 3


async def test_a_lane_is_pruned_after_consecutive_failures_and_what_came_behind_is_kept(calm: Engine) -> None:
    gate = str(calm.gate())
    first = [calm.item({"fatal": True, "until": gate, "fail_code": "bad"}, lane="a") for _ in range(3)]
    behind = [calm.item({"effects": calm.effects_file, "data": f"kept-{n}"}, lane="a") for n in range(2)]
    pending = [calm.item({"until": "/nonexistent", "data": "never"}, lane="a", not_before_ms=1 << 42) for n in range(4)]
    other = [calm.item({"data": "b"}, lane="b") for _ in range(3)]
    run = await calm.submit(
        [*first, *behind, *pending, *other], policies=(Policy("prune_lane", (("after", "3"), ("lane", "a"))),)
    )
    await calm.status(run, lambda s: s.done == 5, "what is behind the prune point to be accepted")
    calm.gate().touch()
    entries, status = await calm.finish(run)
    assert outcomes(entries) == [Outcome.FAILED] * 3 + [Outcome.SKIPPED] * 6 + [Outcome.DONE] * 3
    assert [e.data for e in entries[3:5]] == [b"kept-0", b"kept-1"], "evidence"
    lane = next(lane for lane in status.lanes if lane.name == "a")
    assert (lane.pruned, lane.pruned_at) == (True, 2)
    assert (status.state, status.done, status.failed, status.skipped) == ("completed", 3, 3, 6)


async def test_items_of_higher_priority_go_first(calm: Engine) -> None:
    low = [calm.item({"effects": calm.effects_file, "data": "low"}, require_labels=SOLO) for _ in range(6)]
    high = [
        calm.item({"effects": calm.effects_file, "data": "high"}, require_labels=SOLO, priority=5) for _ in range(4)
    ]
    entries, _ = await calm.run([*low, *high])
    assert done(entries) == ["low"] * 6 + ["high"] * 4, "committed in schedule order all the same"
    assert [e.name for e in calm.effects("start")] == ["high"] * 4 + ["low"] * 6


async def test_runs_share_a_worker_by_priority(calm: Engine) -> None:
    gate = str(calm.gate())  # nothing ends before both runs are there, however slow the machine is

    def items(name: str, n: int) -> list:
        body = {"until": gate, "sleep_ms": 25, "effects": calm.effects_file, "data": name}
        return [calm.item(body, require_labels=(("node", "2"),)) for _ in range(n)]

    low = await calm.submit(items("low", 240))
    high = await calm.submit(items("high", 120), priority=1)
    calm.gate().touch()
    await asyncio.gather(calm.finish(low), calm.finish(high))
    names = [e.name for e in calm.effects("start")]
    both = names[names.index("high") : len(names) - names[::-1].index("high")]
    count = Counter(both)
    assert count["high"] == 120
    # About half as many as of the other; more where a slow machine told late of what was begun.
    assert 0.35 <= count["low"] / count["high"] < 1.0


async def test_retries_wait_and_are_counted(calm: Engine) -> None:
    def item(body: dict[str, Any], **spec: Any) -> NewItem:
        return calm.item(body, require_labels=SOLO, **spec)

    items = [
        item({"fail_times": 2, "data": "third", "effects": calm.effects_file}, retry_backoff_ms=200),
        item({"fail_times": 9, "fail_code": "always"}, max_attempts=2),
        item({"fatal": True, "fail_code": "hopeless"}),
    ]
    entries, status = await calm.run(items)
    assert [(e.outcome, e.attempt, e.failure and e.failure.code) for e in entries] == [
        (Outcome.DONE, 3, None),
        (Outcome.FAILED, 2, "always"),
        (Outcome.FAILED, 1, "hopeless"),
    ]
    assert (status.state, status.retried, status.worker_lost) == ("completed", 3, 0)
    first, second, third = [e.at for e in calm.effects("start")]
    assert second - first >= 0.1e9 and third - second >= 0.2e9, "backoff with jitter, doubled"


async def test_what_outlives_its_timeout_fails_even_if_it_ignores_cancellation(calm: Engine) -> None:
    items = [
        calm.item(
            {"sleep_ms": 60_000, "effects": calm.effects_file}, timeout_ms=300, max_attempts=2, require_labels=SOLO
        ),
        calm.item({"hang": True}, timeout_ms=300, max_attempts=1, require_labels=SOLO),
        calm.item({"busy_ms": 60_000}, timeout_ms=300, max_attempts=1, require_labels=SOLO),  # keeps the interpreter
        calm.item({"data": "well"}, timeout_ms=5000, require_labels=SOLO),
    ]
    entries, _ = await calm.run(items)
    assert [(e.outcome, e.attempt) for e in entries] == [
        (Outcome.FAILED, 2),
        *[(Outcome.FAILED, 1)] * 2,
        (Outcome.DONE, 1),
    ]
    assert {e.failure.code for e in entries if e.failure} == {"timeout"}
    assert len(calm.effects("cancelled")) == 2


async def test_an_item_that_kills_its_process_dies_alone(calm: Engine) -> None:
    items = [calm.item({"sleep_ms": 20, "data": n, "effects": calm.effects_file}) for n in range(30)]
    items.insert(7, calm.item({"segv": True}))
    items.insert(9, calm.item({"crash": 2, "data": "twice"}))
    items.insert(11, calm.item({"exit": 3}, fail_on_worker_lost=True))
    entries, status = await calm.run(items)
    dead, twice, lost = entries[7], entries[9], entries[11]
    assert dead.outcome is Outcome.FAILED and dead.attempt >= 3
    assert dead.failure is not None and dead.failure.code == "dead_letter"
    assert (twice.outcome, twice.data) == (Outcome.DONE, b"twice") and twice.attempt >= 3, "losses are no failures"
    assert lost.outcome is Outcome.FAILED and lost.failure is not None
    rest = [e for e in entries if e.seq not in (7, 9, 11)]
    assert done(rest) == [str(n) for n in range(30)]
    assert len(calm.effects("start")) == 30, "no neighbour was started twice"
    assert status.worker_lost >= 3 and status.retried >= 3


async def test_losses_and_failures_are_counted_apart(calm: Engine) -> None:
    """Two losses and two failures: neither reaches its limit of three.

    The script goes by attempt numbers, so none may be spent otherwise. Only one worker can run the item: else, while a
    slow machine restarts the process that was killed, an idle worker steals the unstarted attempt (ending `revoked`).
    """
    item = calm.item({"crash": 2, "fail_times": 4, "data": "x"}, max_attempts=3, require_labels=SOLO)
    entries, status = await calm.run([item])
    assert [(e.outcome, e.attempt) for e in entries] == [(Outcome.DONE, 5)]
    assert (status.worker_lost, status.retried) == (2, 4)


async def test_requirements_decide_where_an_item_runs(calm: Engine) -> None:
    worker = {n: calm.cluster.incarnation(calm.cluster.workers[n - 1]) for n in (1, 2, 3)}
    items = [
        *[calm.item({"data": "role"}, require_roles=("gpu",)) for _ in range(5)],
        *[calm.item({"data": "label"}, require_labels=(("node", "2"),)) for _ in range(5)],
        *[calm.item({"data": "both"}, require_roles=("gpu",), require_labels=(("node", "1"),)) for _ in range(5)],
        *[
            calm.item(
                {"plugin": "sample-sidecar", "method": "overlap", "payload": {"completion": "a b", "answer": "a c"}},
                require_plugin="sample-sidecar",
            )
            for _ in range(5)
        ],
    ]
    entries, _ = await calm.run(items)
    done(entries)
    assert [e.worker for e in entries] == [worker[1]] * 5 + [worker[2]] * 5 + [worker[1]] * 10
    assert [json.loads(e.data) for e in entries[15:]] == [1 / 3] * 5


async def test_a_plugin_that_is_not_there_or_refuses_fails_the_attempt(calm: Engine) -> None:
    items = [
        calm.item({"plugin": "absent", "method": "x"}, require_labels=(("node", "2"),), max_attempts=1),
        calm.item({"plugin": "sample-sidecar", "method": "absent"}, require_roles=("gpu",), max_attempts=1),
    ]
    entries, _ = await calm.run(items)
    assert [e.failure and e.failure.code for e in entries] == ["not_found", "plugin"]


async def test_nothing_runs_that_no_worker_can_run(calm: Engine) -> None:
    run = await calm.submit([calm.item({}, require_roles=("tpu",)), calm.item({"data": "x"})])
    await calm.status(run, lambda s: s.done == 1, "the possible item")
    status = await calm.client.command(run, "kill")
    assert (status.state, status.done, status.in_flight) == ("killed", 1, 0)


async def test_strict_resources_are_not_overcommitted(calm: Engine) -> None:
    one = (("slots", 1.0), ("gpus", 1.0))
    two = (("slots", 1.0), ("gpus", 2.0))
    items = [
        calm.item({"sleep_ms": 40, "effects": calm.effects_file, "data": size}, resources=two if size == "2" else one)
        for size in "1112112"
    ]
    entries, _ = await calm.run(items)
    assert done(entries) == list("1112112")
    assert {e.worker for e in entries} == {calm.cluster.incarnation(calm.cluster.workers[0])}
    in_use = most = 0
    for effect in sorted(calm.effects(), key=lambda e: (e.at, e.what == "start")):
        in_use += int(effect.name) * (1 if effect.what == "start" else -1)
        most = max(most, in_use)
    assert most == 2


async def test_the_first_success_of_a_group_cancels_the_others(calm: Engine) -> None:
    """The running one and the pending ones; other groups go on."""
    items = [
        calm.item({"fatal": True}, group="g"),
        calm.item({"data": "won"}, group="g"),
        calm.item({"until": str(calm.gate("never")), "effects": calm.effects_file}, group="g"),
        calm.item({"data": "later"}, group="g", not_before_ms=1 << 42),
        calm.item({"data": "h"}, group="h"),
    ]
    entries, status = await calm.run(items)
    assert outcomes(entries) == [
        Outcome.FAILED, Outcome.DONE, Outcome.CANCELLED, Outcome.CANCELLED, Outcome.DONE,
    ]  # fmt: skip
    assert {e.failure.code for e in entries[2:4] if e.failure} == {"group_won"}
    assert status.state == "completed"
    assert len(calm.effects("start")) == len(calm.effects("cancelled"))


@pytest.mark.parametrize(("options", "state"), [((("failures", "2"),), "failed"), ((("successes", "3"),), "completed")])
async def test_stop_early(calm: Engine, options: tuple[tuple[str, str], ...], state: str) -> None:
    items = [calm.item({"fatal": n % 2 == 1}) for n in range(6)]
    items += [calm.item({"until": str(calm.gate("never"))}) for _ in range(3)]
    entries, status = await calm.run(items, policies=(Policy("stop_early", options),))
    assert status.state == state and "stop_early" in status.reason
    assert status.in_flight == 0 and len(entries) >= 4


async def test_end_run_ends_it_at_the_first_such_result(calm: Engine) -> None:
    items = [calm.item({"data": "x"}), calm.item({"fatal": True}), calm.item({"until": str(calm.gate("never"))})]
    entries, status = await calm.run(items, policies=(Policy("end_run", (("on", "failed"),)),))
    assert (status.state, outcomes(entries[:2])) == ("failed", [Outcome.DONE, Outcome.FAILED])


async def test_append_runs_failed_items_again_at_the_end(calm: Engine) -> None:
    items = [calm.item({"data": "a"}), calm.item({"fatal": True, "data": "b"}), calm.item({"data": "c"})]
    policy = Policy("append", (("on", "failed"), ("times", "2")))
    entries, status = await calm.run(items, policies=(policy,))
    assert outcomes(entries) == [Outcome.DONE, Outcome.FAILED, Outcome.DONE, Outcome.FAILED, Outcome.FAILED]
    assert (status.state, status.submitted, status.cursor) == ("completed", 5, 5)


async def test_arrival_order_commits_what_comes_first(calm: Engine) -> None:
    items = [calm.item({"until": str(calm.gate()), "data": "slow"}), *[calm.item({"data": n}) for n in range(10)]]
    run = await calm.submit(items, order=Order.ARRIVAL)
    first: list[CommitEntry] = []
    async for page in calm.client.watch(run):
        first += page.entries
        if len(first) == 10:
            break
    assert sorted(e.seq for e in first) == list(range(1, 11))
    calm.gate().touch()
    entries, _ = await calm.finish(run)
    assert [e.position for e in entries] == list(range(11))
    assert entries[-1].data == b"slow" and sorted(e.seq for e in entries) == list(range(11))


async def test_large_payloads_and_results_travel_as_objects(calm: Engine) -> None:
    """Beyond 4 KiB both ways, beyond the 1 MiB of a frame, through workers that share no directory."""
    big = "x" * (1 << 20)
    items = [
        calm.item({"echo": True, "pad": "y" * 5000}),
        calm.item({"echo": True, "pad": big}),
        *[calm.item({"size": size}) for size in (4095, 4096, 4097, 3 << 20)],
        calm.item({"put": 100_000}),
    ]
    sent = [item.payload for item in items]
    entries, _ = await calm.finish(await calm.submit(items), payloads=True)
    assert [len(e.data) for e in entries[2:6]] == [4095, 4096, 4097, 3 << 20]
    assert [e.payload for e in entries] == sent
    assert [e.data for e in entries[:2]] == sent[:2]
    got, _ = await calm.run([calm.item({"get": entries[6].data.decode()})])
    assert got[0].data == b"x" * 100_000
