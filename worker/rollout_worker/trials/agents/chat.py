"""A client of an OpenAI-compatible endpoint: one answer at a time, with retries and typed faults."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self, cast

import httpx2
from tenacity import (
    AsyncRetrying,
    RetryCallState,
    retry_if_exception,
    stop_after_attempt,
    wait_exponential,
    wait_random,
)
from tenacity.stop import stop_base

from rollout_worker.json_fields import count, dollars, table, text
from rollout_worker.trials.agents.api_faults import ApiFault, fault_of
from rollout_worker.trials.port import TrialFault

REFUSAL = "refusal"
"""The `finish_reason` of an answer in which the model refuses."""
_PATIENCE_S = 60.0
"""If a service asks for a longer wait, the trial is retried later, so that it holds no sandbox meanwhile."""
_backoff = wait_exponential(multiplier=0.5, max=20) + wait_random(0, 0.5)


@dataclass(frozen=True, slots=True)
class Answer:
    """An answer. `cached_tokens` are part of `input_tokens`. `cost_usd` is the service's figure. `counted` means that
    the service reported tokens."""

    text: str
    finish_reason: str
    input_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    reasoning: str = ""
    cost_usd: float | None = None
    counted: bool = True


class _ApiError(Exception):
    def __init__(self, fault: ApiFault) -> None:
        super().__init__(fault.message)
        self.fault = fault


class ChatEndpoint:
    """`base_url` may end with a slash. `retries` is the number of further tries at a request, if they may help.

    `progress` is called when the endpoint waits before another try, and when it asks again.
    """

    def __init__(
        self,
        base_url: str,
        model: str,
        *,
        key: str = "",
        retries: int = 4,
        timeout_s: float = 600.0,
        progress: Callable[[str], None] = lambda text: None,
    ) -> None:
        self._progress = progress
        self._url = f"{base_url.rstrip('/')}/chat/completions"
        self._model = model
        self._key = key
        self._retries = retries
        headers = {"authorization": f"Bearer {key}"} if key else {}
        timeout = httpx2.Timeout(timeout_s, connect=min(timeout_s, 30.0))
        self._client = httpx2.AsyncClient(headers=headers, timeout=timeout)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._client.aclose()

    async def ask(
        self, messages: Sequence[Mapping[str, Any]], parameters: Mapping[str, Any], *, deadline: float | None = None
    ) -> Answer:
        """Return the answer. Raises TrialFault once no further try is left, helps, or ends before `deadline`
        (time.time())."""

        body = {"model": self._model, "messages": list(messages), **parameters}
        tries = AsyncRetrying(
            retry=retry_if_exception(_may_help),
            wait=_wait,
            stop=stop_after_attempt(self._retries + 1) | _TooLate(deadline),
            before_sleep=lambda state: self._progress(f"waiting {state.upcoming_sleep:.0f} s for its service"),
            before=lambda state: self._progress("agent execution") if state.attempt_number > 1 else None,
            reraise=True,
        )
        try:
            return await tries(self._once, body)
        except _ApiError as error:
            fault = error.fault
            raise TrialFault(fault.type, fault.message, retry_after_s=fault.retry_after_s) from error

    async def _once(self, body: dict[str, Any]) -> Answer:
        try:
            response = await self._client.post(self._url, json=body)
        except httpx2.TimeoutException as error:
            raise _ApiError(ApiFault("api_unreachable", f"{self._url}: no answer in time", again=True)) from error
        except (httpx2.InvalidURL, httpx2.UnsupportedProtocol) as error:
            raise _ApiError(ApiFault("api_bad_request", f"base_url: {error}")) from error
        except httpx2.TransportError as error:
            why = str(error) or type(error).__name__
            raise _ApiError(ApiFault("api_unreachable", f"{self._url}: {why}", again=True)) from error
        if response.status_code != 200:
            fault = fault_of(response.status_code, response.headers, response.content, self._url)
            raise _ApiError(self._without_key(fault))
        return _answer(response.content, self._url)

    def _without_key(self, fault: ApiFault) -> ApiFault:
        message = fault.message.replace(self._key, "***") if self._key else fault.message
        return ApiFault(fault.type, message, fault.again, fault.retry_after_s)


class _TooLate(stop_base):
    """Stops when the next try would start after the deadline (time.time())."""

    def __init__(self, deadline: float | None) -> None:
        self._deadline = deadline

    def __call__(self, retry_state: RetryCallState) -> bool:
        return self._deadline is not None and time.time() + retry_state.upcoming_sleep >= self._deadline


def _may_help(error: BaseException) -> bool:
    return isinstance(error, _ApiError) and error.fault.again and (error.fault.retry_after_s or 0.0) <= _PATIENCE_S


def _wait(state: RetryCallState) -> float:
    error = state.outcome.exception() if state.outcome is not None else None
    asked = error.fault.retry_after_s if isinstance(error, _ApiError) else None
    return _backoff(state) if asked is None else asked


def _answer(body: bytes, url: str) -> Answer:
    broken = ApiFault("api_unreachable", f"{url}: the answer is no chat completion: {body[:200]!r}", again=True)
    try:
        value: Any = json.loads(body)
        choices = cast("dict[str, Any]", value).get("choices")
        choice = cast("dict[str, Any]", choices[0]) if choices else None
    except (ValueError, AttributeError, LookupError, TypeError) as error:
        raise _ApiError(broken) from error
    fields = cast("dict[str, Any]", value)
    if choice is None:
        # Some gateways answer 200 with an error inside.
        raise _ApiError(fault_of(500, {}, body, url) if "error" in fields else broken)
    message = table(choice.get("message"))
    refusal = _text(message.get("refusal"))
    usage = table(fields.get("usage"))
    return Answer(
        text=refusal or _text(message.get("content")),
        finish_reason=REFUSAL if refusal else str(choice.get("finish_reason") or "stop"),
        input_tokens=count(usage.get("prompt_tokens")),
        cached_tokens=count(table(usage.get("prompt_tokens_details")).get("cached_tokens")),
        output_tokens=count(usage.get("completion_tokens")),
        reasoning=_text(message.get("reasoning_content") or message.get("reasoning")),
        cost_usd=dollars(usage.get("cost")),
        counted=bool(usage),
    )


def _text(content: Any) -> str:
    """Return the text without halves of surrogate pairs, which JSON can hold but which cannot be sent back."""
    return text(content).encode("utf-8", "replace").decode()
