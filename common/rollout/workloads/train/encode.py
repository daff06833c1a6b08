"""Tokenises rows and marks which tokens are learnt. It uses a tokenizer by its interface and imports none.

`tokenizer` is any fast one of transformers. Plain texts are tokenised as TRL does it: prompt and completion together,
with one end-of-sequence token after the completion. Conversations go through the chat template. Many texts are
tokenised at once, because one by one takes ten times as long.
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
"""Faults of a row. Each is a key of `[algorithm.KIND.rows]` and a counter of the report."""


@dataclass(slots=True)
class Tokens:
    """`ids` and, for each, whether it is learnt (1) or not (0). `prompt` is the number of tokens before the
    completion."""

    ids: list[int]
    learnt: bytearray
    prompt: int = 0

    @property
    def supervised(self) -> int:
        """Number of tokens that a loss counts; the first of a sequence has no predecessor."""
        return self.learnt.count(1, 1)


@dataclass(slots=True)
class Encoded:
    """One sequence, or two of a pair: chosen, rejected. `cut` means that a sequence exceeded the limit and was
    truncated."""

    sequences: list[Tokens]
    label: bool = True
    margin: float = 0.0
    faults: set[Fault] = field(default_factory=set[Fault])
    cut: bool = False


@dataclass(slots=True)
class _Part:
    """A sequence before tokenisation. With `special`, the tokenizer adds its special tokens. `before` is the text of
    the prompt; if it is None, everything is learnt. With `marked`, the template's markers show what the assistant says,
    which is learnt. With `asks`, it is a prompt to answer, and nothing is learnt."""

    text: str
    special: bool
    before: str | None = None
    faults: set[Fault] = field(default_factory=set[Fault])
    marked: tuple[Messages, list[Any] | None] | None = None
    asks: bool = False


class Encoder:
    """Tokenises rows. `max_length` is the maximum number of tokens in a sequence."""

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
        """Number of plain texts without an end-of-sequence token, because the tokenizer has none."""
        self.seams = Counter[str]()
        """Remedies for rows whose prompt and completion the tokenizer merges, with the number of such rows."""

    def encode(self, row: Row) -> Encoded:
        """Tokenise a row. Raises InputError if the template cannot render it."""
        found = self.encode_many([row])[0]
        if isinstance(found, InputError):
            raise found
        return found

    def encode_many(self, rows: Sequence[Row]) -> list[Encoded | InputError]:
        """Return the tokens of each row, or why there are none."""
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
        """Whether the tokenizer has no end-of-sequence token."""
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
        """Return faults for parts of a conversation that are missing in `text`, which the template rendered."""
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
        """Tokenise texts, each prompt only once, however many answers it has."""
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
        """Return the tokens of a prompt without those that the tokenizer appends to every text."""
        return ids[: len(ids) - len(self._suffix)] if special else ids

    def _remedy(self, part: _Part) -> str:
        """Return a remedy, tried on this row, that keeps the tokenizer from merging prompt and completion."""
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
        """Return whether a learnt turn is followed by a special token that is not learnt: the model would never end a
        turn."""
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
    """Return the tokens that the tokenizer appends to every text: with some, the end-of-sequence token."""
    known = next(one for one in range(tokenizer.vocab_size) if one not in tokenizer.all_special_ids)
    text = tokenizer.decode([known])  # one that it knows: a vocabulary of words has no other
    plain, special = (list(tokenizer([text], add_special_tokens=add)["input_ids"][0]) for add in (False, True))
    ends = (place + len(plain) for place in range(len(special)) if special[place : place + len(plain)] == plain)
    return special[next(ends, len(special)) :]


def _named(space: str) -> str:
    return {" ": "the space", "\n": "the newline"}.get(space, "the white space")


def _altered(message: JsonObject, text: str, at: int) -> tuple[list[JsonObject], int]:
    """Return `message` with other words, and with other tool calls; they render as `text` if the template omits them.
    Words found in `text` from `at` on need no variant. Also returns the position after them."""
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
"""Number of rows on which remedies are tried, which costs as much as tokenising many rows."""


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
    """Return the common prefix."""
    same = next(
        (i for i, (a, b) in enumerate(zip(first, second, strict=False)) if a != b), min(len(first), len(second))
    )
    return first[:same]
