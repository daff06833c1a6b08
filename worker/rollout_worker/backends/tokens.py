"""Converts text to tokens and back, identically for every engine."""

# The engine's own types are incomplete or, where it is not installed, absent.
# pyright: reportMissingImports=false, reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportUnknownParameterType=false

from __future__ import annotations

import json
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import replace
from typing import Any

from rollout.model.errors import AttemptError

from rollout_worker.backends.port import Request, Sampling

# Tokens of the prompt decoded along with the completion: some tokenizers write a word's first space only in context.
_CONTEXT = 6
_BROKEN = "\ufffd"
"""Stands for the bytes of an incomplete character."""


class TextCodec:
    """Wraps a Hugging Face tokenizer. Encoding is not thread-safe."""

    def __init__(self, tokenizer: Any, max_model_len: int) -> None:
        self.tokenizer = tokenizer
        self.max_model_len = max_model_len
        self._names: dict[int, str] = {}

    @classmethod
    def load(cls, name: str, *, revision: str | None, trust_remote_code: bool, max_model_len: int) -> TextCodec:
        from transformers import AutoTokenizer

        tokenizer: Any = AutoTokenizer.from_pretrained(name, revision=revision, trust_remote_code=trust_remote_code)
        return cls(tokenizer, max_model_len)

    def encode_each(self, request: Request) -> list[list[int]]:
        """Encode each completion's prompt."""
        if not request.prompts:
            return [self.encode(request)] * request.sampling.n
        return [self.encode(replace(request, prompt_ids=ids, prompts=())) for ids in request.prompts]

    def encode(self, request: Request) -> list[int]:
        """Return the prompt's tokens. Raises AttemptError: prompt_too_long, bad_request (empty, or the chat template is
        missing or fails)."""
        given = request.prompt if request.prompt_ids is None else request.prompt_ids
        if request.embed is not None:
            given = request.embed.input
        if isinstance(given, str):
            ids: list[int] = self.tokenizer.encode(given)
        elif given is not None:
            ids = list(given)
            self.check_ids(ids, "the prompt")
        else:
            ids = self.text_ids(self.render(request))
        return self.checked(ids, request)

    def text_ids(self, text: str) -> list[int]:
        """Return the tokens of a rendered chat."""
        return self.tokenizer.encode(text, add_special_tokens=False)

    def checked(self, ids: list[int], request: Request) -> list[int]:
        """Return the prompt's tokens. Raises AttemptError if there are none, or more than the model's context."""
        if not ids:
            raise AttemptError("the prompt is empty: it has no token", code="bad_request", retry=False)
        if len(ids) + (request.embed is None) > self.max_model_len:
            raise AttemptError(
                f"the prompt has {len(ids)} tokens and the model holds {self.max_model_len}, completion included: "
                "shorten it, or raise backend.max_model_len if the model allows",
                code="prompt_too_long",
                retry=False,
            )
        return ids

    def render(self, request: Request) -> str:
        """Render the messages with the chat template. Raises AttemptError."""
        if not getattr(self.tokenizer, "chat_template", None):
            raise AttemptError(
                "the model has no chat template: use rows with a prompt, or a model made for chat",
                code="bad_request",
                retry=False,
            )
        from jinja2 import TemplateError

        try:
            return self.tokenizer.apply_chat_template(
                [_with_arguments(message) for message in request.messages or ()],
                tokenize=False,
                add_generation_prompt=True,
                **request.template,
            )
        except (TemplateError, ValueError, TypeError, KeyError) as error:
            # Templates refuse conversations they do not like (a role, an order) by raising.
            raise AttemptError(
                f"the model's chat template refuses the messages: {error}", code="bad_request", retry=False
            ) from error

    def decode(self, prompt: list[int], ids: list[int], *, skip_special: bool = True) -> str:
        """Return the text that `ids` add after `prompt`, by default without special tokens."""
        context = self.context(prompt, skip_special=skip_special)
        before = self.plain(context, skip_special)
        both = self.plain(context + ids, skip_special)
        return both[len(before) :] if both.startswith(before) else self.plain(ids, skip_special)

    def context(self, prompt: list[int], *, skip_special: bool) -> list[int]:
        """Return the end of the prompt with which a completion is decoded; empty if it ends within a character."""
        context = prompt[-_CONTEXT:]
        return [] if self.plain(context, skip_special).endswith(_BROKEN) else context

    def name(self, token: int) -> str:
        """Return a token as text, also a special one."""
        name = self._names.get(token)
        if name is None:
            name = self._names[token] = self.tokenizer.decode([token], skip_special_tokens=False)
        return name

    def thinking(self, request: Request, prompt: list[int]) -> bool:
        """Return whether the chat template left `<think>` open."""
        return request.messages is not None and self.plain(prompt[-_CONTEXT:], False).rstrip().endswith("<think>")

    def check_ids(self, ids: Iterable[int], what: str) -> None:
        """Raise AttemptError if the model has no such token."""
        given = list(ids)
        if given and not 0 <= min(given) <= max(given) < len(self.tokenizer):
            message = f"{what} has ids that none of the {len(self.tokenizer)} tokens of the model has"
            raise AttemptError(message, code="bad_request", retry=False)

    def plain(self, ids: list[int], skip_special: bool) -> str:
        """Return the text of `ids` alone."""
        return self.tokenizer.decode(ids, skip_special_tokens=skip_special, clean_up_tokenization_spaces=False)


