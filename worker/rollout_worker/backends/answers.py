"""Separates reasoning and tool calls from the content of a chat's answer.

Calls are parsed in the formats that chat templates teach: Hermes and Qwen (`<tool_call>{...}</tool_call>`), Qwen3-Coder
(`<tool_call><function=name><parameter=key>value</parameter></function></tool_call>`), Mistral (`[TOOL_CALLS][{...}]`,
`[TOOL_CALLS]name{...}`) and Llama 3 (`{"name": ..., "parameters": {...}}`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable
from typing import Any, cast

from blake3 import blake3
from rollout.workloads.infer.tools import Tools

from rollout_worker.backends.port import Choice
from rollout_worker.json_fields import table

_OPEN = "<think>"
_THOUGHT = re.compile(r"\s*(?:<think>)?(.*?)(?:</think>\s*|\Z)", re.DOTALL)
_HERMES = re.compile(r"<tool_call>(.*?)(?:</tool_call>|\Z)", re.DOTALL)
_FUNCTION = re.compile(r"<function=([^>]*)>(.*?)(?:</function>|\Z)", re.DOTALL)
_CODER = re.compile(rf"(?:<tool_call>\s*)?{_FUNCTION.pattern}(?:\s*</tool_call>)?", re.DOTALL)
# Models leave the closing tag of a parameter out.
_PARAMETER = re.compile(r"<parameter=([^>]*)>(.*?)(?:</parameter>|(?=<parameter=)|\Z)", re.DOTALL)
_MISTRAL = "[TOOL_CALLS]"
_MISTRAL_NAMED = re.compile(r"\s*([\w.-]+)\s*(?:\[CALL_ID\]\s*\w+\s*)?(?:\[ARGS\])?\s*(?=\{)")
_PYTHON_TAG = "<|python_tag|>"
_MARKS = ("<tool_call>", "<function=", _MISTRAL)
"""Markers, one of which precedes the first call wherever text may come before it."""
_CLOSE = "</think>"

Call = dict[str, Any]
FindCalls = Callable[[str, Tools], tuple[str, list[Any]]]
"""Returns a text without its calls, and the calls, each with `name` and `arguments`."""


class UnreadableCallError(ValueError):
    """The text begins like a tool call but is not one."""


def part_reasoning(choice: Choice, *, thinking: bool) -> None:
    """Move the text between `<think>` and `</think>`, or the end, to the reasoning. `thinking` means that the opening
    tag is in the prompt."""
    if not thinking and not choice.text.lstrip().startswith(_OPEN):
        return
    found = _THOUGHT.match(choice.text)
    if found:
        choice.reasoning, choice.text = found[1].strip(), choice.text[found.end() :]


def part_calls(choice: Choice, tools: Tools, find: FindCalls | None = None) -> None:
    """Move calls out of the text, which is JSON if `tools` require a call. Unreadable calls stay in the text, with a
    note. `find` replaces the built-in formats."""
    try:
        content, calls = _forced(choice.text, tools) if tools.choice != "auto" else (find or _found)(choice.text, tools)
        read = [_call(call, f"{at}\0{choice.text}") for at, call in enumerate(calls)]
    except UnreadableCallError as error:
        cut = ": it was cut off at max_tokens" if choice.finish_reason == "length" else ""
        choice.note = f"a tool call of the model cannot be read: {error}{cut}"
        return
    if not read:
        return
    if unknown := [call["function"]["name"] for call in read if call["function"]["name"] not in tools.names]:
        choice.note = f"the model called {unknown[0]!r}, which is none of the row's tools"
    choice.tool_calls = read if tools.parallel else read[:1]
    choice.text = content
    if tools.choice != "named":  # as OpenAI has it: the model had no choice
        choice.finish_reason = "tool_calls"


def _forced(text: str, tools: Tools) -> tuple[str, list[Any]]:
    if tools.choice == "named":
        return "", [{"name": tools.name, "arguments": text}]
    return "", cast("list[Any]", _json(text))


def _found(text: str, tools: Tools) -> tuple[str, list[Any]]:
    """Return the text without its calls, and the calls."""
    if "<function=" in text and (calls := _coder(text, tools)):
        return _content(text, _CODER.sub("", text)), calls
    if "<tool_call>" in text:
        return _content(text, _HERMES.sub("", text)), [_json(found[1]) for found in _HERMES.finditer(text)]
    if _MISTRAL in text:
        content, _, rest = text.partition(_MISTRAL)
        return _content(text, content), [call for part in rest.split(_MISTRAL) for call in _mistral(part)]
    bare = text.strip().removeprefix(_PYTHON_TAG).strip()
    if bare.startswith("{"):
        calls = _objects(bare)
        if calls and all(isinstance(call, dict) and cast(Call, call).get("name") in tools.names for call in calls):
            return "", calls
    if text.strip().startswith(_PYTHON_TAG):
        raise UnreadableCallError(f"no JSON follows {_PYTHON_TAG}")
    return text, []


def _content(text: str, rest: str) -> str:
    """Return the content of a text without its calls. White space before the content is kept, because it may have been
    streamed already."""
    first = min(at for mark in _MARKS if (at := text.find(mark)) >= 0)
    return rest.rstrip() if text[:first].strip() else rest.strip()


def _coder(text: str, tools: Tools) -> list[Any]:
    """Parse calls whose values are text, with types from the function's parameters."""
    calls: list[Any] = []
    for found in _FUNCTION.finditer(text):
        name, body = found[1].strip(), found[2]
        if not found[0].endswith("</function>"):
            raise UnreadableCallError(f"the call of {name!r} is not closed")
        types = tools.types_of(name)
        given = {key.strip(): value for key, value in _PARAMETER.findall(body)}
        calls.append({"name": name, "arguments": {key: _value(value, types.get(key)) for key, value in given.items()}})
    return calls


