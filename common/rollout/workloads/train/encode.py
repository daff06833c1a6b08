"""Rows to tokens, and which of them are learnt. Knows a tokenizer by what it does, and imports none.

`tokenizer` is any of transformers' fast ones. Plain texts are tokenised as TRL does it: prompt and completion together,
with one end-of-sequence token behind the completion. Conversations go through the chat template. Many texts are
tokenised at once: one by one takes ten times as long.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias, cast, get_args

from rollout.model.errors import InputError
from rollout.workloads.json_form import JsonObject
from rollout.workloads.train.rows import Content, LossOn, Messages, PairRow, PromptRow, Row, TextRow, UnpairedRow
from rollout.workloads.train.templates import Template

Fault: TypeAlias = Literal[
    "no_supervised_token",
    "stop_token_outside",
    "merged_at_seam",
    "two_bos",
    "too_long",
    "empty_completion",
    "message_ignored",
    "tools_ignored",
    "identical_pair",
]
FAULTS: tuple[Fault, ...] = get_args(Fault)
"""What may be wrong with a row, each a key of `[algorithm.KIND.rows]` and a counter of the report."""


@dataclass(slots=True)
class Tokens:
    """`ids` and, for each, whether it is learnt (1) or not (0); `prompt`: tokens before the completion (0: none)."""

    ids: list[int]
    learnt: bytearray
    prompt: int = 0

    @property
    def supervised(self) -> int:
        """Tokens that a loss counts: nothing comes before the first."""
        return self.learnt.count(1, 1)


@dataclass(slots=True)
class Encoded:
    """One sequence, of a pair two: chosen, rejected. `cut`: a sequence was longer than allowed, and is cut off."""

    sequences: list[Tokens]
    label: bool = True
    margin: float = 0.0
    faults: set[Fault] = field(default_factory=set[Fault])
    cut: bool = False


@dataclass(slots=True)
class _Part:
    """A sequence to be. `special`: the tokenizer adds its special tokens. `before`: the text of the prompt; None: all
    of it is learnt. `marked`: what the assistant says is learnt, by the template's markers. `asks`: it is a prompt, to
    be answered, and nothing of it is learnt."""

    text: str
    special: bool
    before: str | None = None
    faults: set[Fault] = field(default_factory=set[Fault])
    marked: tuple[Messages, list[Any] | None] | None = None
    asks: bool = False


class Encoder:
    """`max_length`: tokens of a sequence at most."""

    def __init__(
        self, tokenizer: Any, template: Template, max_length: int, loss_on: LossOn = "completion_only"
    ) -> None:
        self._tokenizer = tokenizer
        self._template = template
        self._max_length = max_length
        self._loss_on: LossOn = loss_on
        self._bos: int | None = tokenizer.bos_token_id
        self._special = frozenset[int](tokenizer.all_special_ids)
        self._suffix = _appended(tokenizer)
        self.unended = 0
        """Plain texts that have no end-of-sequence token behind them: the tokenizer has none."""
        self.seams = Counter[str]()
        """What would help rows whose prompt and completion are joined by the tokenizer, and how many of them."""

    def encode(self, row: Row) -> Encoded:
        """InputError: the template cannot render it."""
        found = self.encode_many([row])[0]
        if isinstance(found, InputError):
            raise found
        return found

    def encode_many(self, rows: Sequence[Row]) -> list[Encoded | InputError]:
        """Each row's tokens, or why there are none."""
        planned = [self._planned(row) for row in rows]
        parts = [part for one in planned if not isinstance(one, InputError) for part in one]
        plain = self._tokenized((text for part in parts if part.special for text in (part.text, part.before)), True)
        rendered = self._tokenized(
            (text for part in parts if not part.special and part.marked is None for text in (part.text, part.before)),
            False,
        )
        encoded: list[Encoded | InputError] = []
        for row, one in zip(rows, planned, strict=True):
            try:
                if isinstance(one, InputError):
                    raise one
                encoded.append(self._encoded(row, one, plain, rendered))
            except InputError as error:
                encoded.append(error)
        return encoded

    @property
    def endless(self) -> bool:
        """The tokenizer has no end-of-sequence token."""
        return self._tokenizer.eos_token is None

    # ---- texts

    def _planned(self, row: Row) -> list[_Part] | InputError:
        try:
            if isinstance(row, PairRow):
                return [self._answer(row.prompt, answer, row.tools) for answer in (row.chosen, row.rejected)]
            if isinstance(row, UnpairedRow):
                return [self._answer(row.prompt, row.completion, row.tools)]
            if isinstance(row, PromptRow):
                return [self._question(row)]
            return [self._text(row)]
        except InputError as error:
            return error

    def _text(self, row: TextRow) -> _Part:
        if self._loss_on == "completion_only":
            if row.completion is not None:
                return self._answer(row.prompt, row.completion, row.tools)
            if isinstance(row.prompt, list):
                return self._answer(row.prompt[:-1], row.prompt[-1:], row.tools)
        if isinstance(row.prompt, str):
            return self._answer(None, row.prompt + cast(str, row.completion or ""), None)
        messages = row.prompt + cast(Messages, row.completion or [])
        if self._loss_on == "assistant_only":
            empty = any(message["role"] == "assistant" and _empty(message) for message in messages)
            faults = self._ignored(self._rendered(messages, row.tools, False), messages, row.tools)
            return _Part("", False, faults=faults | _if_empty(empty), marked=(messages, row.tools))
        return self._answer(None, messages, row.tools)

    def _question(self, row: PromptRow) -> _Part:
        if isinstance(row.prompt, str):
            return _Part(row.prompt, True, asks=True)
        faults = self._ignored(self._rendered(row.prompt, row.tools, False), row.prompt, row.tools)
        return _Part(self._rendered(row.prompt, row.tools, True), False, faults=faults, asks=True)

    def _answer(self, prompt: Content | None, answer: Content, tools: list[Any] | None) -> _Part:
        if isinstance(answer, str):
            before = cast("str | None", prompt)
            return _Part(self._ended((before or "") + answer), True, before, _if_empty(not answer))
        messages = cast("Messages | None", prompt)
        whole = (messages or []) + answer
        text = self._rendered(whole, tools, False)
        faults = self._ignored(text, whole, tools) | _if_empty(all(map(_empty, answer)))
        return _Part(text, False, None if messages is None else self._rendered(messages, tools, True), faults)

    def _ended(self, text: str) -> str:
        eos = self._tokenizer.eos_token
        if eos is None:
            self.unended += 1
            return text
        if self._tokenizer.eos_token_id in self._suffix:
            return text.removesuffix(eos)
        return text if text.endswith(eos) else text + eos

    def _rendered(self, messages: Messages, tools: list[Any] | None, prompt: bool) -> str:
        return self._template.rendered(self._tokenizer, messages, tools, generation_prompt=prompt)

    def _ignored(self, text: str, messages: Messages, tools: list[Any] | None) -> set[Fault]:
        """What of a conversation is not in `text`, as which the template renders it."""
        found: set[Fault] = set()
        if tools and self._renders_as(text, messages, None):
            found.add("tools_ignored")
        at = 0
        for place, message in enumerate(messages):
            others, at = _altered(message, text, at)
            for other in others:
                if self._renders_as(text, [*messages[:place], other, *messages[place + 1 :]], tools):
                    found.add("message_ignored")
        return found

    def _renders_as(self, text: str, messages: Messages, tools: list[Any] | None) -> bool:
        try:
            return self._rendered(messages, tools, False) == text
        except InputError:
            return False

    # ---- tokens

    def _tokenized(self, texts: Iterable[str | None], special: bool) -> dict[str, list[int]]:
        """A prompt is tokenised once, however many answers it has."""
        wanted = list(dict.fromkeys(text for text in texts if text is not None))
        if not wanted:
            return {}
        found = self._tokenizer(
            wanted, add_special_tokens=special, return_attention_mask=False, return_token_type_ids=False, verbose=False
        )
        return dict(zip(wanted, found["input_ids"], strict=True))

    def _encoded(
        self, row: Row, parts: list[_Part], plain: dict[str, list[int]], rendered: dict[str, list[int]]
    ) -> Encoded:
        encoded = Encoded([])
        for part in parts:
            encoded.faults |= part.faults
            if part.marked is not None:
                ids, learnt = self._template.marked(self._tokenizer, *part.marked)
                if self._ends_outside(ids, learnt):
                    encoded.faults.add("stop_token_outside")
                self._add(encoded, Tokens(ids, learnt))
                continue
            tokens = plain if part.special else rendered
            if part.asks:
                ids = list(self._beginning(tokens[part.text], part.special))
                if not ids:
                    raise InputError("the prompt has no token: write something, or remove the row")
                self._add(encoded, Tokens(ids, bytearray(len(ids)), len(ids)), learns=False)
            else:
                self._add(encoded, self._completion(encoded, part, tokens))
        if isinstance(row, PairRow):
            encoded.margin = row.margin or 0.0
            if encoded.sequences[0].ids == encoded.sequences[1].ids:
                encoded.faults.add("identical_pair")
        elif isinstance(row, UnpairedRow):
            encoded.label = row.label
        return encoded

    def _completion(self, encoded: Encoded, part: _Part, tokens: dict[str, list[int]]) -> Tokens:
        ids = list(tokens[part.text])
        if part.before is None:
            return Tokens(ids, bytearray(b"\1" * len(ids)))
        before = self._beginning(tokens[part.before], part.special)
        if ids[: len(before)] != before:
            encoded.faults.add("merged_at_seam")
            if self.seams.total() < _SEAMS:
                self.seams[self._remedy(part)] += 1
            before = _common(before, ids)
        count = len(before)
        return Tokens(ids, bytearray(count) + b"\1" * (len(ids) - count), count)

    def _beginning(self, ids: list[int], special: bool) -> list[int]:
        """Tokens of a prompt without those that the tokenizer appends to every text."""
        return ids[: len(ids) - len(self._suffix)] if special else ids

    def _remedy(self, part: _Part) -> str:
        """What keeps the tokenizer from joining prompt and completion, as tried with them."""
        before = part.before or ""
        if not part.special:
            if part.text.startswith(before):
                return "the chat template ends the prompt so that the tokenizer joins it with the answer: give another"
            return "the template writes the prompt otherwise when an answer follows: give base_model.chat_template"
        answer = part.text[len(before) :]
        bare = before.rstrip()
        space = before[len(bare) :]
        tries = [(bare, space + answer, f"let the completion begin with {_named(space)} that ends the prompt")]
        tries = tries if space and bare else []
        tries += [
            (before, f" {answer}", "begin the completion with a space"),
            (f"{before} ", answer, "end the prompt with a space"),
            (before, f"\n{answer}", "begin the completion with a newline"),
            (f"{before}\n", answer, "end the prompt with a newline"),
        ]
        for prompt, completion, remedy in tries:
            tokens = self._tokenized((prompt, prompt + completion), True)
            first = self._beginning(tokens[prompt], True)
            if tokens[prompt + completion][: len(first)] == first:
                return remedy
        return "the tokenizer joins them however they are written: remove it"

    def _ends_outside(self, ids: list[int], learnt: bytearray) -> bool:
        """A turn that is learnt is followed by a special token that is not: the model would never end it."""
        return any(
            learnt[i] and not learnt[i + 1] and ids[i] not in self._special and ids[i + 1] in self._special
            for i in range(len(ids) - 1)
        )

    def _add(self, encoded: Encoded, sequence: Tokens, *, learns: bool = True) -> None:
        ids = sequence.ids
        if self._bos is not None and ids[:2] == [self._bos, self._bos]:
            encoded.faults.add("two_bos")
        if len(ids) > self._max_length:
            encoded.faults.add("too_long")
            encoded.cut = True
            del ids[self._max_length :], sequence.learnt[self._max_length :]
            sequence.prompt = min(sequence.prompt, self._max_length)
        if learns and not sequence.supervised:
            encoded.faults.add("no_supervised_token")
        encoded.sequences.append(sequence)


