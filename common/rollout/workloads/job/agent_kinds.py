"""The built-in agents: their names and their `kwargs`. Their code is in the worker.

An agent of an installed package is found by its entry point in the group `rollout.agents`, and checks its own kwargs.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from difflib import get_close_matches
from importlib.metadata import entry_points
from typing import Annotated, Any, cast

from pydantic import AfterValidator, Field, ValidationError

from rollout.config.section import Section
from rollout.config.wording import describe
from rollout.config.written import Text

GROUP = "rollout.agents"
ORACLE = "oracle"
NOP = "nop"
SHELL_LOOP = "shell-loop"
ENGINE = "engine"
"""The `model_name` that stands for the engines of the cluster."""
_VERSION = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+-]*")
_VARIABLE = r"^[A-Za-z_][A-Za-z0-9_]*$"


def _version(value: str) -> str:
    if not _VERSION.fullmatch(value):
        raise ValueError(f'"{value[:40]}" is no version, such as 1.2.3')
    return value


class Price(Section):
    """US dollars per million tokens."""

    input: float = Field(ge=0, allow_inf_nan=False, description="Of the prompt.")
    cached: float | None = Field(
        default=None, ge=0, allow_inf_nan=False, description="Of what the service had in its cache; default: as input."
    )
    output: float = Field(ge=0, allow_inf_nan=False, description="Of what the model wrote.")

    def of(self, input_tokens: int, cached_tokens: int, output_tokens: int) -> float:
        """Return the cost in US dollars. `input_tokens` includes the cached ones."""
        cached = self.input if self.cached is None else self.cached
        fresh = max(0, input_tokens - cached_tokens)
        return (fresh * self.input + cached_tokens * cached + output_tokens * self.output) / 1_000_000


class NoKwargs(Section):
    """The kwargs of agents that accept none."""


class ShellLoopKwargs(Section):
    max_turns: int = Field(default=100, ge=1, le=100_000, description="Answers of the model, at most.")
    max_total_tokens: int | None = Field(
        default=None, ge=1, description="Tokens of all its prompts and answers together, at most."
    )
    max_tokens: int | None = Field(default=4096, ge=1, description="Of one answer; null: as the service has it.")
    temperature: float | None = Field(default=None, ge=0, le=100, description="Default: the service's own.")
    top_p: float | None = Field(default=None, gt=0, le=1, description="Default: the service's own.")
    seed: int | None = Field(default=None, ge=0, lt=1 << 63, description="Sent with every request.")
    extra_body: dict[str, Any] = Field(
        default_factory=dict[str, Any], description="Further keys of every request to base_url, as they are."
    )
    command_timeout_sec: float = Field(default=120, gt=0, le=86_400, description="Of one block.")
    max_output_bytes: int = Field(
        default=10_000, ge=100, le=1 << 20, description="Of what a block printed, shown to the model: head and tail."
    )
    system_prompt: str | None = Field(default=None, min_length=1, description="Instead of the built-in one.")
    api_key_env: str | None = Field(
        default=None,
        pattern=_VARIABLE,
        description="Variable with the key of base_url, of the agent's env or of the worker; default: OPENAI_API_KEY.",
    )
    api_retries: int = Field(default=4, ge=0, le=100, description="Further tries at a request that failed.")
    request_timeout_sec: float = Field(default=600, gt=0, le=86_400, description="Of one request.")
    price: Price | None = Field(default=None, description="US dollars per million tokens: input, cached, output.")


class CodingCliKwargs(Section):
    version: Annotated[Text, AfterValidator(_version)] | None = Field(
        default=None, description="Of the program; default: the newest, looked up once a day."
    )
    bundle: str | None = Field(
        default=None, min_length=1, description="A .tar of an installation, on the worker, instead of installing."
    )
    cache: bool = Field(default=True, description="Keep the installation on the worker for later trials.")
    api_key_env: str | None = Field(
        default=None, pattern=_VARIABLE, description="Variable of the worker that holds the key; default: the agent's."
    )
    args: list[Text] = Field(default_factory=list[str], description="Further arguments of its command line.")
    price: Price | None = Field(default=None, description="Where the program prints tokens and no cost.")


@dataclass(frozen=True, slots=True)
class AgentKind:
    """A built-in agent. If `reserved`, no other agent of a job may have its name. `model_example` is a `model_name` in
    the form that it expects; `needs_model` means that it has no default."""

    name: str
    summary: str
    kwargs: type[Section] = NoKwargs
    reserved: bool = False
    needs_model: bool = False
    model_example: str = ""


def _cli(name: str, summary: str, example: str, *, needs_model: bool = True) -> AgentKind:
    return AgentKind(name, summary, CodingCliKwargs, needs_model=needs_model, model_example=example)


KINDS: dict[str, AgentKind] = {
    kind.name: kind
    for kind in (
        AgentKind(ORACLE, "runs the task's solution", reserved=True),
        AgentKind(NOP, "does nothing", reserved=True),
        AgentKind(SHELL_LOOP, "asks a model and runs the shell blocks of its answers", ShellLoopKwargs),
        _cli("claude-code", "Anthropic's Claude Code", "anthropic/claude-sonnet-4-5", needs_model=False),
        _cli("codex", "OpenAI's Codex CLI", "openai/gpt-5-codex", needs_model=False),
        _cli("gemini-cli", "Google's Gemini CLI", "google/gemini-2.5-pro", needs_model=False),
        _cli("aider", "Aider", "openai/gpt-5"),
        _cli("opencode", "OpenCode", "anthropic/claude-sonnet-4-5"),
        _cli("qwen-code", "Qwen Code", "qwen3-coder-plus"),
        _cli("goose", "Goose", "anthropic/claude-sonnet-4-5"),
        _cli("mini-swe-agent", "mini-SWE-agent", "openai/gpt-5"),
        _cli("openhands", "OpenHands CLI", "openai/gpt-5"),
    )
}
ALIASES = {"qwen-coder": "qwen-code"}
"""Harbor's names for the same agents."""


