"""Message that `rollout cloud doctor` sends through a queue, also through one that a run takes from.

It is recognized by its body and its attribute together. A user's message that has the attribute, or a similar body, is
a normal row: nothing is ever deleted because it resembles a probe.
"""

from __future__ import annotations

import json
import re
import secrets
import time
from collections.abc import Sequence

from rollout.queues.port import Message, Outgoing, Queue

ATTRIBUTE = "rollout-doctor"
OLD_S = 120.0
"""Seconds after which no doctor looks for its message any more."""
PASS_ON_S = 1.0
"""Seconds during which the run that received a probe does not receive it again, so that the doctor does."""
_MARK = re.compile(r"[0-9a-f]{32}")
_NOTE = "a message of `rollout cloud doctor`, which deletes it within a minute"


def make_probe() -> Outgoing:
    mark = secrets.token_hex(16)
    return Outgoing(_body(mark, int(time.time())), {ATTRIBUTE: mark}, group=ATTRIBUTE, deduplication=mark)


def is_probe(message: Message) -> bool:
    return _sent_at(message) is not None


async def pass_on(queue: Queue, probes: Sequence[Message]) -> None:
    """Return probes that a run received to the queue for the doctor, and delete those that are too old."""
    left = time.time() - OLD_S
    old = [probe for probe in probes if (_sent_at(probe) or 0) < left]
    fresh = [probe for probe in probes if probe not in old]
    if old:
        await queue.ack(old)
    if fresh and queue.facts.min_lease_s <= PASS_ON_S:
        await queue.extend(fresh, PASS_ON_S)
    elif fresh:
        await queue.nack(fresh)


def _body(mark: str, sent_at: int) -> bytes:
    return json.dumps({ATTRIBUTE: mark, "sent_at": sent_at, "note": _NOTE}).encode()


def _sent_at(message: Message) -> int | None:
    """Return the time of sending in Unix seconds, or None if the message is no probe."""
    mark = message.attributes.get(ATTRIBUTE, "")
    if not _MARK.fullmatch(mark) or mark.encode() not in message.body:
        return None
    try:
        sent_at = json.loads(message.body)["sent_at"]
    except (ValueError, KeyError, TypeError):
        return None
    return sent_at if isinstance(sent_at, int) and message.body == _body(mark, sent_at) else None