def _appended(tokenizer: Any) -> list[int]:
    """Tokens that the tokenizer puts behind every text: of some, the end-of-sequence token."""
    known = next(one for one in range(tokenizer.vocab_size) if one not in tokenizer.all_special_ids)
    text = tokenizer.decode([known])  # one that it knows: a vocabulary of words has no other
    plain, special = (list(tokenizer([text], add_special_tokens=add)["input_ids"][0]) for add in (False, True))
    ends = (place + len(plain) for place in range(len(special)) if special[place : place + len(plain)] == plain)
    return special[next(ends, len(special)) :]


def _named(space: str) -> str:
    return {" ": "the space", "\n": "the newline"}.get(space, "the white space")


def _altered(message: JsonObject, text: str, at: int) -> tuple[list[JsonObject], int]:
    """`message` with other words, and with other calls of tools: they render as `text` if the template leaves them out.
    Words that `text` has from `at` on are no question; where it goes on behind them."""
    found: list[JsonObject] = []
    content: Any = message.get("content") or ""
    parts = cast("list[JsonObject]", content if isinstance(content, list) else [{"text": content}])
    for place, part in enumerate(parts):
        words = str(part["text"]).strip()
        if (there := text.find(words, at)) >= 0:
            at = there + len(words)
            continue
        other = [*parts[:place], {**part, "text": f"{part['text']}{_OTHER}"}, *parts[place + 1 :]]
        found.append({**message, "content": other if isinstance(content, list) else f"{content}{_OTHER}"})
    calls: Any = message.get("tool_calls")
    if isinstance(calls, list) and calls and all(isinstance(call, dict) for call in cast("list[Any]", calls)):
        found.append({**message, "tool_calls": [_renamed(call) for call in cast("list[JsonObject]", calls)]})
    return found, at


_OTHER = "_other"
_SEAMS = 20
"""Of so many rows it is tried out what would help: that costs as much as many rows."""


def _renamed(call: JsonObject) -> JsonObject:
    inner: Any = call.get("function")
    if isinstance(inner, dict):
        return {**call, "function": _renamed(cast(JsonObject, inner))}
    return {**call, "name": f"{call.get('name')}{_OTHER}"}


def _if_empty(empty: bool) -> set[Fault]:
    return {"empty_completion"} if empty else set()


def _empty(message: JsonObject) -> bool:
    return not message.get("content") and not message.get("tool_calls")


def _common(first: list[int], second: list[int]) -> list[int]:
    """What both begin with."""
    same = next(
        (i for i, (a, b) in enumerate(zip(first, second, strict=False)) if a != b), min(len(first), len(second))
    )
    return first[:same]
