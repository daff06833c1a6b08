"""An answer read as it comes is the one read at its end, however it was cut."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import example, given
from hypothesis import strategies as st
from rollout.workloads.infer.tools import Tools
from rollout_worker.backends.answers import PartedStream, part_calls, part_reasoning
from rollout_worker.backends.port import Choice

TOOLS = Tools(({"type": "function", "function": {"name": "now"}},))
PIECES = st.sampled_from(
    [
        "<think>", "</think>", "<", "<thi", "</", "<tool_call>", "</tool_call>", "<tool", "<function=now>", "</function>",
        "[TOOL_CALLS]", "[TOOL", "<|python_tag|>", "<|py", '{"name": "now", "arguments": {}}', "now{}", "{", "}", "\n",
        " ", "Hm", "é", "I look.",
    ]
)  # fmt: skip
TEXTS = st.lists(PIECES, max_size=9).map("".join)
CHOICES = st.sampled_from([None, TOOLS, replace(TOOLS, choice="none"), replace(TOOLS, choice="required")])


@given(text=TEXTS, tools=CHOICES, thinking=st.booleans(), reasons=st.booleans(), data=st.data())
@example("<think>\nHm\n</think>\n\nI look. <tool_call>now{}</tool_call>", TOOLS, False, True, None)
def test_the_parts_joined_are_the_whole(
    text: str, tools: Tools | None, thinking: bool, reasons: bool, data: st.DataObject | None
) -> None:
    whole = Choice(text, "stop", 1)
    if reasons:
        part_reasoning(whole, thinking=thinking)
    if tools is not None and tools.choice != "none":
        part_calls(whole, tools)
    stream = PartedStream(reasons=reasons, thinking=thinking, tools=tools)
    cuts = sorted(data.draw(st.sets(st.integers(0, len(text))))) if data is not None else range(len(text))
    parts = [text[begin:end] for begin, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    said = [stream.feed(part) for part in parts]
    so_far = tuple("".join(column) for column in zip(*said, strict=True))
    again = PartedStream(reasons=reasons, thinking=thinking, tools=tools)
    assert again.feed(text) == so_far  # the cuts decide nothing
    rest = stream.rest(whole)
    assert so_far[0] + rest[0] == (whole.reasoning or "")
    assert so_far[1] + rest[1] == whole.text


def test_what_no_call_can_follow_is_said_at_once() -> None:
    stream = PartedStream(reasons=True, thinking=False, tools=TOOLS)
    assert [stream.feed(part) for part in ("<think>Let me", " see </th", "ink>\n It", " is <tool", "d")] == [
        ("Let me", ""),
        (" see", ""),
        ("", "It"),
        ("", " is"),
        ("", " <toold"),
    ]
