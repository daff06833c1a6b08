"""Rows of training data: which shapes there are, and what is wrong with one that has none of them.

Every shape is plain (strings) or conversational (lists of messages), as TRL's users know them:

    text rows      {"text"} | {"messages"} | {"prompt", "completion"}                           sft
    pairs          {"prompt", "chosen", "rejected"} | {"chosen", "rejected"}, with "margin"     rm, dpo, ipo
    unpaired       {"prompt", "completion", "label"}, or a pair, which counts as two            kto
    prompts        {"prompt"}, with any other columns, which rewards get                        grpo, ppo
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from typing import Any, Literal, TypeAlias, cast

from rollout.model.errors import InputError
from rollout.workloads.json_form import HALF_PAIR, JsonObject, canonical, is_unicode, short
from rollout.workloads.train.config import Kind
from rollout.workloads.values import fault_of

Messages: TypeAlias = list[JsonObject]
Content: TypeAlias = str | Messages
LossOn: TypeAlias = Literal["all", "completion_only", "assistant_only"]

ROLES = ("system", "developer", "user", "assistant", "tool", "function")
_MARGIN_MAX = 1e30  # float32 has room for 1e38, and margins are added up
_MEANT = {"human": "user", "gpt": "assistant", "bot": "assistant", "model": "assistant", "ai": "assistant"}


@dataclass(frozen=True, slots=True)
class TextRow:
    """A text row. If `completion` is None, all of it is in `prompt`."""

    prompt: Content
    completion: Content | None = None
    tools: list[Any] | None = None


@dataclass(frozen=True, slots=True)
class PairRow:
    """A pair. If `prompt` is None, chosen and rejected are whole texts or conversations of plain strings."""

    prompt: Content | None
    chosen: Content
    rejected: Content
    margin: float | None = None
    tools: list[Any] | None = None


@dataclass(frozen=True, slots=True)
class UnpairedRow:
    prompt: Content
    completion: Content
    label: bool
    tools: list[Any] | None = None


@dataclass(frozen=True, slots=True)
class PromptRow:
    """A prompt. `columns` are the row's other keys, for rewards."""

    prompt: Content
    columns: JsonObject
    tools: list[Any] | None = None


Row: TypeAlias = TextRow | PairRow | UnpairedRow | PromptRow

WANTED: dict[Kind, str] = {
    "sft": '"prompt" and "completion", "messages", or "text"',
    "rm": '"chosen" and "rejected", with or without "prompt"',
    "dpo": '"prompt", "chosen" and "rejected"',
    "ipo": '"prompt", "chosen" and "rejected"',
    "kto": '"prompt", "completion" and "label"',
    "grpo": '"prompt"',
    "ppo": '"prompt"',
}
"""What a row needs, for messages."""


def parse_row(kind: Kind, value: Any, loss_on: LossOn = "completion_only") -> list[Row]:
    """Parse a row for `kind`; a pair becomes two unpaired rows if needed. Raises InputError with the fault and the
    remedy.

    A key whose value is null counts as missing: tables have nulls where JSON has no key.
    """
    if not isinstance(value, dict):
        raise InputError(f"a row must be a JSON object with {WANTED[kind]}, not {_kind_of(value)}")
    row = {key: inner for key, inner in cast(JsonObject, value).items() if inner is not None}
    tools = _tools(row)
    if kind in ("grpo", "ppo"):
        return [_prompt(kind, row, tools)]
    if kind == "sft":
        return [_text(row, tools, loss_on)]
    if kind == "kto":
        return _unpaired(row, tools)
    return [_pair(kind, row, tools)]


def content_of(row: Row) -> bytes:
    """Return a hash that is equal for rows that are trained on alike, however they were written."""
    return canonical(astuple(row))


def refuse_half_pairs(rows: Sequence[Row]) -> None:
    """Raise InputError if a text contains lone surrogates, which tokenizers reject."""
    if not is_unicode([astuple(row) for row in rows]):
        raise InputError(HALF_PAIR)


def conversational(row: Row) -> bool:
    """Return whether the row consists of messages, which a chat template renders."""
    return isinstance(row.chosen if isinstance(row, PairRow) else row.prompt, list)


def _text(row: JsonObject, tools: list[Any] | None, loss_on: LossOn) -> TextRow:
    given = [key for key in ("text", "messages", "prompt") if key in row]
    if not given:
        raise InputError(f"the row has no {WANTED['sft']}{_unlike('sft', row)}")
    if len(given) > 1:
        raise InputError(f'the row has "{given[0]}" and "{given[1]}": keep one of them')
    if given == ["text"]:
        if not isinstance(row["text"], str):
            raise InputError(f'"text" must be a string, not {_kind_of(row["text"])}')
        found = TextRow(row["text"])
    elif given == ["messages"]:
        found = TextRow(_messages(row, "messages"), None, tools)
    elif "completion" in row:
        prompt, completion = _content(row, "prompt"), _answer(row, "completion")
        _alike(("prompt", prompt), ("completion", completion))
        found = TextRow(prompt, completion, tools)
    else:
        raise InputError(f'the row has "prompt" and no "completion": add it{_unlike("sft", row)}')
    _learnable(found, loss_on)
    return found


