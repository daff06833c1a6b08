"""Marked chat templates: the text of the model's own, and the mask on what the assistant says, end of turn included."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from rollout.model.errors import ConfigError, InputError
from rollout.workloads.train.templates import NAMES, find_template, read_template
from rollout_worker.backends.tiny import make_tokenizer
from transformers import PreTrainedTokenizerFast

SPECIAL = [
    "<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>",
    "<start_of_turn>", "<end_of_turn>", "<|system|>", "<|user|>", "<|assistant|>", "<|end|>",
]  # fmt: skip
MISTRAL = (
    "{{ bos_token }}{% for message in messages %}{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}"
    "{% if message['role'] == 'user' %}{{ '[INST] ' + message['content'] + ' [/INST]' }}"
    "{% elif message['role'] == 'assistant' %}{{ message['content'] + eos_token}}{% endif %}{% endfor %}"
)
CHATML = (
    "{% for message in messages %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
TURNS = [
    {"role": "user", "content": "What is 7 times 8? "},
    {"role": "assistant", "content": "It is 56."},
    {"role": "user", "content": "And 2 + 2?"},
    {"role": "assistant", "content": "4\nor so"},
]
SYSTEM = [{"role": "system", "content": "Be brief."}]
TOOL = {"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": {"type": "object"}}}
CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
CALLS = [
    {"role": "user", "content": "Add 1."},
    {"role": "assistant", "tool_calls": [CALL]},
    {"role": "tool", "content": "2"},
    {"role": "assistant", "content": "It is 2."},
]
THOUGHT = "<think>\n\n</think>\n\n"


def stock(name: str) -> str:
    """As the model's publisher ships it; TRL has copies."""
    found = find_spec("trl")
    assert found is not None and found.origin is not None
    return (Path(found.origin).parent / "chat_templates" / f"{name}.jinja").read_text("utf-8")


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    made = PreTrainedTokenizerFast(tokenizer_object=make_tokenizer(), bos_token="<s>", eos_token="</s>")
    made.add_special_tokens({"additional_special_tokens": SPECIAL})
    return made


def learnt(tokenizer: Any, template: str, messages: list[Any], tools: list[Any] | None = None) -> list[str]:
    """The texts that are learnt, each from where it begins to where it ends."""
    tokenizer.chat_template = template
    found = find_template(tokenizer, None)
    ids, mask = found.marked(tokenizer, messages, tools)
    whole = tokenizer(found.rendered(tokenizer, messages, tools, generation_prompt=False), add_special_tokens=False)
    assert ids == whole["input_ids"]
    texts: list[list[int]] = []
    for i, (token, one) in enumerate(zip(ids, mask, strict=True)):
        if one and (i == 0 or not mask[i - 1]):
            texts.append([])
        if one:
            texts[-1].append(token)
    return [tokenizer.decode(text, clean_up_tokenization_spaces=False) for text in texts]


@pytest.mark.parametrize(
    ("template", "end", "first", "last"),
    [
        pytest.param(CHATML, "<|im_end|>", "", "", id="chatml"),
        pytest.param(stock("qwen2_5"), "<|im_end|>", "", "", id="qwen2.5"),
        pytest.param(stock("qwen3"), "<|im_end|>", "", THOUGHT, id="qwen3"),
        pytest.param(stock("llama3"), "<|eot_id|>", "", "", id="llama3"),
        pytest.param(stock("llama3_1"), "<|eot_id|>", "", "", id="llama3.1"),
        pytest.param(stock("llama3_2"), "<|eot_id|>", "", "", id="llama3.2"),
        pytest.param(stock("gemma"), "<end_of_turn>", "", "", id="gemma"),
        pytest.param(stock("gemma3"), "<end_of_turn>", "", "", id="gemma3"),
        pytest.param(stock("phi3"), "<|end|>", "", "", id="phi3"),
        pytest.param(MISTRAL, "</s>", "", "", id="mistral"),
    ],
)
def test_every_turn_of_the_assistant_is_learnt_with_its_end(
    tokenizer: Any, template: str, end: str, first: str, last: str
) -> None:
    expected = [f"{first}It is 56.{end}", f"{last}4\nor so{end}"]
    assert learnt(tokenizer, template, TURNS) == expected
    if template not in (stock("gemma"), MISTRAL):  # which know no system
        assert learnt(tokenizer, template, [*SYSTEM, *TURNS]) == expected


