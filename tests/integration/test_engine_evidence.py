"""What attempts leave behind that fail: from a child process through worker, wire and ledger to a client, and back to
the next attempt, over real daemons."""

from __future__ import annotations

from engine_cluster import Engine, on_both_databases
from rollout.model.item import Outcome
from rollout.objects.digest import object_id


@on_both_databases
async def test_what_attempts_left_is_with_them_and_with_the_item_that_failed_for_good(rough: Engine) -> None:
    large = {
        "failures": 2,
        "fail_data": 9000,
        "fail_keep": "tar",
        "fail_units": 5,
        "retry_after_ms": 50,
        "data": "at last",
    }
    fatal = {"fatal": True, "fail_code": "bad_task", "fail_data": "why", "fail_keep": "log", "fail_units": 7}
    async with rough.workers(("one", 2), ("two", 2)):
        run_id = await rough.submit([rough.item(large), rough.item(fatal)])
        entries, status = await rough.finish(run_id)
    done, failed = entries
    assert (done.outcome, done.data, done.tries) == (Outcome.DONE, b"at last", 3), "it knew how many had failed"
    assert (failed.outcome, failed.data, failed.units_in) == (Outcome.FAILED, b"why", 7)
    assert (status.units_in, status.units_out) == (2 * 5 + 1 + 7, 2 * 10 + 1 + 14)
    reply = await rough.client.item(run_id, [0])
    began = [one for one in reply.attempts if one.began_ms]
    assert await rough.client.attempt_bytes(run_id, began) == [b"x" * 9000, b"x" * 9000, b"at last"]
    assert began[0].worker != began[1].worker != began[2].worker, "each on another worker"
    pages = [one async for page in rough.client.attempts(run_id) for one in page]
    assert [(one.seq, one.status.code, one.data, one.status.units_out) for one in pages] == [
        (0, "scripted", b"x" * 9000, 10),
        (0, "scripted", b"x" * 9000, 10),
    ]
    kept = (await rough.client.kept(run_id)).entries
    numbers = [one.status.attempt for one in pages]
    assert {(one.seq, one.attempt, one.object_id) for one in kept} == {
        (0, numbers[0], object_id(b"tar 0")),
        (0, numbers[1], object_id(b"tar 1")),
        (1, 0, object_id(b"log 0")),
    }
    async with rough.client.objects(run_id) as objects:
        assert await objects.get(object_id(b"tar 1")) == b"tar 1"
    freed = await rough.client.kept(run_id, release=[0, 1])
    assert (freed.objects_freed, list(freed.entries)) == (3, [])