def _learnable(row: TextRow, loss_on: LossOn) -> None:
    """Raise InputError if the row has nothing that `loss_on` learns."""
    if loss_on == "all":
        return
    if loss_on == "completion_only":
        if row.completion is None and isinstance(row.prompt, list):
            _answered("messages", row.prompt)
            if len(row.prompt) == 1:
                raise InputError('"messages" has only an answer: put what it answers before it, or set loss_on = "all"')
        return
    if isinstance(row.prompt, str):
        raise InputError('loss_on = "assistant_only" needs rows of messages: this one is plain text')
    messages = row.prompt + cast(Messages, row.completion or [])
    if all(message["role"] != "assistant" for message in messages):
        raise InputError("no message is of the assistant: there is nothing to learn")


def _pair(kind: Kind, row: JsonObject, tools: list[Any] | None) -> PairRow:
    missing = [f'"{key}"' for key in ("chosen", "rejected") if key not in row]
    if missing:
        raise InputError(f"the row has no {' and no '.join(missing)}: it needs {WANTED[kind]}{_unlike(kind, row)}")
    chosen, rejected = _answer(row, "chosen"), _answer(row, "rejected")
    _alike(("chosen", chosen), ("rejected", rejected))
    margin = row.get("margin")
    if margin is not None and (isinstance(margin, bool) or not isinstance(margin, int | float)):
        raise InputError(f'"margin" must be a number, not {_kind_of(margin)}')
    if margin is not None and not abs(margin) <= _MARGIN_MAX:
        finite = isinstance(margin, int) or math.isfinite(margin)  # of an int beyond floats nothing can be asked
        limit = f" of at most {_MARGIN_MAX:g}" if finite else ""
        raise InputError(f'"margin" must be a finite number{limit}, not {short(margin)}')
    if "prompt" in row:
        prompt = _content(row, "prompt")
        _alike(("prompt", prompt), ("chosen", chosen))
        return PairRow(prompt, chosen, rejected, margin, tools)
    if isinstance(chosen, list) and isinstance(rejected, list):
        shared = _shared(chosen, rejected)
        if shared:
            return PairRow(chosen[:shared], chosen[shared:], rejected[shared:], margin, tools)
    if kind != "rm":
        raise InputError('the row has no "prompt": what chosen and rejected answer is needed')
    return PairRow(None, chosen, rejected, margin, tools)


def _unpaired(row: JsonObject, tools: list[Any] | None) -> list[Row]:
    if "completion" not in row and "chosen" in row and "rejected" in row:
        pair = _pair("kto", row, tools)
        if pair.prompt is None:
            raise InputError('the row has no "prompt": what chosen and rejected answer is needed')
        answers = ((pair.chosen, True), (pair.rejected, False))
        return [UnpairedRow(pair.prompt, answer, label, tools) for answer, label in answers]
    missing = [f'"{key}"' for key in ("prompt", "completion", "label") if key not in row]
    if missing:
        raise InputError(f"the row has no {' and no '.join(missing)}: it needs {WANTED['kto']}{_unlike('kto', row)}")
    if not isinstance(row["label"], bool):
        raise InputError(f'"label" must be true or false, not {_kind_of(row["label"])}')
    prompt, completion = _content(row, "prompt"), _answer(row, "completion")
    _alike(("prompt", prompt), ("completion", completion))
    return [UnpairedRow(prompt, completion, row["label"], tools)]


GIVEN = ("prompts", "completions", "completion_ids")
"""Argument names by which a reward gets what it judges."""


def _prompt(kind: Kind, row: JsonObject, tools: list[Any] | None) -> PromptRow:
    if "prompt" not in row:
        raise InputError(f'the row has no "prompt"{_unlike(kind, row)}')
    prompt = _content(row, "prompt")
    if isinstance(prompt, list) and prompt[-1]["role"] == "assistant":
        raise InputError(
            '"prompt": the last message is of the assistant, and the policy would answer it: end with what is asked'
        )
    columns = {key: inner for key, inner in row.items() if key != "prompt"}
    for name in GIVEN:
        if name in columns:
            raise InputError(f'the row has "{name}", by which name rewards get those of the samples: rename the column')
    if fault := next((text for key, inner in columns.items() if (text := fault_of(inner, f'"{key}"'))), ""):
        raise InputError(f"{fault}: rewards get columns as JSON")
    return PromptRow(prompt, columns, tools)


