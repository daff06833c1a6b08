"""Messages in Pub/Sub's REST interface, and the facts of a subscription.

Sources: https://cloud.google.com/pubsub/docs/reference/rest/v1/PubsubMessage, https://cloud.google.com/pubsub/quotas.
"""

from __future__ import annotations

import base64
import math
import sys
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from rollout.model.errors import ConfigError, InputError
from rollout.queues.port import Facts, Message, Outgoing

MAX_MESSAGE_BYTES = 10_000_000
MAX_LEASE_S = 600.0
MIN_LEASE_S = 10.0
EMPTY = "rollout.empty"
"""Attribute of a message without a body: Pub/Sub rejects one with neither body nor attributes."""
_DENIED = (
    "{permission} is not allowed: ack deadline, exactly-once delivery, ordering and dead letters are not known, and"
    " taken to be absent"
)


def encode(message: Outgoing, index: int = 0) -> dict[str, Any]:
    """Encode a message. Raises InputError with `index` if it is too large or has attributes that Pub/Sub rejects."""
    attributes = message.all_attributes
    if not message.body and not attributes:
        attributes[EMPTY] = "1"
    fault = _fault(message, attributes)
    if fault:
        raise InputError(f"Pub/Sub does not take this message: {fault}", index=index)
    sent: dict[str, Any] = {"data": base64.b64encode(message.body).decode()}
    if attributes:
        sent["attributes"] = attributes
    if message.group:
        sent["orderingKey"] = message.group
    return sent


def _fault(message: Outgoing, attributes: Mapping[str, str]) -> str:
    size = len(message.body) + sum(len(k.encode()) + len(v.encode()) for k, v in attributes.items())
    size += len(message.group.encode())
    if size > MAX_MESSAGE_BYTES:
        return f"it has {size:,} bytes, and {MAX_MESSAGE_BYTES:,} is the most"
    if len(attributes) > 100:
        return f"it has {len(attributes)} attributes, and 100 is the most"
    for name, value in attributes.items():
        if not name or len(name.encode()) > 256 or name.lower().startswith("goog"):
            return f"{name!r} is no name of an attribute: at most 256 bytes, and not beginning with goog"
        if len(value.encode()) > 1024:
            return f"the value of attribute {name!r} has more than 1,024 bytes"
    if len(message.group.encode()) > 1024:
        return "its ordering key has more than 1,024 bytes"
    return ""


def decode(received: Mapping[str, Any]) -> Message:
    """Decode an entry of `receivedMessages`."""
    message: Mapping[str, Any] = received.get("message") or {}
    attributes = dict(message.get("attributes") or {})
    body = base64.b64decode(message.get("data") or "")
    if not body:
        attributes.pop(EMPTY, None)
    return Message(
        id=str(message.get("messageId", "")),
        body=body,
        receipt=str(received["ackId"]),
        deliveries=int(received.get("deliveryAttempt") or 0),
        attributes=attributes,
        group=str(message.get("orderingKey") or ""),
    )


def subscription_facts(name: str, told: Mapping[str, Any] | None, key: str) -> Facts:
    """Return the facts of a subscription.

    `told` is its resource, or None if it may not be read. Raises ConfigError if it is not a pull subscription.
    """
    if told is not None:
        _check_pull(name, told, key)
    read = told or {}
    policy: Mapping[str, Any] = read.get("deadLetterPolicy") or {}
    deliveries = policy.get("maxDeliveryAttempts")
    return replace(
        _facts(name),
        ordered=bool(read.get("enableMessageOrdering")),
        exactly_once=bool(read.get("enableExactlyOnceDelivery")),
        max_deliveries=int(deliveries) if deliveries else None,
        dead_letter=str(policy.get("deadLetterTopic", "")).rsplit("/", 1)[-1],
        remarks=(_DENIED.format(permission="pubsub.subscriptions.get"),) if told is None else (),
    )


def topic_facts(name: str, readable: bool) -> Facts:
    unknown = "pubsub.topics.get is not allowed: whether there is such a topic is not known"
    return replace(_facts(name), remarks=() if readable else (unknown,))


def _facts(name: str) -> Facts:
    return Facts(
        name=name,
        min_lease_s=MIN_LEASE_S,
        max_lease_s=MAX_LEASE_S,
        max_held_s=math.inf,
        max_in_flight=sys.maxsize,
        max_message_bytes=MAX_MESSAGE_BYTES,
    )


def _check_pull(name: str, told: Mapping[str, Any], key: str) -> None:
    push: Mapping[str, Any] = told.get("pushConfig") or {}
    elsewhere = str(push.get("pushEndpoint") or "")
    elsewhere = elsewhere or next((k for k in ("bigqueryConfig", "cloudStorageConfig") if told.get(k)), "")
    if elsewhere:
        raise ConfigError(
            f"{key}: Pub/Sub itself sends the messages of subscription {name} to {elsewhere}: rows cannot be taken from"
            " it; make one of type pull on the same topic"
        )
    if told.get("detached") or told.get("topic") == "_deleted-topic_":
        raise ConfigError(f"{key}: the topic of subscription {name} was deleted, or it is detached: make another one")
