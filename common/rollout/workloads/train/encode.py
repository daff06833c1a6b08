"""Rows to tokens, and which of them are learnt. Knows a tokenizer by what it does, and imports none.

`tokenizer` is any of transformers' fast ones. Plain texts are tokenised as TRL does it: prompt and completion together,
with the end-of-sequence token behind the completion. Conversations go through the chat template. Many texts are
tokenised at once: one by one takes ten times as long.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias, cast, get_args

from rollout.model.errors import InputError
from rollout.workloads.json_form import JsonObject
from rollout.workloads.train.rows import Content, LossOn, Messages, PairRow, Row, TextRow, UnpairedRow
from rollout.workloads.train.templates import Template

Fault: TypeAlias = Literal[
    "no_supervised_token",
    "stop_token_outside",
    "merged_at_seam",
    "two_bos",
    "too_long",
    "empty_completion",
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
    of it is learnt. `marked`: what the assistant says is learnt, by the template's markers."""

    text: str
    special: bool
    before: str | None = None
    empty: bool = False
    marked: tuple[Messages, list[Any] | None] | None = None


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
        self.unended = 0
        """Plain texts that have no end-of-sequence token behind them: the tokenizer has none."""

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

    # ---- texts

    def _planned(self, row: Row) -> list[_Part] | InputError:
        try:
            if isinstance(row, PairRow):
                return [self._answer(row.prompt, answer, row.tools) for answer in (row.chosen, row.rejected)]
            if isinstance(row, UnpairedRow):
                return [self._answer(row.prompt, row.completion, row.tools)]
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
            return _Part("", False, empty=empty, marked=(messages, row.tools))
        return self._answer(None, messages, row.tools)

    def _answer(self, prompt: Content | None, answer: Content, tools: list[Any] | None) -> _Part:
        if isinstance(answer, str):
            before = cast("str | None", prompt)
            return _Part(self._ended((before or "") + answer), True, before, empty=not answer)
        messages = cast("Messages | None", prompt)
        text = self._rendered((messages or []) + answer, tools, False)
        empty = all(map(_empty, answer))
        return _Part(text, False, None if messages is None else self._rendered(messages, tools, True), empty=empty)

    def _ended(self, text: str) -> str:
        eos = self._tokenizer.eos_token
        if eos is None:
            self.unended += 1
            return text
        return text if text.endswith(eos) else text + eos

    def _rendered(self, messages: Messages, tools: list[Any] | None, prompt: bool) -> str:
        return self._template.rendered(self._tokenizer, messages, tools, generation_prompt=prompt)

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
            if part.empty:
                encoded.faults.add("empty_completion")
            if part.marked is not None:
                ids, learnt = self._template.marked(self._tokenizer, *part.marked)
                if self._ends_outside(ids, learnt):
                    encoded.faults.add("stop_token_outside")
                self._add(encoded, Tokens(ids, learnt))
            else:
                tokens = plain if part.special else rendered
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
        before = tokens[part.before]
        if ids[: len(before)] != before:
            encoded.faults.add("merged_at_seam")
            before = _common(before, ids)
        count = len(before)
        return Tokens(ids, bytearray(count) + b"\1" * (len(ids) - count), count)

    def _ends_outside(self, ids: list[int], learnt: bytearray) -> bool:
        """A turn that is learnt is followed by a special token that is not: the model would never end it."""
        return any(
            learnt[i] and not learnt[i + 1] and ids[i] not in self._special and ids[i + 1] in self._special
            for i in range(len(ids) - 1)
        )

    def _add(self, encoded: Encoded, sequence: Tokens) -> None:
        ids = sequence.ids
        if self._bos is not None and ids[:2] == [self._bos, self._bos]:
            encoded.faults.add("two_bos")
        if len(ids) > self._max_length:
            encoded.faults.add("too_long")
            encoded.cut = True
            del ids[self._max_length :], sequence.learnt[self._max_length :]
            sequence.prompt = min(sequence.prompt, self._max_length)
        if not sequence.supervised:
            encoded.faults.add("no_supervised_token")
        encoded.sequences.append(sequence)


def _empty(message: JsonObject) -> bool:
    return not message.get("content") and not message.get("tool_calls")


def _common(first: list[int], second: list[int]) -> list[int]:
    """What both begin with."""
    same = next(
        (i for i, (a, b) in enumerate(zip(first, second, strict=False)) if a != b), min(len(first), len(second))
    )
    return first[:same]
