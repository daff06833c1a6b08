"""Attributes of an SQS queue (`GetQueueAttributes`) as facts."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, cast

from rollout.queues.port import Facts

MAX_HELD_S = 43_200.0
"""Maximum seconds from receipt (twelve hours): API_ChangeMessageVisibility."""
IN_FLIGHT = 120_000
FIFO_IN_FLIGHT = 20_000
"""Messages in flight above which a FIFO queue silently returns nothing. AWS has raised the limit for some queues
since."""
OLD_MAX_BYTES = 262_144
"""Maximum bytes of a message in every queue; since 2025 the limit may be 1 MiB."""
_DENIED = (
    "sqs:GetQueueAttributes is not allowed: where its dead letters go is not known, and messages are taken to be"
    f" {OLD_MAX_BYTES:,} bytes at most"
)


def facts_of(url: str, attributes: Mapping[str, str] | None) -> Facts:
    """Return the facts. `attributes` is None if they may not be read."""
    told = attributes or {}
    fifo = url.endswith(".fifo") or told.get("FifoQueue") == "true"
    policy = _policy(told.get("RedrivePolicy", ""))
    deliveries = str(policy.get("maxReceiveCount", ""))
    return Facts(
        name=url.rsplit("/", 1)[-1],
        max_lease_s=MAX_HELD_S,
        max_held_s=MAX_HELD_S,
        max_in_flight=FIFO_IN_FLIGHT if fifo else IN_FLIGHT,
        max_message_bytes=int(told.get("MaximumMessageSize") or OLD_MAX_BYTES),
        ordered=fifo,
        max_deliveries=int(deliveries) if deliveries.isdigit() else None,
        dead_letter=str(policy.get("deadLetterTargetArn", "")).rsplit(":", 1)[-1],
        remarks=(_DENIED,) if attributes is None else (),
    )


def _policy(text: str) -> Mapping[str, Any]:
    try:
        found: Any = json.loads(text) if text else {}
    except ValueError:
        return {}
    return cast("Mapping[str, Any]", found) if isinstance(found, dict) else {}
