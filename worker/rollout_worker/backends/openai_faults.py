"""Interprets refusals of an OpenAI-compatible server: the row is at fault, the engine is, or the request is retried."""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextlib import suppress
from enum import Enum, auto

from rollout_worker.trials.agents.api_faults import fault_of, retry_after

REFUSED_TRIES = 40
"""Tries of a request that the server refuses because of its load: with the pauses, more than a quarter of an hour."""
BROKEN_TRIES = 6
_OVERLOADED = frozenset({429, 503, 529})
_OF_ROW = {"agent_context_window_exceeded": "prompt_too_long", "agent_refused": "content_filter"}


class Whose(Enum):
    ROW = auto()  # it can never succeed
    ENGINE = auto()  # no row can
    LOAD = auto()  # asked again, more slowly
    BROKEN = auto()  # asked again
    AWAY = auto()  # nobody answers: asked again for as long as that lasts


TRIES = {Whose.LOAD: REFUSED_TRIES, Whose.BROKEN: BROKEN_TRIES}


class FaultError(Exception):
    """A request without an answer. `retry_after_s` is a pause that the server asks of all requests."""

    def __init__(self, whose: Whose, code: str, message: str, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.whose, self.code, self.message, self.retry_after_s = whose, code, message, retry_after_s


def refusal(status: int, headers: Mapping[str, str], body: bytes, what: str) -> FaultError:
    """Return the error of an unsuccessful answer. `what` names the request in the message."""
    fault = fault_of(status, headers, body, what)
    lowered = body[:4096].lower()
    if status in (301, 302, 303, 307, 308):
        place = headers.get("location", "")
        return FaultError(Whose.ENGINE, "redirected", f"{what} is at {place!r} now: set backend.base_url to it")
    if status in (401, 403):
        return FaultError(Whose.ENGINE, "authentication_failed", f"{fault.message} that backend.api_key_env names")
    if status == 402 or (status == 429 and b"insufficient_quota" in lowered):
        return FaultError(Whose.ENGINE, "quota_exhausted", f"{fault.message}; the account has no credit left")
    if b"model_not_found" in lowered or (status == 404 and fault.type == "agent_model_not_found" and _no_such(lowered)):
        return FaultError(Whose.ENGINE, "model_unknown", f"{fault.message}; set model.uri to a name the server has")
    if status == 429 and b"request too large" in lowered:
        return FaultError(Whose.ROW, "prompt_too_long", fault.message)
    if status in _OVERLOADED:
        code = "rate_limited" if status == 429 else "server_overloaded"
        return FaultError(Whose.LOAD, code, fault.message, pause_of(headers))
    if status in (408, 409) or status >= 500:
        return FaultError(Whose.BROKEN, "server_error", fault.message, fault.retry_after_s)
    return FaultError(Whose.ROW, _OF_ROW.get(fault.type, "bad_request"), fault.message)


def _no_such(body: bytes) -> bool:
    """Return whether the server has no such model; it may also say that a model does not support this address."""
    return any(words in body for words in (b"not exist", b"not found", b"no such", b"unknown", b"not_found"))


def pause_of(headers: Mapping[str, str]) -> float | None:
    """Return for how many seconds the server accepts nothing: Retry-After, retry-after-ms, or x-ratelimit-reset-... if
    nothing remains. Returns None if it does not say."""
    asked = retry_after(headers)
    if asked is not None:
        return asked
    resets = [
        reset
        for of in ("requests", "tokens")
        if headers.get(f"x-ratelimit-remaining-{of}", "").strip() == "0"
        and (reset := _duration_s(headers.get(f"x-ratelimit-reset-{of}", ""))) is not None
    ]
    return max(resets, default=None)


_PART = re.compile(r"(\d+(?:\.\d+)?)(ms|s|m|h|d)")
_SECONDS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86_400.0}


def _duration_s(text: str) -> float | None:
    """Parse `6m0s`, `20ms`, or a number of seconds."""
    with suppress(ValueError):
        return max(0.0, float(text))
    parts = _PART.findall(text)
    if not parts or "".join(number + unit for number, unit in parts) != text:
        return None
    return sum(float(number) * _SECONDS[unit] for number, unit in parts)
