"""A budget that is used up, over real daemons: what has not begun is skipped, what runs goes on, people are told why."""

from __future__ import annotations

import asyncio

from engine_cluster import Engine
from rollout.model.item import Outcome
from rollout.model.run import Order, Policy


async def test_a_run_ends_with_what_it_has_begun_when_its_units_are_used_up(rough: Engine) -> None:
    gate = {"until": str(rough.gate()), "effects": rough.effects_file}
    go = {"until": str(rough.gate("go"))}
    fails = {"failures": 1, "fail_units": 1, "retry_after_ms": 3_600_000}
    items = [rough.item(gate), rough.item(fails), *(rough.item(go | {"sleep_ms": 20}) for _ in range(60))]
    async with rough.workers(("one", 2), ("two", 2)):
        policy = Policy("skip_rest", (("units_in", "5"), ("unit_in", "tokens")))
        run_id = await rough.submit(items, order=Order.ARRIVAL, policies=(policy,))
        await rough.started(1)
        await rough.status(run_id, lambda one: one.retried == 1, "one that waits for its next try")
        rough.gate("go").touch()
        status = await rough.status(run_id, lambda one: one.skips_rest and one.in_flight == 1, "all but one to end")
        why = status.reason
        assert status.state == "running" and why.endswith(" tokens were used, of at most 5")
        rough.gate().touch()
        entries, status = await rough.finish(run_id)
    by_seq = {entry.seq: entry for entry in entries}
    assert (status.state, status.reason, len(by_seq)) == ("completed", why, 62)
    assert by_seq[0].outcome is Outcome.DONE, "it ran when the rest was skipped"
    failure = by_seq[1].failure
    assert failure is not None and (by_seq[1].outcome, failure.code) == (Outcome.SKIPPED, "rest_skipped")
    assert status.done + status.skipped == 62 and status.done >= 5 and status.skipped >= 30
    events: list[str] = []
    while "run_completed" not in events:  # what happened is written down after it counts
        await asyncio.sleep(0.05)
        events = [one.event for one in (await rough.client.events(run_id)).events]
    assert events.count("rest_skipped") == 1
