"""Reads a streamed answer of an OpenAI-compatible server: its events as deltas, and together as a complete answer."""

from __future__ import annotations

import codecs
import json
from collections.abc import Callable, Iterator
from typing import Any, cast

from rollout_worker.backends.openai_format import BadAnswerError, Json, choice_of
from rollout_worker.backends.port import Delta
from rollout_worker.json_fields import listed, table, text

STREAMED: Json = {"stream": True, "stream_options": {"include_usage": True}}
"""Keys of a body that ask for a stream."""
_DONE = "[DONE]"


class StreamedAnswer:
    """A streamed answer. `on_delta` gets the new part of each event. `began` is set once something has arrived."""

    def __init__(self, on_delta: Callable[[Delta], None], *, chat: bool) -> None:
        self._on_delta = on_delta
        self._chat = chat
        self._text = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._line = ""
        self._answer: Json = {}
        self._choices: dict[int, _Choice] = {}
        self._over = False
        self.began = False

    def feed(self, data: bytes) -> None:
        """Add data. Raises BadAnswerError."""
        self._line += self._text.decode(data)
        *lines, self._line = self._line.split("\n")
        for line in lines:
            name, _, value = line.rstrip("\r").partition(":")
            if name == "data":
                self._event(value.strip())

    def whole(self) -> Json:
        """Return the answer. Raises BadAnswerError if it is incomplete."""
        if self._answer.get("error"):
            return self._answer
        if not self._over and not (self._choices and all(one.finish for one in self._choices.values())):
            raise BadAnswerError("the stream ended before its last event")
        for index in sorted(self._choices):
            self._say(index, *self._choices[index].calls())
        choices = [self._choices[index].as_json(index, self._chat) for index in sorted(self._choices)]
        return {**self._answer, "choices": choices}

    def _event(self, value: str) -> None:
        if value == _DONE:
            self._over = True
            return
        try:
            event: Any = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise BadAnswerError(f"an event is no JSON ({error})") from None
        if not isinstance(event, dict):
            raise BadAnswerError("an event is no JSON object")
        fields = cast(Json, event)
        self._answer |= {key: fields[key] for key in ("id", "usage", "error") if fields.get(key)}
        for one in listed(fields.get("choices")):
            self._add(table(one))

    def _add(self, fields: Json) -> None:
        index = fields.get("index", 0)
        if type(index) is not int:
            raise BadAnswerError("the index of a choice is no number")
        known = self._choices.setdefault(index, _Choice())
        part = fields.get("delta") if self._chat else fields
        for delta in known.add(fields, table(part), chat=self._chat):
            self._say(index, delta)

    def _say(self, index: int, *deltas: Json) -> None:
        for delta in deltas:
            self.began = True
            self._on_delta(Delta(index, **delta))


class _Choice:
    def __init__(self) -> None:
        self.finish = ""
        self._texts: dict[str, list[str]] = {"content": [], "reasoning_content": [], "refusal": []}
        self._calls: dict[int, Json] = {}
        self._logprobs: list[Any] = []

    def add(self, fields: Json, part: Json, *, chat: bool) -> Iterator[Json]:
        """Yield the new parts as fields of a delta."""
        said = text(part.get("content" if chat else "text"))
        reasoning = text(part.get("reasoning_content")) or text(part.get("reasoning"))
        for key, new in (
            ("content", said),
            ("reasoning_content", reasoning),
            ("refusal", text(part.get("refusal"))),
        ):
            if new:
                self._texts[key].append(new)
        for call in listed(part.get("tool_calls")):
            self._call(table(call))
        if fields.get("finish_reason"):
            self.finish = str(fields["finish_reason"])
        logprobs = fields.get("logprobs")
        if isinstance(logprobs, dict):
            self._logprobs.append(logprobs)
            filled: Json = {"finish_reason": "stop", "logprobs": logprobs, "text": "", "message": {}}
            logprobs = tuple(choice_of(filled, chat=chat).logprobs or ())
        if said or reasoning or logprobs:
            yield {"text": said, "reasoning": reasoning, "logprobs": logprobs or ()}

    def _call(self, part: Json) -> None:
        """Add a part of a call. Parts have the call's number; one without it belongs to the last call."""
        number = part.get("index")
        number = number if type(number) is int else max(self._calls, default=0)
        call = self._calls.setdefault(number, {"id": "", "type": "function", "function": {"name": "", "arguments": ""}})
        if part.get("id"):
            call["id"] = str(part["id"])
        given = table(part.get("function"))
        call["function"]["name"] += text(given.get("name"))
        arguments = given.get("arguments")
        if arguments is not None:
            call["function"]["arguments"] += arguments if isinstance(arguments, str) else json.dumps(arguments)

    def calls(self) -> Iterator[Json]:
        """Yield its complete calls as a field of a delta."""
        if self._calls:
            filled = {
                "finish_reason": "stop",
                "message": {"tool_calls": [self._calls[at] for at in sorted(self._calls)]},
            }
            yield {"tool_calls": tuple(choice_of(filled, chat=True).tool_calls or ())}

    def as_json(self, index: int, chat: bool) -> Json:
        texts = {key: "".join(parts) for key, parts in self._texts.items()}
        whole: Json = {"index": index, "finish_reason": self.finish or "stop", "logprobs": self._joined()}
        if not chat:
            return {**whole, "text": texts["content"]}
        calls = [self._calls[at] for at in sorted(self._calls)]
        return {**whole, "message": {**texts, "tool_calls": calls}}

    def _joined(self) -> Json | None:
        joined: Json = {}
        for part in self._logprobs:
            for key, value in part.items():
                if isinstance(value, list):
                    joined.setdefault(key, []).extend(cast("list[Any]", value))
        return joined or None
