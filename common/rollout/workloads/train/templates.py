"""Chat templates, and those of ours that mark what the assistant says.

Training on the assistant's messages alone needs templates with `{% generation %}` around them, and no model comes with
one. Ours of the common families take the place of the model's own where they render a row to the very same text; where
they do not, the row is refused, with what to do.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rollout.model.errors import ConfigError, InputError
from rollout.workloads.train.rows import Messages

_CHATML = """{%- if messages[0]['role'] != 'system' and default_system %}
{{- '<|im_start|>system\\n' + default_system + '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
{%- if message['role'] == 'assistant' %}
{{- '<|im_start|>assistant\\n' }}{% generation %}{{- message['content'] + '<|im_end|>' }}{% endgeneration %}{{- '\\n' }}
{%- else %}
{{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""

_LLAMA3 = """{{- bos_token }}
{%- for message in messages %}
{{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' }}
{%- if message['role'] == 'assistant' %}
{%- generation %}{{- message['content'] | trim + '<|eot_id|>' }}{%- endgeneration %}
{%- else %}
{{- message['content'] | trim + '<|eot_id|>' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif %}"""

_GEMMA = """{{- bos_token }}
{%- for message in messages %}
{%- if message['role'] == 'assistant' %}
{{- '<start_of_turn>model\\n' }}
{%- generation %}{{- message['content'] | trim + '<end_of_turn>' }}{%- endgeneration %}{{- '\\n' }}
{%- else %}
{{- '<start_of_turn>' + message['role'] + '\\n' + message['content'] | trim + '<end_of_turn>\\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<start_of_turn>model\\n' }}{%- endif %}"""

_MISTRAL = """{{- bos_token }}
{%- for message in messages %}
{%- if message['role'] == 'assistant' %}
{%- generation %}{{- ' ' + message['content'] | trim + eos_token }}{%- endgeneration %}
{%- else %}
{{- '[INST] ' + message['content'] | trim + ' [/INST]' }}
{%- endif %}
{%- endfor %}"""

_QWEN_SYSTEM = "You are Qwen, created by Alibaba Cloud. You are a helpful assistant."
_MARKED: dict[str, tuple[str, str]] = {
    "qwen2.5": ("<|im_start|>", _CHATML.replace("default_system", repr(_QWEN_SYSTEM))),
    "chatml": ("<|im_start|>", _CHATML.replace("default_system", "''")),
    "llama3": ("<|start_header_id|>", _LLAMA3),
    "gemma": ("<start_of_turn>", _GEMMA),
    "mistral": ("[INST]", _MISTRAL),
}
"""Name -> (what is found in the templates of the family, ours)."""

NAMES = tuple(_MARKED)


@dataclass(frozen=True, slots=True)
class Template:
    """`text`: what renders; None: the tokenizer's own. `marked_texts`: with generation markers, the first that renders
    as `text` does is used."""

    text: str | None
    marked_texts: tuple[str, ...]

    def ids(self, tokenizer: Any, messages: Messages, tools: list[Any] | None, *, generation_prompt: bool) -> list[int]:
        """The tokens of a conversation. InputError: the template refuses it."""
        rendered = _apply(tokenizer, messages, tools, self.text, add_generation_prompt=generation_prompt)
        return list(rendered["input_ids"])

    def marked(self, tokenizer: Any, messages: Messages, tools: list[Any] | None) -> tuple[list[int], list[bool]]:
        """(tokens, which of them the assistant says). InputError: no template that marks them renders as this one."""
        own = self.ids(tokenizer, messages, tools, generation_prompt=False)
        for text in self.marked_texts:
            rendered = _apply(tokenizer, messages, tools, text, return_assistant_tokens_mask=True)
            if list(rendered["input_ids"]) == own:
                return own, [bool(one) for one in rendered["assistant_masks"]]
        raise InputError(
            "the chat template does not mark what the assistant says, and none of ours renders this row as it does: "
            "give base_model.chat_template, a file with {% generation %} and {% endgeneration %} around the content, "
            'or use loss_on = "completion_only"'
        )


def find_template(tokenizer: Any, given: str | None, where: str) -> Template:
    """`given`: a file, or the name of one of ours. ConfigError: there is no such thing."""
    own: str | None = tokenizer.chat_template
    if given is not None:
        text = _MARKED[given][1] if given in _MARKED else _read(given, where)
        return Template(text, (text,) if "generation" in text else _candidates(text))
    return Template(None, _candidates(own) if own else ())


def _candidates(text: str) -> tuple[str, ...]:
    if "{% generation" in text or "{%- generation" in text:
        return (text,)
    return tuple(ours for sign, ours in _MARKED.values() if sign in text)


def _read(path: str, where: str) -> str:
    try:
        return Path(path).read_text("utf-8")
    except OSError as error:
        names = ", ".join(NAMES)
        raise ConfigError(
            f"{where}: {path} cannot be read ({error.strerror}), and it is none of our templates: {names}"
        ) from error


def _apply(tokenizer: Any, messages: Messages, tools: list[Any] | None, template: str | None, **options: Any) -> Any:
    try:
        return tokenizer.apply_chat_template(
            messages, tools=tools, chat_template=template, tokenize=True, return_dict=True, **options
        )
    except InputError:
        raise
    except Exception as error:
        if not isinstance(error, ValueError | TypeError | KeyError) and "jinja2" not in type(error).__module__:
            raise
        raise InputError(f"the chat template cannot render it: {error}") from error
