"""The doctor's message and a run on one queue."""

from __future__ import annotations

from dataclasses import replace

import pytest
from rollout.queues import Message, Outgoing
from rollout.queues import probe as module
from rollout.queues.local import LocalQueue
from rollout.queues.probe import ATTRIBUTE, is_probe, make_probe, pass_on
from test_queues import Clock, MemoryStorage, local


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
async def queue(clock: Clock) -> LocalQueue:
    return await local(MemoryStorage(), now=clock)


def received(sent: Outgoing) -> Message:
    return Message("1", sent.body, "r", 1, sent.attributes)


def test_it_is_known_by_body_and_attribute_together() -> None:
    probe = make_probe()
    assert is_probe(received(probe))
    other = make_probe()
    for sent in (
        replace(probe, attributes={}),
        replace(probe, attributes=other.attributes),
        replace(probe, attributes={ATTRIBUTE: "1"}),
        replace(probe, body=b'{"prompt": "a row of a user"}'),
        replace(probe, body=b""),
        replace(probe, body=probe.body + b" "),
        replace(probe, body=probe.attributes[ATTRIBUTE].encode()),
        replace(probe, body=b'"%s"' % probe.attributes[ATTRIBUTE].encode()),
        replace(probe, body=b'{"sent_at": "%s"}' % probe.attributes[ATTRIBUTE].encode()),
    ):
        assert not is_probe(received(sent))


async def test_a_run_passes_it_on(queue: LocalQueue, clock: Clock) -> None:
    await queue.enqueue([make_probe()])
    await pass_on(queue, await queue.dequeue(1, 300.0))
    assert await queue.dequeue(1, 300.0) == []
    clock.s += 1.5
    assert len(await queue.dequeue(1, 300.0)) == 1


async def test_where_leases_are_long_it_goes_back_at_once(queue: LocalQueue) -> None:
    queue.facts = replace(queue.facts, min_lease_s=10.0)
    await queue.enqueue([make_probe()])
    await pass_on(queue, await queue.dequeue(1, 300.0))
    assert len(await queue.dequeue(1, 300.0)) == 1


async def test_one_that_nobody_looks_for_is_deleted(
    queue: LocalQueue, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    await queue.enqueue([make_probe()])
    got = await queue.dequeue(1, 300.0)
    monkeypatch.setattr(module, "OLD_S", -1.0)
    await pass_on(queue, got)
    clock.s += 1000
    assert await queue.dequeue(1, 300.0) == []