def _shared(chosen: Messages, rejected: Messages) -> int:
    """Return the number of messages that both conversations begin with; at least one of each remains."""
    most = min(len(chosen), len(rejected)) - 1
    return next((i for i in range(most) if chosen[i] != rejected[i]), max(most, 0))


def _content(row: JsonObject, key: str) -> Content:
    if isinstance(row[key], str):
        return row[key]
    if isinstance(row[key], list):
        return _messages(row, key)
    raise InputError(f'"{key}" must be a string or a list of messages, not {_kind_of(row[key])}')


def _answer(row: JsonObject, key: str) -> Content:
    content = _content(row, key)
    if isinstance(content, list):
        _answered(key, content)
    return content


def _answered(key: str, messages: Messages) -> None:
    role = messages[-1]["role"]
    if role != "assistant":
        raise InputError(f'"{key}": the last message is of the {role}, not of the assistant: there is no answer')


def _messages(row: JsonObject, key: str) -> Messages:
    value = row[key]
    if not isinstance(value, list):
        raise InputError(f'"{key}" must be a list of messages, not {_kind_of(value)}')
    messages = cast(list[Any], value)
    if not messages:
        raise InputError(f'"{key}" is an empty list: it needs at least one message')
    return [_message(key, i, message) for i, message in enumerate(messages, 1)]


def _message(key: str, place: int, value: Any) -> JsonObject:
    which = f'"{key}": message {place}'
    if not isinstance(value, dict):
        raise InputError(f'{which} must be an object with "role" and "content", not {_kind_of(value)}')
    message = {name: inner for name, inner in cast(JsonObject, value).items() if inner is not None}
    if "role" not in message:
        other = ' (it has "from" and "value": rename them)' if {"from", "value"} <= message.keys() else ""
        raise InputError(f'{which} has no "role"{other}')
    role = message["role"]
    if not isinstance(role, str):
        raise InputError(f'{which}: "role" must be a string, not {_kind_of(role)}')
    if role not in ROLES:
        near = _MEANT.get(role.lower()) or next(iter(difflib.get_close_matches(role.lower(), ROLES, n=1)), "")
        raise InputError(
            f'{which} has the unknown role "{role}"'
            + (f'; did you mean "{near}"?' if near else f": roles are {', '.join(ROLES)}")
        )
    if "content" not in message and "tool_calls" not in message:
        raise InputError(f'{which} has no "content"')
    if not isinstance(message.get("content", ""), str | list):
        raise InputError(f'{which}: "content" must be a string, not {_kind_of(message["content"])}')
    if isinstance(message.get("content"), list):
        for part in cast(list[Any], message["content"]):
            if not isinstance(part, dict) or not isinstance(cast(JsonObject, part).get("text"), str):
                raise InputError(f'{which}: "content" has a part that is not text: only text can be trained on')
    return message


def _tools(row: JsonObject) -> list[Any] | None:
    tools = row.get("tools")
    if tools is not None and not isinstance(tools, list):
        raise InputError(f'"tools" must be a list, not {_kind_of(tools)}')
    return cast("list[Any] | None", tools)


def _alike(*given: tuple[str, Content]) -> None:
    (one, first), (other, second) = given
    if isinstance(first, str) != isinstance(second, str):
        kinds = ["a string" if isinstance(content, str) else "a list of messages" for content in (first, second)]
        raise InputError(f'"{one}" is {kinds[0]} and "{other}" {kinds[1]}: make both the same')


def _unlike(kind: Kind, row: JsonObject) -> str:
    """Return the algorithm that the row seems made for."""
    for other, keys in (("dpo", {"chosen", "rejected"}), ("kto", {"completion", "label"}), ("sft", {"messages"})):
        if other != kind and keys <= row.keys():
            return f" (it looks like a row for {other})"
    if "conversations" in row:
        return ' (it has "conversations": call that "messages", each with "role" and "content")'
    if kind != "sft" and {"prompt", "completion"} <= row.keys() and "label" not in row:
        return " (it looks like a row for sft)" if kind != "kto" else ""
    if _KEYS & row.keys():
        return ""
    return f" (it has {', '.join(map(repr, list(row)[:6]))})" if row else " (it is empty)"


_KEYS = {"prompt", "completion", "chosen", "rejected", "label", "text", "messages"}


def _kind_of(value: Any) -> str:
    names: dict[type[Any], str] = {
        bool: "a boolean",
        int: "a number",
        float: "a number",
        str: "a string",
        list: "a list",
        dict: "an object",
    }
    return "null" if value is None else names.get(cast("type[Any]", type(value)), f"a {type(value).__name__}")
