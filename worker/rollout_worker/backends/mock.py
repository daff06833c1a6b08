"""A backend without a model: deterministic text after a delay, with failures on demand.

Options: delay_ms, jitter_ms, token_ms, concurrency (64), fail_rate, fail_match, seed, max_model_len (0: no limit).
"""

from __future__ import annotations

import asyncio
import json
from typing import Any, cast

from blake3 import blake3
from rollout.model.errors import AttemptError

from rollout_worker.backends.port import (
    Backend,
    BackendOptions,
    Begun,
    Choice,
    Completion,
    Delta,
    Request,
    cannot_continue,
)
from rollout_worker.backends.tokens import cut_at_stop
from rollout_worker.backends.vectors import unit

DIMENSIONS = 16
"""Length of a vector if the row sets none."""


def open_backend(config: BackendOptions) -> Backend:
    return MockBackend(config.options)


class MockBackend:
    """A "token" is a word. The text is `MOCK:` and the prompt; a sampled one with n > 1 adds a number."""

    def __init__(self, options: dict[str, Any]) -> None:
        self._delay_s = float(options.get("delay_ms") or 0) / 1000
        self._jitter_s = float(options.get("jitter_ms") or 0) / 1000
        self._token_s = float(options.get("token_ms") or 0) / 1000
        self._concurrency = int(options.get("concurrency") or 64)
        self._fail_rate = float(options.get("fail_rate") or 0)
        self._fail_match = str(options.get("fail_match") or "")
        self._seed = int(options.get("seed") or 0)
        self._max_model_len = int(options.get("max_model_len") or 0)
        self._slots = asyncio.Semaphore(self._concurrency)

    @property
    def concurrency(self) -> int:
        return self._concurrency

    @property
    def device(self) -> str:
        return "cpu"

    async def start(self) -> None:
        return None

    async def close(self) -> None:
        return None

    async def generate(self, request: Request) -> Completion:
        prompt = _prompt(request)
        words = prompt.split()
        if self._max_model_len and len(words) >= self._max_model_len:
            raise AttemptError(
                f"the prompt has {len(words)} tokens and the model holds {self._max_model_len}: shorten it",
                code="prompt_too_long",
                retry=False,
            )
        async with self._slots:
            delay = self._delay_s + self._jitter_s * self._draw("jitter", request.request_id)
            if delay:
                await asyncio.sleep(delay)
            if self._fail_match and self._fail_match in prompt:
                raise AttemptError(f"the prompt contains {self._fail_match!r}", code="mock_failure", retry=True)
            # The request id carries the attempt, so a retry draws anew.
            if self._fail_rate and self._draw("fail", request.request_id) < self._fail_rate:
                raise AttemptError("a failure was injected (backend.fail_rate)", code="mock_failure", retry=True)
            if request.on_begin is not None:
                request.on_begin(Begun(len(words)))
            if request.embed is not None:
                return Completion([], len(words), [self._vector(prompt, request.embed.dimensions or DIMENSIONS)])
            written = [self._choice(prompt, request, index) for index in range(request.sampling.n)]
            await self._write(request, written)
        return Completion([choice for choice, _ in written], prompt_tokens=len(words))

    async def _write(self, request: Request, written: list[tuple[Choice, list[str]]]) -> None:
        """Write the words of all choices concurrently. The id of a word follows from its letters."""
        first = written[0][1][: len(request.so_far)]
        if tuple(map(_id, first)) != request.so_far:
            raise cannot_continue("this model would have begun otherwise")
        if request.on_delta is not None and first:
            request.on_delta(Delta(0, "".join(first), request.so_far, repeated=True))
        for place in range(len(first), max(len(tokens) for _, tokens in written)):
            if self._token_s:
                await asyncio.sleep(self._token_s)
            for index, (choice, tokens) in enumerate(written):
                if request.on_delta is not None and place < len(tokens):
                    logprobs = () if choice.logprobs is None else (choice.logprobs[place],)
                    last = place == len(tokens) - 1
                    request.on_delta(Delta(index, tokens[place], (_id(tokens[place]),), logprobs, last=last))

    def _vector(self, text: str, dimensions: int) -> list[float]:
        """Return a vector of unit length, equal for equal texts."""
        data = blake3(f"{self._seed}\0embed\0{text}".encode("utf-8", "surrogatepass")).digest(length=4 * dimensions)
        numbers = [int.from_bytes(data[at : at + 4], "big") / 2**31 - 1 for at in range(0, len(data), 4)]
        return unit(numbers)

    def _draw(self, what: str, key: str) -> float:
        name = key.partition(".")[0]  # given back and begun again, it is the same attempt
        digest = blake3(f"{self._seed}\0{what}\0{name}".encode()).digest()
        return int.from_bytes(digest[:8], "big") / 2**64

    def _choice(self, prompt: str, request: Request, index: int) -> tuple[Choice, list[str]]:
        """Return a choice and its words."""
        sampling = request.sampling
        if sampling.json_schema is not None:
            tokens = [json.dumps(example(sampling.json_schema), separators=(",", ":"))]
        elif sampling.choice:
            tokens = _tokens(sampling.choice[0])
        else:
            text = f"MOCK:{request.adapter}:{prompt}" if request.adapter else f"MOCK:{prompt}"
            if sampling.temperature > 0 and (sampling.n > 1 or self._seed):
                text += f" #{int(self._draw('text', f'{sampling.seed + index}') * 1_000_000):06d}"
            tokens = _tokens(text)
        finish = "stop"
        if len(tokens) > sampling.max_tokens:
            tokens, finish = tokens[: sampling.max_tokens], "length"
        text = "".join(tokens)
        cut = cut_at_stop(text, sampling.stop, include=sampling.include_stop)
        if cut is not None:
            text, finish = cut, "stop"
            tokens = _tokens(text)
        return Choice(text, finish, len(tokens), self._logprobs(tokens, sampling.logprobs)), tokens

    def _logprobs(self, tokens: list[str], top: int | None) -> list[dict[str, Any]] | None:
        if top is None:
            return None
        out: list[dict[str, Any]] = []
        for position, token in enumerate(tokens):
            logprob = -self._draw("logprob", f"{position}\0{token}")
            alternatives = [{"token": token, "logprob": logprob}]
            alternatives += [{"token": f"<{rank}>", "logprob": logprob - rank} for rank in range(1, top)]
            out.append({"token": token, "logprob": logprob, "top": alternatives[:top]})
        return out