def _with_arguments(message: dict[str, Any]) -> dict[str, Any]:
    """Convert the arguments of calls from JSON text, as in OpenAI's interface, to objects, as templates expect."""
    if not message.get("tool_calls"):
        return message
    calls: list[dict[str, Any]] = []
    for call in message["tool_calls"]:
        function = dict(call["function"])
        if isinstance(function.get("arguments"), str):
            with suppress(ValueError):
                function["arguments"] = json.loads(function["arguments"])
        calls.append({**call, "function": function})
    return {**message, "tool_calls": calls}


class TextStream:
    """The text of a completion, token by token, as far as later tokens cannot change it.

    What `add` has returned depends on the ids alone. With stop strings the last characters are held back, one fewer
    than the longest of them has: this is vLLM's rule, so a completion may continue in another engine.
    """

    def __init__(self, codec: TextCodec, prompt: list[int], sampling: Sampling) -> None:
        self._codec = codec
        self._skip = sampling.skip_special
        self._ids = codec.context(prompt, skip_special=self._skip)
        self._window = 0  # ids from here to `_read` are decoded again with those that follow
        self._read = len(self._ids)
        self._held = 0 if sampling.include_stop else max((len(stop) - 1 for stop in sampling.stop), default=0)
        self.text = ""
        """All complete characters."""
        self._given = 0

    def add(self, ids: Iterable[int]) -> str:
        """Add ids, and return the new text."""
        for token in ids:
            self._ids.append(token)
            before = self._codec.plain(self._ids[self._window : self._read], self._skip)
            text = self._codec.plain(self._ids[self._window :], self._skip)
            if len(text) > len(before) and not text.endswith(_BROKEN):
                self.text += text[len(before) :]
                self._window, self._read = self._read, len(self._ids)
        gained = self.text[self._given : max(self._given, len(self.text) - self._held)]
        self._given += len(gained)
        return gained

    def rest(self, whole: str) -> str:
        """Return the rest of the whole text."""
        return whole[self._given :]


def stopped_text(codec: TextCodec, prompt: list[int], ids: list[int], sampling: Sampling) -> str | None:
    """Return the text if the last of `ids` completed a stop string, else None."""
    if not sampling.stop or len(ids) <= sampling.min_tokens:
        return None
    # A token is at least a byte, so a stop string that just ended lies within this many tokens.
    reach = max(len(stop.encode()) for stop in sampling.stop) + 4
    if cut_at_stop(codec.decode(ids[:-reach], ids[-reach:]), sampling.stop) is None:
        return None

    def text(of: list[int]) -> str:
        return codec.decode(prompt, of, skip_special=sampling.skip_special)

    since = len(text(ids[: sampling.min_tokens])) if sampling.min_tokens else 0
    return cut_at_stop(text(ids), sampling.stop, include=sampling.include_stop, since=since)


def cut_at_stop(text: str, stops: tuple[str, ...], *, include: bool = False, since: int = 0) -> str | None:
    """Return `text` up to the first stop string that ends after `since` characters, optionally including it, or
    None."""
    found = [(at, stop) for stop in stops if (at := text.find(stop, max(0, since - len(stop) + 1))) >= 0]
    if not found:
        return None
    at, stop = min(found, key=lambda pair: pair[0])
    return text[: at + len(stop) if include else at]
