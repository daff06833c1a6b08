"""Parses tool calls with vLLM's own parsers (`[backend] tool_parser`)."""

# The engine's own types are incomplete or, where it is not installed, absent.
# pyright: reportMissingImports=false, reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportUnknownParameterType=false

from __future__ import annotations

import inspect
from difflib import get_close_matches
from importlib import import_module
from typing import Any

from rollout.model.errors import AttemptError
from rollout.workloads.infer.tools import Tools


class ToolReader:
    """The parser `name`, for texts of the model with this tokenizer. Raises AttemptError if there is no such parser, or
    it is for other models."""

    def __init__(self, name: str, tokenizer: Any) -> None:
        manager, self._request = _of_vllm()
        known: list[str] = sorted(manager.list_registered())
        if name not in known:
            near = get_close_matches(name, known, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise _unsuitable(f"{name!r} is none of this vLLM: {', '.join(known)}{hint}")
        try:
            self._parser: Any = manager.get_tool_parser(name)
            self._tokenizer = tokenizer
            self._given(None)
        except (RuntimeError, ValueError, TypeError, KeyError, ImportError) as error:
            raise _unsuitable(f"{name!r} cannot read what this model writes: {error}") from error

    def __call__(self, text: str, tools: Tools) -> tuple[str, list[Any]]:
        """Return the text without its calls, and the calls."""
        asked: Any = self._request(
            model="", messages=[{"role": "user", "content": ""}], tools=list(tools.definitions), tool_choice="auto"
        )
        found: Any = self._given(asked.tools).extract_tool_calls(text, asked)
        if not found.tools_called:
            return text, []
        functions = [call.function for call in found.tool_calls]
        return found.content or "", [{"name": one.name, "arguments": one.arguments} for one in functions]

    def _given(self, tools: Any) -> Any:
        """Return a new parser for each text, because parsers have state."""
        takes_tools = len(inspect.signature(self._parser.__init__).parameters) > 2
        return self._parser(self._tokenizer, tools) if takes_tools else self._parser(self._tokenizer)


def _of_vllm() -> tuple[Any, Any]:
    """Return vLLM's manager of parsers and its class of requests, which moved between versions."""
    for parsers, protocol in (
        ("vllm.tool_parsers", "vllm.entrypoints.openai.chat_completion.protocol"),
        ("vllm.entrypoints.openai.tool_parsers", "vllm.entrypoints.openai.protocol"),
    ):
        try:
            return import_module(parsers).ToolParserManager, import_module(protocol).ChatCompletionRequest
        except ImportError:
            continue
    raise _unsuitable("this vLLM has no parsers of tool calls where they are known to be")


def _unsuitable(what: str) -> AttemptError:
    return AttemptError(f"backend.tool_parser: {what}", code="model_load_failed", retry=False)
