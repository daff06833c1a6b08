"""The JSON that workloads write: canonical where it is hashed or compared, lines where it is read."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from typing import Any, cast

JsonObject = dict[str, Any]

# Encoders made once: `json.dumps` with options makes one for each call.
_canonical = json.JSONEncoder(sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode
_line = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode


def canonical(value: Any) -> bytes:
    """Canonical JSON: equal values give equal bytes."""
    return _canonical(value).encode("utf-8", "surrogatepass")


def dump_line(value: Any) -> bytes:
    """One JSONL line. Halves of surrogate pairs, which UTF-8 cannot hold, are escaped."""
    try:
        return _line(value).encode() + b"\n"
    except UnicodeEncodeError:
        return json.dumps(value, separators=(",", ":")).encode() + b"\n"


def timestamp(unix_ms: int) -> str:
    """RFC 3339 in UTC with milliseconds."""
    return datetime.fromtimestamp(unix_ms / 1000, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def short(value: Any) -> str:
    """A value in a message."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def lookup(value: JsonObject, key: str) -> Any:
    """What stands in nested objects under a dotted key; None: nothing."""
    found: Any = value
    for part in key.split("."):
        found = cast(JsonObject, found).get(part) if isinstance(found, dict) else None
    return found