def _value(text: str, kind: Any) -> Any:
    """Parse a parameter's value of the JSON schema type `kind`; None means any."""
    text = text.removeprefix("\n").removesuffix("\n")
    if kind == "string":
        return text
    try:
        return json.loads(text.strip().lower() if kind == "boolean" else text)
    except (ValueError, RecursionError):
        return text


def _mistral(text: str) -> list[Any]:
    if named := _MISTRAL_NAMED.match(text):
        return [{"name": named[1], "arguments": _json(text[named.end() :])}]
    value = _json(text)
    return cast("list[Any]", value) if isinstance(value, list) else [value]


def _objects(text: str) -> list[Any]:
    """Parse JSON values separated by semicolons; empty if the text is something else."""
    found: list[Any] = []
    decoder, at = json.JSONDecoder(), 0
    while at < len(text):
        try:
            value, at = decoder.raw_decode(text, at)
        except (ValueError, RecursionError):
            return []
        found.append(value)
        rest = text[at:].lstrip("; \n")
        at = len(text) - len(rest)
    return found


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UnreadableCallError(f"no JSON ({error})") from error


class PartedStream:
    """Streams reasoning and content: prefixes of what `part_reasoning` and `part_calls` find in the whole text. What
    has been emitted depends on the text so far, not on how it was split.

    `reasons` means that reasoning is separated. `find` is that of `part_calls`; its results are known only at the end.
    """

    def __init__(self, *, reasons: bool, thinking: bool, tools: Tools | None, find: FindCalls | None = None) -> None:
        self._step = self._opening if reasons else self._contents
        self._thinking = thinking
        self._tools = tools is not None and tools.choice != "none"
        self._waits = tools is not None and (tools.choice in ("named", "required") or find is not None)
        self._buffer = ""
        self._reasoning = self._content = 0

    def feed(self, text: str) -> tuple[str, str]:
        """Add text, and return the new reasoning and content."""
        self._buffer += text
        reasoning = content = ""
        step = None
        while step != self._step:
            step = self._step
            more, said = step()
            reasoning, content = reasoning + more, content + said
        self._reasoning += len(reasoning)
        self._content += len(content)
        return reasoning, content

    def rest(self, choice: Choice) -> tuple[str, str]:
        """Return the rest of both. `choice` is the complete one, with its parts separated."""
        return (choice.reasoning or "")[self._reasoning :], choice.text[self._content :]

    def _opening(self) -> tuple[str, str]:
        begun = self._buffer.lstrip()
        if begun.startswith(_OPEN):
            self._buffer = begun.removeprefix(_OPEN)
            self._step = self._thoughts
        elif not _OPEN.startswith(begun):
            self._step = self._thoughts if self._thinking else self._contents
        return "", ""

    def _thoughts(self) -> tuple[str, str]:
        if not self._reasoning:
            self._buffer = self._buffer.lstrip()
        thought, closed, rest = self._buffer.partition(_CLOSE)
        if closed:
            self._buffer, self._step = rest, self._between
            return thought.rstrip(), ""
        return self._taken(_without_begun(self._buffer, (_CLOSE,)).rstrip()), ""

    def _between(self) -> tuple[str, str]:
        self._buffer = self._buffer.lstrip()
        if self._buffer:
            self._step = self._contents
        return "", ""

    def _contents(self) -> tuple[str, str]:
        if not self._tools:
            return "", self._taken(self._buffer)
        if not self._content and not self._waits:
            bare = self._buffer.lstrip()
            if _PYTHON_TAG.startswith(bare):
                return "", ""
            self._waits = bare.startswith(("{", _PYTHON_TAG))
        if self._waits:
            return "", ""
        found = [at for mark in _MARKS if (at := self._buffer.find(mark)) >= 0]
        self._waits = bool(found)
        safe = self._buffer[: min(found)] if found else _without_begun(self._buffer, _MARKS)
        return "", self._taken(safe.rstrip())

    def _taken(self, text: str) -> str:
        self._buffer = self._buffer[len(text) :]
        return text


def _without_begun(text: str, marks: Iterable[str]) -> str:
    """Remove from the end what may be the beginning of a mark."""
    begun = max(
        (size for mark in marks for size in range(1, len(mark)) if text.endswith(mark[:size])),
        default=0,
    )
    return text[: len(text) - begun]


def _written(name: str, arguments: str, key: str) -> Call:
    # The same text has the same ids, whichever attempt wrote it. Nine characters are what Mistral's templates take.
    identity = blake3(key.encode("utf-8", "surrogatepass")).hexdigest()[:9]
    return {"id": identity, "type": "function", "function": {"name": name, "arguments": arguments}}


def cut_off_call(choice: Choice, tools: Tools) -> None:
    """Keep the arguments, as far as they came, of an answer that had to call `tools.name` and was truncated within
    them."""
    choice.tool_calls = [_written(tools.name, choice.text, choice.text)]
    choice.text = ""


def _call(value: Any, key: str) -> Call:
    call: Call = table(value)
    name = call.get("name")
    arguments = call.get("arguments", call.get("parameters"))
    written = ""
    if isinstance(arguments, str):
        written, arguments = arguments, _json(arguments)
    if not isinstance(name, str) or not isinstance(arguments, dict):
        raise UnreadableCallError("it has no name, or its arguments are no object")
    try:
        dumped = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
    except ValueError as error:
        raise UnreadableCallError("its arguments have NaN or infinity, which JSON has no number for") from error
    return _written(name, written or dumped, key)