@pytest.mark.parametrize("name", ["qwen2_5", "qwen3"])
def test_calls_of_tools_are_learnt_and_their_answers_are_not(tokenizer: Any, name: str) -> None:
    call = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call><|im_end|>'
    last = f"{THOUGHT if name == 'qwen3' else ''}It is 2.<|im_end|>"
    assert learnt(tokenizer, stock(name), CALLS, [TOOL]) == [call, last]


def test_calls_of_tools_as_llama_writes_them(tokenizer: Any) -> None:
    call = '{"name": "add", "parameters": {"a": 1}}<|eot_id|>'
    assert learnt(tokenizer, stock("llama3_1"), CALLS, [TOOL]) == [call, "It is 2.<|eot_id|>"]


def test_what_a_row_was_thought_before_its_answer_is_learnt_of_the_last_turn_alone(tokenizer: Any) -> None:
    thought = "<think>\nHm.\n</think>\n\n"
    turns = [
        {**turn, "content": thought + turn["content"] if turn["role"] == "assistant" else turn["content"]}
        for turn in TURNS
    ]
    first, last = learnt(tokenizer, stock("qwen3"), turns)
    assert last == f"{thought}4\nor so<|im_end|>" and first.endswith("It is 56.<|im_end|>")


def test_a_template_that_marks_is_used_as_it_is(tokenizer: Any) -> None:
    own = "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}"
    assert learnt(tokenizer, own, TURNS[1:2]) == ["It is 56."]


def test_one_that_does_not_is_refused_with_the_remedy(tokenizer: Any) -> None:
    with pytest.raises(InputError) as error:
        learnt(tokenizer, CHATML.replace("'\n'", "'\n\n'"), TURNS)
    assert "base_model.chat_template" in error.value.message and "{% generation %}" in error.value.message
    assert "completion_only" in error.value.message


def test_a_template_that_refuses_a_row_says_why(tokenizer: Any) -> None:
    tokenizer.chat_template = stock("gemma")
    with pytest.raises(InputError, match="System role not supported"):
        find_template(tokenizer, None).rendered(tokenizer, [*SYSTEM, *TURNS], None, generation_prompt=False)
    tokenizer.chat_template = None
    with pytest.raises(InputError, match="no chat template"):
        find_template(tokenizer, None).rendered(tokenizer, TURNS, None, generation_prompt=False)


@pytest.mark.parametrize("name", NAMES)
def test_ours_render_the_prompt_as_the_beginning_of_the_whole(tokenizer: Any, name: str) -> None:
    template = find_template(tokenizer, read_template(name, "base_model.chat_template"))
    prompt = template.rendered(tokenizer, TURNS[:3], None, generation_prompt=True)
    assert template.rendered(tokenizer, TURNS, None, generation_prompt=False).startswith(prompt)


def test_a_template_file(tmp_path: Path) -> None:
    path = tmp_path / "mine.jinja"
    path.write_text(CHATML)
    assert read_template(str(path), "key") == CHATML
    for wrong, text in (("chatml2", 'did you mean "chatml"'), (str(tmp_path / "none.jinja"), "none of our templates")):
        with pytest.raises(ConfigError) as error:
            read_template(wrong, "algorithm.sft.base_model.chat_template")
        assert text in error.value.message and error.value.message.startswith(
            "algorithm.sft.base_model.chat_template: "
        )
