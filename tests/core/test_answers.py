"""Reasoning and calls of tools in the texts of models."""

from __future__ import annotations

import json
from typing import Any

import pytest
from rollout.workloads.infer.tools import Tools
from rollout_worker.backends.answers import part_calls, part_reasoning
from rollout_worker.backends.port import Choice

WEATHER, NOW = ("weather", {"city": "Rome"}), ("now", {})
TYPES = {
    "city": {"type": "string"},
    "days": {"type": "integer"},
    "metric": {"type": "boolean"},
    "at": {"type": "object"},
}
DEFINITIONS = (
    {"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": TYPES}}},
    {"type": "function", "function": {"name": "now"}},
)
HERMES = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'


def read(text: str, choose: str = "auto", name: str = "", finish: str = "stop", *, parallel: bool = True) -> Choice:
    choice = Choice(text, finish, 1)
    part_calls(choice, Tools(DEFINITIONS, choose, name, parallel))
    return choice


def calls(choice: Choice) -> list[tuple[str, Any]]:
    functions = [call["function"] for call in choice.tool_calls or ()]
    return [(one["name"], json.loads(one["arguments"])) for one in functions]


@pytest.mark.parametrize(
    ("text", "content", "found"),
    [
        (HERMES, "", [WEATHER]),
        (f"I look.\n{HERMES}\n" + HERMES, "I look.", [WEATHER, WEATHER]),
        ('<tool_call>{"name": "now", "arguments": "{}"}</tool_call>', "", [NOW]),
        ('<tool_call>{"name": "now", "arguments": {}}', "", [NOW]),
        ('[TOOL_CALLS][{"name": "weather", "arguments": {"city": "Rome"}}, {"name": "now", "arguments": {}}]', "", [WEATHER, NOW]),
        ('Yes. [TOOL_CALLS]weather[ARGS]{"city": "Rome"}[TOOL_CALLS]now{}', "Yes.", [WEATHER, NOW]),
        ('[TOOL_CALLS]now[CALL_ID]123456789[ARGS]{}', "", [NOW]),
        ('{"name": "weather", "parameters": {"city": "Rome"}}', "", [WEATHER]),
        ('<|python_tag|>{"name": "now", "parameters": {}}; {"name": "now", "parameters": {}}', "", [NOW, NOW]),
        ('{"name": "Ann", "age": 5}', '{"name": "Ann", "age": 5}', []),
        ("{x} is a set", "{x} is a set", []),
    ],
)  # fmt: skip
def test_calls_in_the_formats_of_models(text: str, content: str, found: list[Any]) -> None:
    choice = read(text)
    assert (calls(choice), choice.text, choice.note) == (found, content, None)
    assert choice.finish_reason == ("tool_calls" if found else "stop")


def test_parameters_of_qwen3_coder_have_the_types_of_their_function() -> None:
    values = {"city": "12", "days": "3", "metric": "True", "at": '{"x": [1]}', "note": "a\n<b>"}
    body = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in values.items())
    choice = read(
        f"I look.\n<tool_call>\n<function=weather>\n{body}</function>\n</tool_call>\n"
        "<tool_call><function=now>\n</function></tool_call>"
    )
    assert choice.text == "I look."
    weather = {"city": "12", "days": 3, "metric": True, "at": {"x": [1]}, "note": "a\n<b>"}
    assert calls(choice) == [("weather", weather), NOW]


@pytest.mark.parametrize(
    "text",
    [
        "<tool_call>\n<function=weather>\n<parameter=city>\nRo",
        '<tool_call>{"name": "weather", "arguments": {"city": "Ro',
        '<tool_call>{"arguments": {}}</tool_call>',
        '<tool_call>{"name": "now", "arguments": {"at": NaN}}</tool_call>',
        '<tool_call>{"name": "now", "arguments": [1]}</tool_call>',
        "[TOOL_CALLS]",
        '[TOOL_CALLS]now{"a": }',
        "<|python_tag|>print(1)",
    ],
)
def test_a_call_that_cannot_be_read_stays_in_the_text_with_a_note(text: str) -> None:
    choice = read(text, finish="length")
    assert choice.text == text and choice.tool_calls is None and choice.finish_reason == "length"
    assert choice.note and "max_tokens" in choice.note


def test_forced_calls_are_json() -> None:
    listed = '[{"name": "now", "parameters": {}}, {"name": "weather", "parameters": {"city": "Rome"}}]'
    assert calls(read(listed, "required")) == [NOW, WEATHER]
    assert calls(read(listed, "required", parallel=False)) == [NOW]
    assert calls(read('{"city": "Rome"}', "named", "weather")) == [WEATHER]
    assert read('{"city": "Ro', "named", "weather", "length").note
    assert read('{"name": "now"}', "required").note


def test_an_unknown_function_is_a_call_with_a_note() -> None:
    choice = read('<tool_call>{"name": "fly", "arguments": {}}</tool_call>')
    assert calls(choice) == [("fly", {})] and choice.note and "fly" in choice.note


@pytest.mark.parametrize(
    ("text", "thinking", "reasoning", "content"),
    [
        ("<think>\na\n</think>\n\nb", False, "a", "b"),
        ("a</think>b", True, "a", "b"),
        ("<think>a</think>b", True, "a", "b"),
        ("<think>cut o", False, "cut o", ""),
        ("cut o", True, "cut o", ""),
        ("</think> closes <think>", False, None, "</think> closes <think>"),
    ],
)
def test_reasoning_is_parted(text: str, thinking: bool, reasoning: str | None, content: str) -> None:
    choice = Choice(text, "stop", 1)
    part_reasoning(choice, thinking=thinking)
    assert (choice.reasoning, choice.text) == (reasoning, content)
