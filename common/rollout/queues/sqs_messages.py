"""Messages in SQS: text of a restricted character set with at most ten attributes.

Other bodies are sent as base64, marked by the attribute `rollout.encoding`. Source of all limits:
https://docs.aws.amazon.com/AWSSimpleQueueService/latest/APIReference/API_SendMessage.html
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rollout.model.errors import InputError
from rollout.queues.port import Message, Outgoing

ENCODING = "rollout.encoding"
MAX_ATTRIBUTES = 10
_EMPTY = "\n"
"""Body of an empty message: SQS rejects an empty string, which is the base64 of nothing; a line break has no meaning
there."""
_REFUSED = re.compile("[^\t\n\r\u0020-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
_NAME = re.compile(r"(?!aws\.|amazon\.)(?!\.)[A-Za-z0-9_.-]{1,256}(?<!\.)", re.IGNORECASE)
_ID = re.compile(r"[A-Za-z0-9!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~]{1,128}")


@dataclass(frozen=True, slots=True)
class Encoded:
    body: str
    attributes: Mapping[str, str]
    size: int
    """Bytes that SQS counts: the body, and the name, type and value of each attribute."""


def encode(message: Outgoing, *, fifo: bool, index: int = 0) -> Encoded:
    """Encode a message. Raises InputError with `index` if it has attributes that SQS rejects."""
    attributes = dict(message.attributes) if fifo else message.all_attributes
    body = _as_text(message.body)
    if body is None or ENCODING in attributes:
        body = base64.b64encode(message.body).decode() or _EMPTY
        attributes[ENCODING] = "base64"
    fault = _fault(attributes)
    if fault:
        raise InputError(f"SQS does not take this message: {fault}", index=index)
    extra = sum(len(name) + len("String") + len(value.encode()) for name, value in attributes.items())
    return Encoded(body, attributes, len(body.encode()) + extra)


def decode(raw: Mapping[str, Any]) -> Message:
    """Decode a message of `ReceiveMessage`. One that is marked as base64 but is not keeps its body and the mark."""
    told: Mapping[str, str] = raw.get("Attributes") or {}
    given: Mapping[str, Mapping[str, Any]] = raw.get("MessageAttributes") or {}
    attributes = {name: _value(value) for name, value in given.items()}
    text = str(raw.get("Body", ""))
    body = text.encode("utf-8", "surrogatepass")
    if attributes.get(ENCODING) == "base64":
        try:
            body = base64.b64decode("".join(text.split()), validate=True)
            del attributes[ENCODING]
        except (ValueError, binascii.Error):
            pass
    return Message(
        id=str(raw["MessageId"]),
        body=body,
        receipt=str(raw["ReceiptHandle"]),
        deliveries=_count(told.get("ApproximateReceiveCount", "")),
        attributes=attributes,
        group=told.get("MessageGroupId", ""),
    )


def fifo_id(value: str) -> str:
    """Return the id of a group or deduplication, or its hash if SQS would reject it."""
    return value if _ID.fullmatch(value) else hashlib.sha256(value.encode("utf-8", "surrogatepass")).hexdigest()


def _as_text(body: bytes) -> str | None:
    try:
        text = body.decode()
    except UnicodeDecodeError:
        return None
    return None if not text or _REFUSED.search(text) else text


def _fault(attributes: Mapping[str, str]) -> str:
    if len(attributes) > MAX_ATTRIBUTES:
        return f"it has {len(attributes)} attributes, and {MAX_ATTRIBUTES} is the most"
    for name, value in attributes.items():
        if not _NAME.fullmatch(name) or ".." in name:
            return f"{name!r} is no name of an attribute: letters, digits, hyphens, underscores and single dots"
        if not value or _REFUSED.search(value):
            return f"the value of attribute {name!r} is empty or has characters that SQS refuses"
    return ""


def _value(value: Mapping[str, Any]) -> str:
    if "StringValue" in value:
        return str(value["StringValue"])
    return base64.b64encode(value.get("BinaryValue", b"")).decode()


def _count(text: str) -> int:
    return int(text) if text.isdigit() else 0
