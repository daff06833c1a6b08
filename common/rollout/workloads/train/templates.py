"""Chat templates, among them ours, which mark what the assistant says.

Training on the assistant's messages alone needs templates with `{% generation %}` around them, which no model provides.
Ours for the common families replace the model's own where both render a row to exactly the same text; elsewhere the row
is refused with the remedy.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from rollout.model.errors import ConfigError, InputError
from rollout.workloads.train.rows import Messages

_DIRECTORY = Path(__file__).with_name("chat_templates")
_SIGNS: dict[str, tuple[str, ...]] = {
    "qwen3": ("<|im_start|>", "<think>"),
    "qwen2.5": ("<|im_start|>", "You are Qwen"),
    "chatml": ("<|im_start|>",),
    "llama3.1": ("<|start_header_id|>", "Cutting Knowledge Date"),
    "llama3": ("<|start_header_id|>",),
    "gemma": ("<start_of_turn>",),
    "mistral": ("[INST]",),
    "mistral-v0.3": ("[INST]",),
    "phi3": ("<|assistant|>", "<|end|>"),
}
"""Names of our templates, with strings that identify a family's templates: llama3.1 covers 3.2 and 3.3, gemma 2 and
3."""

NAMES = tuple(_SIGNS)
_MARK = "7d1f0e6a93c84b25"
"""Stands for the policy's message when a conversation is rendered: the text after it is new."""
_FIXED = {"date_string": "26 Jul 2024"}
"""The date that Llama's templates write if they do not know it, so that the same rows give the same tokens on any
day."""


@dataclass(frozen=True, slots=True)
class Template:
    """A template called `name`. `text` renders; None means the tokenizer's own. `marked_texts` have generation markers;
    the first that renders a row like `text` is used."""

    name: str
    text: str | None
    marked_texts: tuple[str, ...]

    def rendered(self, tokenizer: Any, messages: Messages, tools: list[Any] | None, *, generation_prompt: bool) -> str:
        """Render a conversation, including special tokens. Raises InputError if the template refuses it."""
        return _apply(tokenizer, messages, tools, self.text, tokenize=False, add_generation_prompt=generation_prompt)

    def appended(
        self, tokenizer: Any, before: Messages, new: Messages, tools: list[Any] | None, so_far: Sequence[int]
    ) -> list[int]:
        """Return the tokens of `new`, which follow the assistant's answer to `before`, up to the start of its next
        turn. `so_far` are the ids of the conversation until then, which do not change. Raises InputError."""
        text = self.rendered(
            tokenizer, [*before, {"role": "assistant", "content": _MARK}, *new], tools, generation_prompt=True
        )
        _, found, tail = text.rpartition(_MARK)
        if not found:
            raise InputError("the chat template leaves out what the policy said before it")
        ids: list[int] = tokenizer.encode(tail, add_special_tokens=False)
        # The token that ended the turn is there already, if it is the template's own.
        return ids[1:] if ids[:1] == list(so_far[-1:]) else ids

    def marked(self, tokenizer: Any, messages: Messages, tools: list[Any] | None) -> tuple[list[int], bytearray]:
        """Return (tokens, which of them the assistant says). Raises InputError if no marking template renders like this
        one."""
        own = self.rendered(tokenizer, messages, tools, generation_prompt=False)
        for text in self.marked_texts:
            try:
                same = text == self.text or _apply(tokenizer, messages, tools, text, tokenize=False) == own
            except InputError:  # what only the model's own template can render
                continue
            if same:
                # As a dictionary, whatever is the default of this version of transformers.
                options = {"tokenize": True, "return_dict": True, "return_assistant_tokens_mask": True}
                found = _apply(tokenizer, messages, tools, text, **options)
                return list(found["input_ids"]), bytearray(found["assistant_masks"])
        raise InputError(
            f"{self.name} does not mark what the assistant says, and none of ours ({', '.join(NAMES)}) renders this "
            "row as it does: give base_model.chat_template, a file with {% generation %} and {% endgeneration %} "
            'around what the assistant says, or set loss_on = "completion_only"'
        )


def find_template(tokenizer: Any, given: str | None) -> Template:
    """Return the template for `given`, the result of `read_template`; None means the tokenizer's own."""
    if given is None:
        own: Any = tokenizer.chat_template
        text = cast("dict[str, str]", own).get("default", "") if isinstance(own, dict) else str(own or "")
        return Template("the tokenizer's chat template", None, _marked(text))
    text = _ours(given) if given in NAMES else given
    return Template(f'the chat template "{given}"' if given in NAMES else "the chat template", text, _marked(text))


def read_template(given: str, where: str) -> str:
    """Return the name of one of our templates, or the text of a file. Raises ConfigError if there is neither."""
    if given in NAMES:
        return given
    try:
        text = Path(given).expanduser().read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        near = difflib.get_close_matches(given, NAMES, n=1)
        hint = f'; did you mean "{near[0]}"?' if near else f", and it is none of our templates: {', '.join(NAMES)}"
        raise ConfigError(f"{where}: {given} cannot be read ({why}){hint}") from error
    if not text.strip():
        raise ConfigError(f"{where}: {given} is empty: it should hold a chat template")
    return text


def marks_assistant(text: str) -> bool:
    return re.search(r"{%-?\s*generation\s*-?%}", text) is not None


def _marked(text: str) -> tuple[str, ...]:
    if marks_assistant(text):
        return (text,)
    return tuple(_ours(name) for name, signs in _SIGNS.items() if all(sign in text for sign in signs))


def _ours(name: str) -> str:
    return (_DIRECTORY / f"{name}.jinja").read_text("utf-8").rstrip("\n")


def _apply(tokenizer: Any, messages: Messages, tools: list[Any] | None, template: str | None, **options: Any) -> Any:
    if template is None and not tokenizer.chat_template:
        raise InputError(
            "the tokenizer has no chat template, which messages need: give base_model.chat_template, a file or one of "
            f"{', '.join(NAMES)}"
        )
    if not messages:
        raise InputError("there is no message before the answer: put what it answers before it")
    try:
        return tokenizer.apply_chat_template(messages, tools=tools, chat_template=template, **_FIXED, **options)
    except Exception as error:
        if not isinstance(error, ValueError | TypeError | KeyError) and "jinja2" not in type(error).__module__:
            raise
        raise InputError(f"the chat template cannot render it: {error}") from error
