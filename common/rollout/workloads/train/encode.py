"""Rows to tokens, and which of them are learnt. Knows a tokenizer by what it does, and imports none.

`tokenizer` is any of transformers' fast ones. Plain texts are tokenised as TRL does it: prompt and completion together,
with the end-of-sequence token behind the completion. Conversations go through the chat template.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias, cast

from rollout.model.errors import InputError
from rollout.workloads.train.rows import Content, Messages, PairRow, Row, TextRow, UnpairedRow
from rollout.workloads.train.templates import Template

LossOn: TypeAlias = Literal["all", "completion_only", "assistant_only"]
FAULTS = (
    "no_supervised_token",
    "stop_token_outside",
    "merged_at_seam",
    "two_bos",
    "too_long",
    "empty_completion",
    "identical_pair",
)
"""What may be wrong with a row, each a key of `[algorithm.KIND.rows]` and a counter of the report."""


@dataclass(slots=True)
class Sequence:
    """`ids` and, for each, whether it is learnt; `prompt`: tokens before the completion (0: there is none)."""

    ids: list[int]
    learnt: list[bool]
    prompt: int = 0

    @property
    def supervised(self) -> int:
        """Tokens that a loss counts: nothing comes before the first."""
        return sum(self.learnt[1:])


@dataclass(slots=True)
class Encoded:
    """One sequence, of a pair two: chosen, rejected."""

    sequences: list[Sequence]
    label: bool = True
    margin: float = 0.0
    faults: set[str] = field(default_factory=set[str])


class Encoder:
    """InputError: the template cannot render a row."""

    def __init__(
        self, tokenizer: Any, template: Template, max_length: int, loss_on: LossOn = "completion_only"
    ) -> None:
        self._tokenizer = tokenizer
        self._template = template
        self._max_length = max_length
        self._loss_on: LossOn = loss_on
        self._eos: int | None = tokenizer.eos_token_id
        self._bos: int | None = tokenizer.bos_token_id
        self._special = set(tokenizer.all_special_ids)

    def encode(self, row: Row) -> Encoded:
        if isinstance(row, PairRow):
            return self._pair(row)
        if isinstance(row, UnpairedRow):
            encoded = Encoded([], label=row.label)
            self._completion(encoded, row.prompt, row.completion, row.tools)
            return encoded
        encoded = Encoded([])
        self._text(encoded, row)
        return encoded

    # ---- shapes

    def _text(self, encoded: Encoded, row: TextRow) -> None:
        if row.completion is not None and self._loss_on == "completion_only":
            self._completion(encoded, row.prompt, row.completion, row.tools)
        elif isinstance(row.prompt, str):
            whole = row.prompt + (row.completion if isinstance(row.completion, str) else "")
            if self._loss_on == "assistant_only":
                raise InputError('loss_on = "assistant_only" needs rows of messages: this one is plain text')
            ids = self._plain(self._ended(whole))
            self._add(encoded, Sequence(ids, [True] * len(ids)))
        else:
            messages = row.prompt + cast(Messages, row.completion or [])
            self._conversation(encoded, messages, row.tools)

    def _pair(self, row: PairRow) -> Encoded:
        encoded = Encoded([], margin=row.margin or 0.0)
        for answer in (row.chosen, row.rejected):
            if row.prompt is not None:
                self._completion(encoded, row.prompt, answer, row.tools)
            else:
                ids = self._whole(answer, row.tools)
                self._add(encoded, Sequence(ids, [True] * len(ids)))
        first, second = encoded.sequences
        if first.ids == second.ids:
            encoded.faults.add("identical_pair")
        return encoded

    def _whole(self, content: Content, tools: list[Any] | None) -> list[int]:
        return self._plain(self._ended(content)) if isinstance(content, str) else self._rendered(content, tools, False)

    def _completion(self, encoded: Encoded, prompt: Content, completion: Content, tools: list[Any] | None) -> None:
        if isinstance(prompt, str):
            before = self._plain(prompt)
            ids = self._plain(self._ended(prompt + cast(str, completion)))
            empty = not completion
        else:
            answer = cast(Messages, completion)
            before = self._rendered(prompt, tools, True)
            ids = self._rendered(prompt + answer, tools, False)
            empty = not any(message.get("content") or message.get("tool_calls") for message in answer)
        if ids[: len(before)] != before:
            encoded.faults.add("merged_at_seam")
            before = _common(before, ids)
        if empty:
            encoded.faults.add("empty_completion")
        learnt = [False] * len(before) + [True] * (len(ids) - len(before))
        self._add(encoded, Sequence(ids, learnt, len(before)))

    def _conversation(self, encoded: Encoded, messages: Messages, tools: list[Any] | None) -> None:
        if self._loss_on == "completion_only":
            if messages[-1].get("role") != "assistant":
                raise InputError("the last message is not the assistant's: there is nothing to learn from it")
            self._completion(encoded, messages[:-1], messages[-1:], tools)
            return
        if self._loss_on == "all":
            ids = self._rendered(messages, tools, False)
            self._add(encoded, Sequence(ids, [True] * len(ids)))
            return
        ids, learnt = self._template.marked(self._tokenizer, messages, tools)
        if self._ends_outside(ids, learnt):
            encoded.faults.add("stop_token_outside")
        self._add(encoded, Sequence(ids, learnt))

    # ---- tokens

    def _plain(self, text: str) -> list[int]:
        return list(self._tokenizer(text)["input_ids"])

    def _ended(self, text: str) -> str:
        eos = self._tokenizer.eos_token
        return text if eos is None or text.endswith(eos) else text + eos

    def _rendered(self, messages: Messages, tools: list[Any] | None, prompt: bool) -> list[int]:
        return self._template.ids(self._tokenizer, messages, tools, generation_prompt=prompt)

    def _ends_outside(self, ids: list[int], learnt: list[bool]) -> bool:
        """A turn that is learnt is followed by a special token that is not: the model would never end it."""
        return any(
            learnt[i] and not learnt[i + 1] and ids[i] not in self._special and ids[i + 1] in self._special
            for i in range(len(ids) - 1)
        )

    def _add(self, encoded: Encoded, sequence: Sequence) -> None:
        ids = sequence.ids
        if self._bos is not None and ids[:2] == [self._bos, self._bos]:
            encoded.faults.add("two_bos")
        if len(ids) > self._max_length:
            encoded.faults.add("too_long")
            del ids[self._max_length :], sequence.learnt[self._max_length :]
            sequence.prompt = min(sequence.prompt, self._max_length)
        if not sequence.supervised:
            encoded.faults.add("no_supervised_token")
        encoded.sequences.append(sequence)


def _common(first: list[int], second: list[int]) -> list[int]:
    """What both begin with."""
    same = next(
        (i for i, (a, b) in enumerate(zip(first, second, strict=False)) if a != b), min(len(first), len(second))
    )
    return first[:same]
