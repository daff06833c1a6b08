"""Maps refusals of a model's service to types of error, and says whether a retry may help."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from typing import Any, cast

_CONTEXT = (
    "context_length_exceeded", "context length", "context window", "maximum context", "prompt is too long",
    "input is too long", "too many tokens", "reduce the length",
)  # fmt: skip
_QUOTA = ("insufficient_quota", "billing", "credit balance", "quota", "usage limit", "spending limit", "payment")
_REFUSED = ("content_filter", "content_policy", "content management policy", "safety")


@dataclass(frozen=True, slots=True)
class ApiFault:
    """`type` is one of `rollout.workloads.job.errors`. `again` means that the same request may succeed later."""

    type: str
    message: str
    again: bool = False
    retry_after_s: float | None = None


def fault_of(status: int, headers: Mapping[str, str], body: bytes, what: str) -> ApiFault:
    """Return the fault of a failed answer. `what` names the request in the message."""
    said, codes = _said(body)
    text = f"{codes} {said}".lower()
    message = f"{what} answered {status}" + (f": {said}" if said else "")
    after = retry_after(headers)
    match status:
        case 401 | 403:
            return ApiFault("agent_authentication_failed", f"{message}; check the key")
        case 402:
            return ApiFault("api_usage_limit", message, retry_after_s=after)
        case 404:
            if "model" in text or not said:
                return ApiFault("agent_model_not_found", message)
            return ApiFault("api_bad_request", f"{message}; check base_url, which mostly ends with /v1")
        case 429:
            if _any(text, _QUOTA) and "rate" not in codes.lower():
                return ApiFault("api_usage_limit", message, retry_after_s=after)
            return ApiFault("api_rate_limited", message, again=True, retry_after_s=after)
        case 408 | 409:
            return ApiFault("api_overloaded", message, again=True, retry_after_s=after)
        case _ if status >= 500:
            return ApiFault("api_overloaded", message, again=True, retry_after_s=after)
        case _:
            pass
    if _any(text, _CONTEXT) or status == 413:
        return ApiFault("agent_context_window_exceeded", message)
    if _any(text, _REFUSED):
        return ApiFault("agent_refused", message)
    if "model_not_found" in text or ("model" in text and ("not exist" in text or "not found" in text)):
        return ApiFault("agent_model_not_found", message)
    return ApiFault("api_bad_request", message)


def fault_in_text(text: str) -> str:
    """Return the type of error in the output of a program that prints a service's message, or ""."""
    lowered = _CODE.sub(r"status \1", text.lower())
    for needles, kind in _PRINTED:
        if _any(lowered, needles):
            return kind
    return ""


_CODE = re.compile(r"\b(?:status|http|error|code)\b[^\w\n]{0,4}(?:code\W{1,3})?([45]\d\d)\b")
"""Requires a word before the number, which alone could be anything that the agent printed."""
_PRINTED: tuple[tuple[tuple[str, ...], str], ...] = (
    (("invalid api key", "invalid x-api-key", "incorrect api key", "authentication_error", "unauthorized", "status 401",
      "invalid bearer", "api key not valid", "please run /login", "permission_denied"), "agent_authentication_failed"),
    (("credit balance is too low", "insufficient_quota", "exceeded your current quota", "usage limit reached",
      "billing_error", "hit your usage limit"), "api_usage_limit"),
    (("rate_limit", "rate limit", "ratelimit", "resource_exhausted", "too many requests", "status 429"),
     "api_rate_limited"),
    (("overloaded", "status 503", "status 529", "service unavailable", "internal server error", "unavailable"),
     "api_overloaded"),
    (("context_length_exceeded", "prompt is too long", "context window", "maximum context length",
      "contextwindowexceeded"), "agent_context_window_exceeded"),
    (("model_not_found", "not_found_error", "model not found", "does not exist or you do not have access"),
     "agent_model_not_found"),
    (("connection error", "connection refused", "econnrefused", "enotfound", "fetch failed", "could not resolve",
      "getaddrinfo", "network error", "stream disconnected", "error sending request"), "api_unreachable"),
)  # fmt: skip
"""Phrases of services and programs, the most specific first."""


def _any(text: str, needles: tuple[str, ...]) -> bool:
    return any(needle in text for needle in needles)


def _said(body: bytes) -> tuple[str, str]:
    """Return (message, types and codes) of an error, in the forms that services use."""
    try:
        value: Any = json.loads(body)
    except ValueError:
        return body[:300].decode(errors="replace").strip(), ""
    if not isinstance(value, dict):
        return str(value)[:300], ""
    fields = cast("dict[str, Any]", value)
    inner = fields.get("error", fields)
    if isinstance(inner, str):
        return inner[:1000], ""
    error: dict[str, Any] = cast("dict[str, Any]", inner) if isinstance(inner, dict) else fields
    message = next((error[key] for key in ("message", "detail", "msg") if error.get(key)), "")
    codes = " ".join(str(error[key]) for key in ("type", "code", "status") if error.get(key))
    return str(message)[:1000], codes


def retry_after(headers: Mapping[str, str]) -> float | None:
    """Return the wait that the service asks for, in seconds: `retry-after-ms`, or Retry-After as seconds or date (RFC
    9110)."""
    with suppress(ValueError):
        if (milliseconds := headers.get("retry-after-ms")) is not None:
            return max(0.0, float(milliseconds) / 1000)
    value = headers.get("retry-after")
    if value is None:
        return None
    with suppress(ValueError):
        return max(0.0, float(value))
    with suppress(ValueError):
        return max(0.0, parsedate_to_datetime(value).timestamp() - time.time())
    return None