def kind_of(name: str) -> AgentKind | None:
    """Return the built-in agent with that name, or with that name in Harbor."""
    return KINDS.get(ALIASES.get(name, name))


def known_names() -> list[str]:
    """Return the names of the built-in agents and of those from installed packages."""
    return [*KINDS, *sorted(entry_points(group=GROUP).names - KINDS.keys())]


def unknown_agent(name: str) -> str:
    """Return the message for an unknown name, or "" if it is known."""
    names = known_names()
    if kind_of(name) is not None or name in names:
        return ""
    near = get_close_matches(name, [*names, *ALIASES], n=1)
    hint = f'; or did you mean "{near[0]}"?' if near else f"; known are {', '.join(names)}"
    return f'"{name}" is no agent: give it execute, which is bash, or import_path{hint}'


def kwargs_faults(kind: AgentKind, kwargs: dict[str, Any]) -> Iterator[tuple[tuple[str | int, ...], str]]:
    """Yield (place below `kwargs`, fault)."""
    try:
        kind.kwargs.model_validate(kwargs, strict=True)
    except ValidationError as error:
        for entry in error.errors(include_url=False):
            place = tuple(entry["loc"])
            if entry["type"] == "extra_forbidden":
                yield place, _unknown_key(kind, place)
            else:
                yield place, describe(cast("dict[str, Any]", entry), str(place[-1]) if place else "", "keys and values")


def _unknown_key(kind: AgentKind, place: tuple[str | int, ...]) -> str:
    section: type[Section] = Price if place[:-1] == ("price",) else kind.kwargs
    valid = list(section.model_fields)
    if not valid:
        return f"{kind.name} takes no kwargs: remove it"
    near = get_close_matches(str(place[-1]), valid, n=1, cutoff=0.6)
    return f'unknown key; did you mean "{near[0]}"?' if near else f"unknown key; {kind.name} takes {', '.join(valid)}"
