"""Check of the queue: sends a message, leases it for 30 s and acknowledges it. Messages of others are released at
once."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from contextlib import suppress

from rollout.cli.cloud_doctor.check import Passed
from rollout.config.cloud import CloudSection
from rollout.model.errors import RolloutError, UnavailableError
from rollout.queues import Facts, Place, Queue, open_queue
from rollout.queues.probe import make_probe

LEASE_S = 30.0
WAIT_S = 10.0
OTHERS_MAX = 20
"""Maximum number of other messages to receive; each receipt counts as a delivery of that message."""
TIDY_S = 5.0


async def roundtrip(cloud: CloudSection) -> Passed:
    """Send and receive a message. Raises UnavailableError or ConfigError with the failure and the missing
    permission."""
    source = open_queue(cloud.queue_backend, Place(cloud.intake, "input", LEASE_S), cloud)
    target = source
    if cloud.provider == "gcp":
        target = open_queue(cloud.queue_backend, Place(cloud.pubsub.topic, "output", LEASE_S), cloud)
    try:
        await _step("open", source.open())
        if target is not source:
            await _step("open the topic", target.open())
        outgoing = make_probe()
        body = outgoing.body
        try:
            await _step("enqueue", target.enqueue([outgoing]))
            found = await _received(source, body)
        except BaseException:
            await asyncio.shield(_taken_back(source, body))
            raise
        return Passed(f"{source.facts.name}: {_told(source.facts)}", _advice(source.facts, found))
    finally:
        await asyncio.shield(asyncio.gather(source.close(), target.close(), return_exceptions=True))


async def _taken_back(source: Queue, body: bytes) -> None:
    """Remove the message, also after Ctrl-C and after an error that may have come once the message was sent."""
    with suppress(RolloutError, TimeoutError):
        async with asyncio.timeout(TIDY_S):
            await _received(source, body, wait_s=TIDY_S)


async def _step(name: str, work: Awaitable[object]) -> None:
    try:
        await work
    except RolloutError as error:
        error.message = f"{name}: {error.message}"
        raise


async def _received(queue: Queue, body: bytes, wait_s: float = WAIT_S) -> bool:
    """Return whether the message came back. Returns False if too many other messages precede it."""
    others = 0
    until = asyncio.get_running_loop().time() + wait_s
    while (left := until - asyncio.get_running_loop().time()) > 0:
        try:
            messages = await queue.dequeue(10, LEASE_S, min(left, 2.0))
        except RolloutError as error:
            error.message = f"dequeue: {error.message}"
            raise
        own = [message for message in messages if message.body == body]
        strangers = [message for message in messages if message.body != body]
        if strangers:
            await _step("nack", queue.nack(strangers))
        if own:
            await _step("extend", queue.extend(own, LEASE_S))
            await _step("ack", queue.ack(own))
            return True
        others += len(strangers)
        if others >= OTHERS_MAX:
            return False
    raise UnavailableError(
        f"dequeue: the message that was sent did not arrive within {wait_s:g} s: do queue and subscription belong "
        "together, and does another consumer take the messages?"
    )


def _told(facts: Facts) -> str:
    kind = "first in, first out" if facts.ordered else "unordered"
    after = f"; to {facts.dead_letter} after {facts.max_deliveries} deliveries" if facts.dead_letter else ""
    return f"{kind}, leases up to {facts.max_lease_s:g} s{after}"


def _advice(facts: Facts, found: bool) -> tuple[str, ...]:
    said: list[str] = []
    if not found:
        said.append(
            f"the queue holds other messages, and the one that was sent was not among the first {OTHERS_MAX}: it is "
            'left there ({"rollout-doctor": ...}), and a run deletes it; look again on an empty queue'
        )
    if not facts.dead_letter:
        said.append("no dead-letter queue: a message that cannot be read comes again until it is too old; name one")
    return tuple(said)