def _prompt(request: Request) -> str:
    text = request.prompt if request.embed is None else request.embed.input
    if isinstance(text, str):
        return text
    ids = request.prompt_ids if text is None else text
    if ids is not None:
        return " ".join(map(str, ids))
    return "\n".join(f"{message['role']}: {_content(message['content'])}" for message in request.messages or ())


def _content(content: Any) -> str:
    """Return the text; an image becomes one token that depends on its bytes."""
    if isinstance(content, str):
        return content
    parts = cast("list[dict[str, Any]]", content)
    return " ".join(part["text"] if part["type"] == "text" else f"<image:{_named(part)}>" for part in parts)


def _named(part: dict[str, Any]) -> str:
    return blake3(str(part["image_url"]["url"]).encode()).hexdigest()[:8]


def _id(token: str) -> int:
    return int.from_bytes(blake3(token.encode("utf-8", "surrogatepass")).digest()[:3], "little")


def _tokens(text: str) -> list[str]:
    """Split into words, each with the space before it, so that joining them restores the text."""
    tokens: list[str] = []
    for piece in text.split(" "):
        tokens.append(f" {piece}" if tokens else piece)
    return tokens


def example(schema: dict[str, Any]) -> Any:
    """Return a small value that satisfies common JSON schemas (type, enum, const, properties, items, bounds)."""
    if "const" in schema:
        return schema["const"]
    if schema.get("enum"):
        return schema["enum"][0]
    for key in ("anyOf", "oneOf"):
        if schema.get(key):
            return example(schema[key][0])
    kind = schema.get("type", "object" if "properties" in schema else "null")
    if isinstance(kind, list):
        kind = str(cast(list[Any], kind)[0]) if kind else "null"
    if kind == "object":
        return {name: example(value) for name, value in schema.get("properties", {}).items()}
    if kind == "array":
        return [example(schema.get("items", {})) for _ in range(schema.get("minItems", 0))]
    if kind in ("integer", "number"):
        return schema.get("minimum", 0)
    return {"string": "x" * schema.get("minLength", 0), "boolean": False}.get(str(kind))
